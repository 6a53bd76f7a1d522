"""`AsyncLLM`: one thread steps the engine, coroutines of an event loop get their outputs.

The stepping thread alone touches the engine. Others leave it commands (add, abort, stop), which it takes between steps;
it hands outputs over by one call into each event loop a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Unpack

from .async_stream import Stream, accept, call_in, reject, set_all
from .async_types import EngineStats, EngineStoppedError, QueueFullError, RequestOptions
from .config import EngineConfig, Settings
from .engine.request import RequestInput
from .engine.request_book import AnyRequest
from .llm import Message, Params, Prompt, TokensPrompt, chat_prompt, read_prompt
from .loading import LoadedModel, load_engine
from .model.runner import ModelRunner
from .outputs import RequestOutput
from .sampling import SamplingParams

__all__ = ["AsyncLLM", "EngineStats", "EngineStoppedError", "QueueFullError", "RequestOptions"]

#: Longest sleep of the idle stepping thread, so that its heartbeat goes on.
_IDLE_SECONDS = 0.5
#: So many deadlines of requests that have ended are kept at least before they are sorted out.
_SPARE_DEADLINES = 16
#: Prompts longer than this many characters are encoded outside the event loop, where grammars are compiled too.
_LONG_PROMPT = 4096


class AsyncLLM:
    """A converted model for many coroutines; settings as for LLM.

    max_unfinished: requests beyond this many unfinished ones are refused with QueueFullError.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_unfinished: int = 4096,
        runner: ModelRunner | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.model: LoadedModel = load_engine(path, EngineConfig(**settings), runner=runner)
        self._engine = self.model.engine
        self._max_unfinished = max_unfinished
        self._ids = count()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._streams: dict[str, Stream] = {}
        self._deadlines: list[tuple[float, int, str, Stream]] = []
        self._num_unfinished = 0
        self._heartbeat = time.monotonic()
        self._accepting = True
        self._stopping = False
        self._closed = False  # no command is taken any more
        self._thread = threading.Thread(target=self._run, name="pagegraft-engine", daemon=True)
        self._thread.start()

    # -- for coroutines -------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, options: RequestOptions | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's output so far, last of all the finished one. Leaving the loop early aborts it.

        Raises RequestError, SamplingParamsError or TokenizerError for a request that can never run, QueueFullError
        when too many are unfinished, EngineStoppedError during and after `shutdown`, or when the engine's thread died.
        """
        options = options or RequestOptions()
        params = sampling_params if sampling_params is not None else self.default_params()
        request_id = options.request_id or f"request-{next(self._ids)}"
        is_long = isinstance(prompt, str) and len(prompt) > _LONG_PROMPT
        if is_long or (isinstance(params, SamplingParams) and params.structured_outputs is not None):
            source = await asyncio.to_thread(read_prompt, prompt, params, request_id, self.model)
        else:
            source = read_prompt(prompt, params, request_id, self.model)
        source = replace(source, priority=options.priority, cache_salt=options.cache_salt)
        stream = self._submit(source, options)
        try:
            await stream.accepted
            while True:
                await stream.event.wait()
                stream.event.clear()
                if stream.failure is not None:
                    raise stream.failure
                output, stream.latest = stream.latest, None
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            if not stream.done:
                self._tell(lambda: self._abort(request_id, stream))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        options: RequestOptions | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation through the model's chat template. Raises ChatTemplateError too."""
        prompt = await asyncio.to_thread(self.chat_prompt, messages, **template)
        async with contextlib.aclosing(self.generate(prompt, sampling_params, options)) as outputs:
            async for output in outputs:
                yield output

    def chat_prompt(self, messages: Sequence[Message], **template: Any) -> TokensPrompt:
        """The prompt of a conversation. Raises ChatTemplateError or TokenizerError."""
        return chat_prompt(self.model, messages, **template)

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json) under `overrides`."""
        return SamplingParams.from_generation_config(self.model.text.generation_config, **overrides)

    def abort(self, request_id: str) -> None:
        """Ends a request soon, in whatever state it is; its iterator gets a last output with reason "abort"."""
        self._tell(lambda: self._end(request_id, "abort"))

    def stats(self) -> EngineStats:
        """A look from outside; numbers may be a step old."""
        scheduler = self._engine.scheduler
        pools = scheduler.cache.pools
        return EngineStats(
            alive=self._thread.is_alive(),
            heartbeat_age=time.monotonic() - self._heartbeat,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_unfinished=self._num_unfinished,
            kv_usage=max(pool.num_owned / pool.num_blocks for pool in pools),
            counters=replace(scheduler.counters),
        )

    async def shutdown(self, *, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, lets those that run end for up to `drain_seconds`, aborts the rest, and stops."""
        self._accepting = False
        end = time.monotonic() + drain_seconds
        while self._num_unfinished and self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(min(0.02, max(0.0, end - time.monotonic())))
        self._stopping = True
        self._tell(lambda: None)
        await asyncio.to_thread(self._thread.join)

    # -- between the threads --------------------------------------------------------------------------------------

    def _submit(self, source: RequestInput, options: RequestOptions) -> Stream:
        if not self._accepting:
            raise EngineStoppedError("the engine is shutting down and takes no more requests")
        if self._num_unfinished >= self._max_unfinished:
            raise QueueFullError(
                f"{self._num_unfinished} requests are unfinished, the limit is {self._max_unfinished}; try again later"
            )
        stream = Stream(options)
        self._count(1)
        if not self._tell(lambda: self._add(source, options, stream)):
            self._count(-1)
            raise EngineStoppedError("the engine has stopped and takes no more requests")
        return stream

    def _count(self, change: int) -> None:
        with self._wake:  # both threads count
            self._num_unfinished += change

    def _tell(self, command: Callable[[], None]) -> bool:
        """Leaves a command for the stepping thread; False when that takes none any more."""
        with self._wake:
            if not self._closed:
                self._commands.append(command)
                self._wake.notify()
            return not self._closed

    # -- the stepping thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "it was shut down"
        try:
            self._serve()
            for request_id in list(self._streams):
                self._end(request_id, "abort")
        except BaseException as error:
            reason = f"its thread died of {type(error).__name__}: {error}; start it again"
            raise
        finally:
            self._close(EngineStoppedError(f"the engine has stopped: {reason}"))

    def _close(self, error: EngineStoppedError) -> None:
        """The last that the thread does, whatever ended it: nobody is left waiting."""
        self._accepting = False
        with self._wake:
            self._closed = True
        for request_id, stream in list(self._streams.items()):  # there are some only when the thread died
            self._break(request_id, stream, error)
        for command in self._commands:  # adds, which are refused now, and ends of what has ended
            with contextlib.suppress(Exception):
                command()
        self._commands.clear()
        self._engine.close()

    def _serve(self) -> None:
        """Steps until it is told to stop."""
        while True:
            self._heartbeat = time.monotonic()
            with self._wake:
                if not self._commands and not self._engine.has_work and not self._stopping:
                    self._wake.wait(_IDLE_SECONDS)
            while self._commands:
                self._commands.popleft()()
            self._expire()
            if self._stopping:
                break
            if self._engine.has_work:
                self._step()

    def _step(self) -> None:
        try:
            changed = self._engine.step()
        except Exception as error:  # whatever it is, the process and later requests go on
            self._fail_all(error)
            return
        self._publish(changed)

    def _fail_all(self, error: Exception) -> None:
        """Nobody knows whose fault it was: every request ends, with the error."""
        text = f"the engine failed on a step: {type(error).__name__}: {error}"
        for request_id in list(self._streams):
            self._end(request_id, "error", text)

    def _add(self, source: RequestInput, options: RequestOptions, stream: Stream) -> None:
        try:
            if self._closed:
                raise EngineStoppedError("the engine has stopped and takes no more requests")
            self._engine.add(source)
        except Exception as error:  # goes to the caller, whatever it is
            stream.done = True
            self._count(-1)
            call_in(stream.loop, reject, stream.accepted, error)
            return
        self._streams[source.request_id] = stream
        if options.timeout is not None:
            entry = (time.monotonic() + options.timeout, next(self._ids), source.request_id, stream)
            heapq.heappush(self._deadlines, entry)
            if len(self._deadlines) > 2 * len(self._streams) + _SPARE_DEADLINES:
                # Most are of requests that have ended, and keep what those held.
                self._deadlines = [e for e in self._deadlines if self._streams.get(e[2]) is e[3]]
                heapq.heapify(self._deadlines)
        call_in(stream.loop, accept, stream.accepted)

    def _abort(self, request_id: str, stream: Stream) -> None:
        """The coroutine went away: its request ends, unless another one has its name by now."""
        if self._streams.get(request_id) is stream:
            self._end(request_id, "abort")
        stream.done = True

    def _end(self, request_id: str, reason: str, error: str | None = None) -> None:
        request = self._engine.abort(request_id, reason, error)
        if request is not None:
            self._publish([request])

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request_id, stream = heapq.heappop(self._deadlines)
            if self._streams.get(request_id) is stream:
                self._end(request_id, "timeout")

    def _publish(self, changed: Sequence[AnyRequest]) -> None:
        woken: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for request in changed:
            stream = self._streams.get(request.request_id)
            if stream is None:
                continue
            try:
                wake = stream.offer(request)
            except Exception as error:  # its text cannot be told
                self._break(request.request_id, stream, error)
                with contextlib.suppress(Exception):
                    self._engine.abort(request.request_id, "error", str(error))
                continue
            if wake:
                woken.setdefault(stream.loop, []).append(stream)
            if request.is_finished:
                stream.done = True
                self._count(-1)
                del self._streams[request.request_id]
        for loop, streams in woken.items():
            call_in(loop, set_all, streams)

    def _break(self, request_id: str, stream: Stream, error: Exception) -> None:
        """Ends a stream with an exception instead of an output."""
        stream.failure, stream.done = error, True
        self._count(-1)
        del self._streams[request_id]
        call_in(stream.loop, reject, stream.accepted, error)
        call_in(stream.loop, stream.event.set)
