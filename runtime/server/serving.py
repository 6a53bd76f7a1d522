"""Runs the requests behind one HTTP request and shapes their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..async_engine import AsyncLLM, RequestOptions
from ..llm import Params, Prompt
from ..outputs import CompletionOutput, RequestOutput
from ..text import TokenizerError
from .errors import ApiError, error_body
from .messages import check_tool_choice
from .metrics import RequestClock, ServerMetrics
from .protocol import ChatRequest, CommonRequest, CompletionRequest
from .responses import Deltas, chat_logprobs, completion_logprobs, finish_reason, usage

__all__ = ["Job", "Serving"]


#: What the chat template gets from other fields of the body.
_RESERVED = {"messages", "tools", "add_generation_prompt", "model", "self"}


class Job:
    """One HTTP request: its prompts, parameters and how its answers are written."""

    def __init__(self, body: CommonRequest, prompts: Sequence[Prompt], params: Params, kind: str, model: str) -> None:
        self.body = body
        self.prompts = prompts
        self.params = params
        self.is_chat = kind == "chat"
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """The fields that every response and chunk begins with."""
        if self.is_chat:
            return {**self._head, "object": "chat.completion.chunk" if chunk else "chat.completion"}
        return {**self._head, "object": "text_completion"}

    @property
    def choices_per_prompt(self) -> int:
        """Choices returned for each prompt."""
        return self.params.n


class Serving:
    """Turns bodies into jobs, and jobs into responses or streams."""

    def __init__(self, llm: AsyncLLM, metrics: ServerMetrics, model_name: str, *, timeout: float | None) -> None:
        self.llm = llm
        self.model_name = model_name
        self._metrics = metrics
        self._timeout = timeout

    # -- bodies ---------------------------------------------------------------------------------------------------

    def completion_job(self, body: CompletionRequest) -> Job:
        """Raises ApiError, SamplingParamsError or TokenizerError for a body that cannot be served."""
        self.check_model(body.model)
        if body.suffix:
            raise ApiError("suffix is not supported: this model writes forwards", param="suffix")
        more: dict[str, Any] = {"logprobs": body.logprobs}
        if body.echo:
            more |= {"echo": True, "prompt_logprobs": body.logprobs}
        params = body.params(self.llm, body.max_tokens, **more)
        prompts: list[Prompt] = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in body.prompts()]
        return Job(body, prompts, params, "completion", self.model_name)

    def chat_job(self, body: ChatRequest) -> Job:
        """Raises ApiError, SamplingParamsError or ChatTemplateError for a body that cannot be served."""
        self.check_model(body.model)
        check_tool_choice(body.tool_choice)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        variables = body.chat_template_kwargs or {}
        if reserved := sorted(_RESERVED & variables.keys()):
            raise ApiError(
                f"chat_template_kwargs holds {reserved[0]!r}, which is a field of the body itself",
                param="chat_template_kwargs",
            )
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        params = body.params(self.llm, limit, logprobs=logprobs)
        prompt = self.llm.chat_prompt(
            body.plain_messages(),
            tools=None if body.tool_choice == "none" else body.tools,
            add_generation_prompt=body.add_generation_prompt,
            **variables,
        )
        return Job(body, [prompt], params, "chat", self.model_name)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a name that is not the served model's."""
        if name not in (None, "", self.model_name):
            raise ApiError(
                f"the model '{name}' does not exist; this server has '{self.model_name}'",
                status=404,
                param="model",
                code="model_not_found",
            )

    # -- running --------------------------------------------------------------------------------------------------

    async def _outputs(self, job: Job, index: int, *, every: bool) -> AsyncIterator[RequestOutput]:
        options = RequestOptions(
            request_id=f"{job.id}-{index}",
            stream=every,
            priority=job.body.priority,
            cache_salt=job.body.cache_salt or "",
            timeout=self._timeout,
        )
        clock = RequestClock(self._metrics)
        async with contextlib.aclosing(self.llm.generate(job.prompts[index], job.params, options)) as outputs:
            async for output in outputs:
                clock.see(output)
                yield output

    async def _last(self, job: Job, index: int) -> RequestOutput:
        outputs = [output async for output in self._outputs(job, index, every=False)]
        return outputs[-1]

    async def respond(self, job: Job) -> dict[str, Any]:
        """The whole response. When it is cancelled, or one prompt fails, the others are aborted."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._last(job, i)) for i in range(len(job.prompts))]
        outputs = [task.result() for task in tasks]
        choices = [
            self._choice(job, output, choice, at * job.choices_per_prompt + choice.index)
            for at, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return {**job.head(chunk=False), "choices": choices, "usage": usage(outputs)}

    def _choice(self, job: Job, output: RequestOutput, choice: CompletionOutput, index: int) -> dict[str, Any]:
        reason = finish_reason(choice)
        shape: dict[str, Any] = {"index": index, "logprobs": self._logprobs(job, output, choice, 0)}
        if job.is_chat:
            shape["message"] = {"role": "assistant", "content": choice.text}
        else:
            shape["text"] = choice.text
        return {**shape, "finish_reason": reason, "stop_reason": choice.stop_reason}

    def _logprobs(
        self, job: Job, output: RequestOutput, choice: CompletionOutput, sent: int, offset: int = 0
    ) -> dict[str, Any] | None:
        """Log-probabilities of a choice's tokens from number `sent` on, whose text begins at `offset`."""
        if choice.logprobs is None:
            return None
        entries = list(choice.logprobs[sent:])
        if job.is_chat:
            return chat_logprobs(entries, self.token_text)
        if sent == 0 and output.prompt_logprobs is not None:
            tokens = [*output.prompt_token_ids, *choice.token_ids]
            return completion_logprobs(tokens, [*output.prompt_logprobs, *entries], self.token_text, 0)
        return completion_logprobs(choice.token_ids[sent:], entries, self.token_text, offset)

    def token_text(self, token_id: int) -> str:
        """A token's text; its id in words for a model without a tokenizer."""
        try:
            return self.llm.model.text.tokenizer.decode([token_id], skip_special_tokens=False)
        except TokenizerError:
            return f"token_id:{token_id}"

    # -- streaming ------------------------------------------------------------------------------------------------

    async def events(self, job: Job, first: tuple[int, RequestOutput], rest: _Merged) -> AsyncIterator[str]:
        """The stream as server-sent events: chunks, the usage when asked for, and the end."""
        deltas = [Deltas() for _ in job.prompts]
        finished: list[RequestOutput] = []
        try:
            if job.is_chat:
                for index in range(job.choices_per_prompt):
                    yield self._event(job, index, {"role": "assistant", "content": ""})
            item: tuple[int, RequestOutput] | None = first
            while item is not None:
                at, output = item
                for choice in output.outputs:
                    for event in self._choice_events(job, at, output, choice, deltas[at]):
                        yield event
                if output.finished:
                    finished.append(output)
                item = await rest.next()
            if job.body.include_usage:
                yield _data({**job.head(chunk=True), "choices": [], "usage": usage(finished)})
        except Exception as error:  # the status line is out already: the error goes into the stream
            yield _data(error_body(error))
        finally:
            await rest.close()
        yield "data: [DONE]\n\n"

    def _choice_events(
        self, job: Job, at: int, output: RequestOutput, choice: CompletionOutput, deltas: Deltas
    ) -> list[str]:
        new = deltas.new(choice)
        if new is None:
            return []
        text, sent, ended = new
        index = at * job.choices_per_prompt + choice.index
        logprobs = self._logprobs(job, output, choice, sent, deltas.offsets.get(choice.index, 0))
        if logprobs is not None and logprobs.get("tokens"):
            deltas.offsets[choice.index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        events = []
        if text or logprobs is not None:
            events.append(self._event(job, index, {"content": text}, logprobs=logprobs))
        if ended:
            end = {"finish_reason": finish_reason(choice), "stop_reason": choice.stop_reason}
            events.append(self._event(job, index, {}, **end))
        return events

    def _event(self, job: Job, index: int, delta: dict[str, Any], **more: Any) -> str:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if job.is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        chunk = {**job.head(chunk=True), "choices": [{**choice, **more}]}
        if job.body.include_usage:
            chunk["usage"] = None
        return _data(chunk)

    async def start(self, job: Job) -> tuple[tuple[int, RequestOutput], _Merged]:
        """Starts a stream and waits for its first output, so that what can never run is refused with a status."""
        merged = _Merged([self._outputs(job, i, every=True) for i in range(len(job.prompts))])
        try:
            first = await merged.next()
        except BaseException:
            await merged.close()
            raise
        if first is None:
            raise ApiError("the engine gave no output", status=500)
        return first, merged


class _Merged:
    """Several streams as one, in order of arrival, each item with the number of its stream.

    Outputs are cumulative: a stream waits for its reader instead of queueing them, and goes on with the newest.
    """

    def __init__(self, streams: Sequence[AsyncIterator[RequestOutput]]) -> None:
        self._queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)
        self._open = len(streams)
        self._tasks = [asyncio.create_task(self._feed(i, s)) for i, s in enumerate(streams)]

    async def _feed(self, index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                await self._queue.put((index, output))
            await self._queue.put(None)
        except Exception as error:  # raised where the items are read
            await self._queue.put(error)

    async def next(self) -> tuple[int, RequestOutput] | None:
        """The next item, None after the last. Raises what any stream raised."""
        while self._open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._open -= 1
        return None

    async def close(self) -> None:
        """Ends all streams; requests that still run are aborted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
