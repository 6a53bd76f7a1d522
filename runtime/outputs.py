"""What callers get back. Names as in vLLM where the meaning is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sampling import TokenLogprobs

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One choice of a request, up to now.

    token_ids include the token that ended it; text leaves out stop token and stop string unless asked for.
    finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it goes on. error says why for the last.
    stop_reason: the stop token id or string that ended it.
    logprobs, cumulative_logprob: of the model's own distribution; None when not asked for.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Times in seconds of a monotonic clock; None where not reached."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A request and its choices, up to now.

    num_cached_tokens: prompt tokens whose keys and values came from the prefix cache when the request was first
    admitted. prompt_logprobs has None for the first token, which nothing precedes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    metrics: RequestMetrics
