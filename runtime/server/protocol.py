"""What clients send: OpenAI's request bodies with vLLM's extra fields. Unknown fields are ignored, as OpenAI does."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..async_engine import AsyncLLM
from ..sampling import BeamSearchParams, SamplingParams
from .errors import ApiError
from .messages import plain_messages
from .response_format import structured_outputs

__all__ = ["ChatRequest", "CommonRequest", "CompletionRequest", "StreamOptions"]

#: Most choices, or beams, of a prompt: each is a sequence of its own.
MAX_CHOICES = 128

#: Most likeliest tokens that are reported beside a token: memory grows with their number times that of the tokens.
MAX_LOGPROBS = 20

#: Most characters of all stop strings together, and of all bad words.
MAX_STOP_CHARACTERS = 4096

#: Fields that go to SamplingParams under their own names when the client gave them.
_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
)


class StreamOptions(BaseModel):
    """include_usage: one more chunk with the usage before the end of the stream."""

    include_usage: bool = False


class CommonRequest(BaseModel):
    """What both endpoints take. None leaves the model's own default (generation_config.json), or ours."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    best_of: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    priority: int = 0
    cache_salt: str | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream and self.stream_options is not None and self.stream_options.include_usage

    def params(self, llm: AsyncLLM, max_tokens: int | None, **more: Any) -> SamplingParams | BeamSearchParams:
        """The sampling parameters. Raises SamplingParamsError for a value out of range, ApiError for combinations."""
        for name in ("n", "best_of"):
            if (getattr(self, name) or 0) > MAX_CHOICES:
                raise ApiError(f"{name} is {getattr(self, name)}; this server gives at most {MAX_CHOICES}", param=name)
        for name, strings in (("stop", self.stop), ("bad_words", self.bad_words)):
            length = sum(map(len, [strings] if isinstance(strings, str) else strings or ()))
            if length > MAX_STOP_CHARACTERS:
                raise ApiError(
                    f"{name} has {length} characters; this server takes at most {MAX_STOP_CHARACTERS}", param=name
                )
        form = structured_outputs(self.response_format, self.structured_outputs)
        if self.use_beam_search:
            if form is not None:
                raise ApiError("a beam search has no structured outputs; leave use_beam_search out, or the form")
            return self._beam_params(max_tokens)
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise ApiError("best_of above n cannot be streamed: the best choices are known at the end only")
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given["structured_outputs"] = form
        values = {name: value for name, value in {**given, **more}.items() if value is not None}
        return llm.default_params(max_tokens=max_tokens, **values)

    def _beam_params(self, max_tokens: int | None) -> BeamSearchParams:
        if self.stream:
            raise ApiError("a beam search cannot be streamed: its result is known at the end only")
        n = self.n or 1
        return BeamSearchParams(
            beam_width=max(n, self.best_of or n),
            n=n,
            max_tokens=16 if max_tokens is None else max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    suffix: str | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each as text or token ids. Raises ApiError when there is none."""
        if self.prompt in ("", []):
            raise ApiError("prompt is empty: it needs at least one token", param="prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages with content as text. Raises ApiError for roles and content that are not supported."""
        return plain_messages(self.messages)
