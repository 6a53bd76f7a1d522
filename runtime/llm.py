"""`LLM`: a converted model, loaded, for use in one thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, Unpack

from .config import EngineConfig, Settings
from .engine.engine import Engine
from .engine.errors import RequestError
from .engine.request import RequestInput
from .engine.request_book import AnyRequest
from .loading import LoadedModel, load_engine
from .model.runner import ModelRunner
from .outputs import RequestOutput
from .sampling import BeamSearchParams, SamplingParams
from .text import Tokenizer

__all__ = ["LLM", "Message", "Params", "Prompt", "TokensPrompt", "chat_prompt", "read_prompt"]

Message = Mapping[str, Any]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt
Params = SamplingParams | BeamSearchParams


class LLM:
    """A converted model and its engine.

    Settings, all by name (EngineConfig says what they do): kv_memory, num_blocks, block_size, max_num_batched_tokens,
    max_num_seqs, enable_prefix_caching, num_speculative_tokens, num_threads, device, debug, shared_memory,
    chat_template.

    >>> llm = LLM("smollm2-paged")
    >>> [output.outputs[0].text for output in llm.generate(["The capital of France is"])]

    Raises ManifestError or ConfigurationError when the model cannot be loaded.
    """

    def __init__(self, path: str | Path, *, runner: ModelRunner | None = None, **settings: Unpack[Settings]) -> None:
        """Loads the model. `runner` replaces the one that the device would get."""
        self.model: LoadedModel = load_engine(path, EngineConfig(**settings), runner=runner)
        self._ids = count()

    @property
    def engine(self) -> Engine:
        """The engine, for those who step it themselves."""
        return self.model.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError when it has none."""
        return self.model.text.tokenizer

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json) under `overrides`."""
        return SamplingParams.from_generation_config(self.model.text.generation_config, **overrides)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts together, in their order.

        Every prompt is checked before the first runs: RequestError or SamplingParamsError leave the engine as it was.
        """
        requests = self._submit(prompts, sampling_params)
        for _ in self._run(requests):
            pass
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several together. `template` goes to the chat template (`tools`, ...)."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(c, **template) for c in conversations], sampling_params)

    def chat_prompt(self, messages: Sequence[Message], **template: Any) -> TokensPrompt:
        """The prompt of a conversation. Raises ChatTemplateError or TokenizerError."""
        return chat_prompt(self.model, messages, **template)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields a request's output so far whenever it has more. Leaving the loop early aborts."""
        changes = self._run(self._submit(prompts, sampling_params))
        next(changes)  # so that a stream that nobody ever reads from ends its requests too
        return (request.output() for request in changes if request is not None)

    def _run(self, requests: list[AnyRequest]) -> Iterator[AnyRequest | None]:
        """Steps the engine until the requests have ended; yields None, then each request whenever it has changed."""
        mine = dict.fromkeys(requests)
        try:
            yield None
            while mine:
                # The steps of another call may have ended some.
                ended = [request for request in mine if request.is_finished]
                for request in ended or self.engine.step():
                    if request not in mine:
                        continue
                    if request.is_finished:
                        del mine[request]
                    yield request
        finally:
            for request in mine:
                self.engine.abort(request.request_id)

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None,
    ) -> list[AnyRequest]:
        if not isinstance(prompts, (str, Mapping, Sequence)):
            raise RequestError(f"the prompts are a {type(prompts).__name__}; give a prompt or a list of prompts")
        items: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        if sampling_params is None:
            sampling_params = self.default_params()
        each = [sampling_params] * len(items) if isinstance(sampling_params, Params) else list(sampling_params)
        if len(each) != len(items):
            raise RequestError(f"{len(items)} prompts came with {len(each)} sampling parameters: give one or as many")
        requests: list[AnyRequest] = []
        try:
            for prompt, params in zip(items, each, strict=True):
                source = read_prompt(prompt, params, str(next(self._ids)), self.model)
                requests.append(self.engine.add(source))
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return requests

    def close(self) -> None:
        """Ends what still runs and gives the caches back."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def chat_prompt(model: LoadedModel, messages: Sequence[Message], **template: Any) -> TokensPrompt:
    """The prompt of a conversation by the model's own chat template.

    Raises ChatTemplateError, TokenizerError, or RequestError for one so long that it need not be encoded.
    """
    text = model.text.chat_template_for(tools=bool(template.get("tools"))).render(messages, **template)
    return {"prompt_token_ids": _encode(model, text, add_special_tokens=False)}


def read_prompt(prompt: Prompt, params: Params, request_id: str, model: LoadedModel) -> RequestInput:
    """A prompt with its text encoded, bad words turned into ids and structured outputs compiled.

    Raises TokenizerError without a tokenizer, RequestError for what is neither text nor token ids, or far too long,
    SamplingParamsError for a form of the output that cannot be compiled.
    """
    text = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, str):
        ids: Sequence[int] = _encode(model, prompt, add_special_tokens=True) if prompt else []
    else:
        ids = _token_ids(prompt)
    if isinstance(params, SamplingParams) and params.bad_words:
        tokenizer = model.text.tokenizer
        params = params.with_bad_word_ids(lambda word: tokenizer.encode(word, add_special_tokens=False))
    grammar = None
    if isinstance(params, SamplingParams) and params.structured_outputs is not None:
        grammar = model.grammars.compile(params.structured_outputs)
    return RequestInput(request_id=request_id, prompt_token_ids=ids, params=params, prompt=text, grammar=grammar)


def _encode(model: LoadedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text, which is not encoded when it cannot fit: that would take seconds for some megabytes."""
    tokenizer, limit = model.text.tokenizer, model.engine.limits.max_context
    least = 0 if tokenizer.reach is None else tokenizer.reach.least_tokens(text)
    if least >= limit:
        raise RequestError(
            f"the prompt has {len(text)} characters, which are {least} tokens or more, and at most {limit - 1} fit "
            f"before a first output token (a context of {limit}, by model and KV memory): shorten it"
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _token_ids(prompt: object) -> Sequence[int]:
    """The ids of a prompt that is no text. Raises RequestError for anything else."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if ids is None or isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(
            f"{prompt!r:.100} is no prompt; give a text or token ids as {{'prompt_token_ids': [1, 2, 3]}}"
        )
    found = list(ids)
    for kind in dict.fromkeys(map(type, found)):
        if not issubclass(kind, Integral) or issubclass(kind, bool):
            raise RequestError(f"prompt_token_ids hold a {kind.__name__}; they must be whole numbers")
    return found
