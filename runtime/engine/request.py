"""A request in the engine: its choices, each with its sequence, sampling state and text."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ..outputs import CompletionOutput, RequestMetrics, RequestOutput
from ..sampling import BeamSearchParams, Grammar, SamplingParams, SamplingState, TokenLogprobs, fresh_seed
from ..text import StopChecker, StopHit, TextStream, Tokenizer
from .errors import RequestError
from .sequence import Sequence

__all__ = ["PROMPT_CONTEXT", "BaseRequest", "Choice", "ModelLimits", "Request", "RequestInput", "check_prompt"]

#: Tokens of the prompt that decide how the output's first characters look.
PROMPT_CONTEXT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInput:
    """What a caller asks for. `prompt` is kept for the answer only; lower `priority` values run first.

    cache_salt: requests share cached prefixes only with those of the same salt.
    grammar: of the parameters' structured_outputs, compiled.
    """

    request_id: str
    prompt_token_ids: Items[int]
    params: SamplingParams | BeamSearchParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What requests are checked and ended by. `max_context` is the most tokens of a sequence, prompt and output."""

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None


class BaseRequest:
    """What every kind of request has: what was asked for, and when what happened (seconds of a monotonic clock)."""

    __slots__ = ("arrival_time", "finish_time", "first_token_time", "source")

    def __init__(self, source: RequestInput) -> None:
        self.source = source
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.source.request_id

    def metrics(self) -> RequestMetrics:
        """The times, for its output."""
        return RequestMetrics(arrival=self.arrival_time, first_token=self.first_token_time, finished=self.finish_time)


class Choice:
    """One output stream of a request."""

    __slots__ = ("error", "hit", "logprobs", "request", "sampling", "sequence", "stream", "total_logprob")

    def __init__(self, request: Request, index: int, limits: ModelLimits) -> None:
        source, params = request.source, request.params
        self.request = request
        self.sequence = Sequence(
            source.request_id,
            source.prompt_token_ids,
            request.max_tokens,
            index=index,
            priority=source.priority,
            cache_salt=source.cache_salt,
            read_cache=params.prompt_logprobs is None,
        )
        self.sequence.owner = self
        self.sampling = SamplingState(
            params,
            vocab_size=limits.vocab_size,
            seed=request.seed,
            sequence=index,
            prompt_token_ids=source.prompt_token_ids,
            eos_token_ids=limits.eos_token_ids,
            grammar=source.grammar,
        )
        self.stream: TextStream | None = None
        if limits.tokenizer is not None:
            context = source.prompt_token_ids[-PROMPT_CONTEXT:]
            self.stream = TextStream(limits.tokenizer, params, prompt_token_ids=context)
        self.hit: StopHit | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.total_logprob = 0.0

    def take(self, token: int) -> StopHit | None:
        """Adds a sampled token and its text; returns why the choice ends here, if it does."""
        self.sequence.append(token)
        sampling, stream = self.sampling, self.stream
        sampling.append(token)
        hit = self.request.stops.check(token, sampling.num_output_tokens)
        grammar = sampling.grammar
        completes = grammar is not None and grammar.is_complete and (hit is None or hit.finish_reason == "length")
        if completes:
            hit = None  # unlike a stop token, this one belongs to the text
        if stream is not None:
            if hit is None:
                stream.push(token)
            else:
                stream.finish(token, hit)
            if completes:
                stream.finish()
            hit = stream.hit or hit
        if completes:
            hit = hit or StopHit("stop")
        if hit is not None:
            self.hit = hit
        return hit

    def cut_short(self) -> None:
        """Lets out the text that is still held back, when the choice ends for no reason of its own."""
        if self.stream is not None and self.hit is None:
            self.stream.finish()

    def rank(self) -> tuple[bool, float]:
        """By which the choices of `best_of` are ranked: mean log-probability, but an error comes first to be seen."""
        return self.error is not None, self.total_logprob / max(1, self.sampling.num_output_tokens)

    def output(self, index: int) -> CompletionOutput:
        """The choice as its caller sees it."""
        sequence, params = self.sequence, self.request.params
        return CompletionOutput(
            index=index,
            text=self.request.echoed + (self.stream.text if self.stream else ""),
            token_ids=sequence.tokens[sequence.num_prompt_tokens :].tolist(),
            finish_reason=sequence.finish_reason,
            stop_reason=self.hit.stop_reason if self.hit else None,
            error=self.error,
            logprobs=list(self.logprobs) if params.logprobs is not None else None,
            cumulative_logprob=self.total_logprob if self.sampling.logprobs is not None else None,
        )


class Request(BaseRequest):
    """Holds the choices of one request. Until the first token, only the first has a sequence in the scheduler.

    Raises RequestError or SamplingParamsError when it can never run.
    """

    __slots__ = (
        "choices",
        "echoed",
        "forked",
        "max_tokens",
        "num_unfinished",
        "params",
        "prompt_logprobs",
        "seed",
        "stops",
    )

    def __init__(self, source: RequestInput, params: SamplingParams, limits: ModelLimits) -> None:
        length = len(source.prompt_token_ids)
        check_prompt(source, limits)
        if params.stop and limits.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        room = limits.max_context - length
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        super().__init__(source)
        self.params = params
        self.max_tokens = length + wanted
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.stops = StopChecker(params, eos_token_ids=limits.eos_token_ids, max_output_tokens=room)
        self.echoed = ""
        if params.echo and limits.tokenizer is not None:
            self.echoed = (
                source.prompt if source.prompt is not None else limits.tokenizer.decode(source.prompt_token_ids)
            )
        self.choices = [Choice(self, index, limits) for index in range(params.num_sequences)]
        self.num_unfinished = len(self.choices)  # the engine counts, which ends them
        self.forked = len(self.choices) == 1
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def is_finished(self) -> bool:
        """True when every choice has ended."""
        return self.num_unfinished == 0

    def output(self) -> RequestOutput:
        """The request as its caller sees it; with `best_of`, the best choices once all have ended."""
        choices, n = self.choices, self.params.n
        if n < len(choices):
            choices = sorted(choices, key=Choice.rank, reverse=True) if self.is_finished else choices
            choices = choices[:n]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.source.prompt,
            prompt_token_ids=self.source.prompt_token_ids,
            outputs=[choice.output(index) for index, choice in enumerate(choices)],
            finished=self.is_finished,
            num_cached_tokens=max(0, self.choices[0].sequence.num_cached_tokens),
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            metrics=self.metrics(),
        )


def check_prompt(source: RequestInput, limits: ModelLimits) -> None:
    """Raises RequestError for a prompt that the model or the pool cannot take."""
    ids = source.prompt_token_ids
    if not isinstance(source.cache_salt, str):
        raise RequestError(f"cache_salt is a {type(source.cache_salt).__name__}; it must be a string")
    if not len(ids):
        raise RequestError("the prompt is empty: it needs at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        raise RequestError(
            f"the prompt holds token id {low if low < 0 else high}, and the model's vocabulary ends at "
            f"{limits.vocab_size - 1}; use the tokenizer of this model"
        )
    if len(ids) >= limits.max_context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and at most {limits.max_context - 1} fit before a first output token "
            f"(a context of {limits.max_context}, by model and KV memory): shorten it, or give more --kv-memory if "
            "the model's own context is longer"
        )
