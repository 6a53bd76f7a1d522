"""What a caller may ask of the sampling of one request: names as in vLLM and OpenAI."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from .errors import SamplingParamsError
from .structured import StructuredOutputsParams

__all__ = ["GREEDY_BELOW", "BeamSearchParams", "SamplingParams"]

#: A temperature below this is greedy: dividing float32 logits by it would leave nothing but the maximum.
GREEDY_BELOW = 1e-5

#: Any context's length to this power is a finite float64.
MAX_LENGTH_PENALTY = 10.0

#: Logits times or over these, or their inverses, are finite float32 numbers, and no factor is zero.
MAX_TEMPERATURE = 1e6
MAX_REPETITION_PENALTY = 1e6

#: What `SamplingParams.from_generation_config` reads: key in generation_config.json -> field here.
_GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Immutable; sequences may be given as lists.

    How many:
        n: choices returned. Choice i draws from its own random stream (see `seed`).
        best_of: choices generated, of which the `n` with the highest mean log-probability are returned; None means `n`.
    Shape of the distribution (order of application: `pagegraft.runtime.sampling.sampler.Sampler`):
        temperature: divides the logits; 0 (below 1e-5) is greedy, ties going to the lowest token id; at most 1e6.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities add up to at least this.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        typical_p: keep the smallest set of tokens whose information is closest to the entropy and adds up to this mass.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once and once per
            occurrence; in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; in
            [1e-6, 1e6].
        logit_bias: token id -> value in [-100, 100] added to its logit.
        allowed_token_ids: nothing else may be generated.
        bad_words: strings that may not be generated; the engine turns them into token ids (`with_bad_word_ids`).
        bad_words_token_ids: token sequences of which the last token may not follow the ones before it in the output.
        structured_outputs: the form that the whole output must have (JSON, a regular expression, ...); it may end only
            where it has this form, and ends where nothing can follow, `min_tokens` or not. With `ignore_eos` it ends
            there only. `max_tokens` and `stop` cut it as they cut any other.
    When it ends:
        max_tokens: output tokens at most; None means up to the model's context.
        min_tokens: before so many, end-of-sequence and `stop_token_ids` cannot be drawn and stop strings do not count.
        ignore_eos: end-of-sequence is a token like any other.
        stop: strings that end the output when they appear, wherever token borders fall.
        stop_token_ids: tokens that end the output.
        include_stop_str_in_output: whether the text keeps the stop string (or the stop token's text).
    What is reported:
        logprobs: log-probabilities of each chosen token and of so many likeliest ones (-1: all), of the model's own
            distribution, before any of the parameters above.
        prompt_logprobs: the same for the prompt's tokens.
        echo: the output's text begins with the prompt.
        skip_special_tokens: leave special tokens out of the text.
    seed: any integer. Token p of choice i depends on (seed, i, p) and the logits only, not on batch companions, order
        of arrival or preemption. None: the engine picks one at random.

    Raises SamplingParamsError for a value out of range.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        """Brings sequences into tuples and checks every field."""

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the class is frozen

        put("stop", _strings("stop", self.stop))
        put("bad_words", _strings("bad_words", self.bad_words))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put("bad_words_token_ids", tuple(_token_ids("bad_words_token_ids", ids) for ids in self.bad_words_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            put("logit_bias", _logit_bias(self.logit_bias))
        if self.top_k == -1:
            put("top_k", 0)
        _check_fields(self)

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for the request."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a drawn one."""
        return self.temperature < GREEDY_BELOW

    def with_bad_word_ids(self, encode: Callable[[str], list[int]]) -> SamplingParams:
        """These parameters with `bad_words` as token ids: each word as it is written and after a space.

        `encode` gives the token ids of a text without special tokens.
        """
        spelled = dict.fromkeys(tuple(encode(text)) for word in self.bad_words for text in (word, " " + word.lstrip()))
        return replace(self, bad_words=(), bad_words_token_ids=(*self.bad_words_token_ids, *(s for s in spelled if s)))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Parameters with a model's own defaults (the content of generation_config.json) under `overrides`.

        `"do_sample": false` means temperature 0. Keys that are absent or null leave our default.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(overrides) - known):
            raise SamplingParamsError(
                f"sampling parameter {unknown[0]!r} is unknown; known are {', '.join(sorted(known))}"
            )
        values = {
            ours: config[theirs] for theirs, ours in _GENERATION_CONFIG_FIELDS.items() if config.get(theirs) is not None
        }
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        return cls(**{**values, **overrides})


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """Beam search: the `beam_width` likeliest continuations are kept at each token.

    length_penalty: a finished beam scores (sum of log-probabilities) / (output length ** length_penalty);
        in [-10, 10].
    early_stopping: stop at the first moment that `beam_width` beams are finished; otherwise only when no live beam can
        still beat the worst of them.
    n: beams returned, best first; at most `beam_width`.

    Raises SamplingParamsError for a value out of range.
    """

    beam_width: int = 4
    n: int = 1
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    echo: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _whole("beam_width", self.beam_width, low=1)
        _whole("n", self.n, low=1, high=self.beam_width)
        _whole("max_tokens", self.max_tokens, low=1)
        _number("length_penalty", self.length_penalty, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY)


def _check_fields(p: SamplingParams) -> None:
    _whole("n", p.n, low=1)
    if p.best_of is not None:
        _whole("best_of", p.best_of, low=p.n)
        if p.is_greedy and p.best_of > 1:
            raise SamplingParamsError(
                f"best_of {p.best_of} with temperature 0 would generate the same output {p.best_of} times; "
                "set a temperature or leave best_of out",
                param="best_of",
            )
    _number("temperature", p.temperature, low=0.0, high=MAX_TEMPERATURE)
    _whole("top_k", p.top_k, low=0)
    _number("top_p", p.top_p, above=0.0, high=1.0)
    _number("min_p", p.min_p, low=0.0, high=1.0)
    _number("typical_p", p.typical_p, above=0.0, high=1.0)
    _number("presence_penalty", p.presence_penalty, low=-2.0, high=2.0)
    _number("frequency_penalty", p.frequency_penalty, low=-2.0, high=2.0)
    _number("repetition_penalty", p.repetition_penalty, low=1 / MAX_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY)
    if p.max_tokens is not None:
        _whole("max_tokens", p.max_tokens, low=1)
    _whole("min_tokens", p.min_tokens, low=0, high=p.max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(p, name)) is not None:
            _whole(name, count, low=-1)
    if p.structured_outputs is not None and not isinstance(p.structured_outputs, StructuredOutputsParams):
        raise SamplingParamsError(
            f"structured_outputs is a {type(p.structured_outputs).__name__}; give StructuredOutputsParams(...)"
        )
    if p.seed is not None:
        _whole("seed", p.seed)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise SamplingParamsError(
            "allowed_token_ids is empty, so nothing could be generated; leave it out to allow all",
            param="allowed_token_ids",
        )
    if any(not ids for ids in p.bad_words_token_ids):
        raise SamplingParamsError(
            "bad_words_token_ids holds an empty sequence, which would match everywhere; remove it"
        )


def _whole(name: str, value: object, *, low: int | None = None, high: int | None = None) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise SamplingParamsError(f"{name} must be a whole number, not {value!r}", param=name)
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise SamplingParamsError(f"{name} is {value}; it must be {_bounds(low, None, high)}", param=name)


def _number(
    name: str, value: object, *, low: float | None = None, above: float | None = None, high: float | None = None
) -> None:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number above all floats
        number = math.inf
    if not math.isfinite(number):
        raise SamplingParamsError(f"{name} must be a finite number, not {value!r}", param=name.partition("[")[0])
    too_low = (low is not None and number < low) or (above is not None and number <= above)
    if too_low or (high is not None and number > high):
        raise SamplingParamsError(
            f"{name} is {value}; it must be {_bounds(low, above, high)}", param=name.partition("[")[0]
        )


def _bounds(low: float | None, above: float | None, high: float | None) -> str:
    parts = [f"at least {low}"] if low is not None else []
    parts += [f"above {above}"] if above is not None else []
    parts += [f"at most {high}"] if high is not None else []
    return " and ".join(parts)


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SamplingParamsError(f"{name} holds {text!r}; it must hold strings that are not empty", param=name)
    return texts


def _token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    ids = tuple(value or ())
    for token_id in ids:
        if not isinstance(token_id, Integral) or isinstance(token_id, bool) or token_id < 0:
            raise SamplingParamsError(
                f"{name} holds {token_id!r}; it must hold token ids (whole numbers from 0)", param=name
            )
    return tuple(int(token_id) for token_id in ids)


def _logit_bias(bias: Mapping[int, float]) -> dict[int, float]:
    # OpenAI's JSON has the token ids as strings.
    result: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            raise SamplingParamsError(
                f"logit_bias has the key {key!r}; keys must be token ids", param="logit_bias"
            ) from None
        if token_id < 0:
            raise SamplingParamsError(f"logit_bias has the key {key!r}; keys must be token ids", param="logit_bias")
        _number(f"logit_bias[{token_id}]", value, low=-100.0, high=100.0)
        result[token_id] = float(value)
    return result
