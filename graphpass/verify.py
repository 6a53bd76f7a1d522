"""Runs a converted model against its source: the source, one sequence at a time, is the oracle.

Random tokens, several sequences of mixed length that join at different steps, chunked, teacher-forced. Logits must
agree within a tolerance stated by element type, relative to their standard deviation, and within a small fraction of
what removing the context changes (a model may ignore its context so well that tolerance alone proves little).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from pagegraft.custom_ops import manifest as names

from .evaluate import Array
from .packed import PackedModel

__all__ = ["CONTEXT_FRACTION", "TOLERANCES", "Schedule", "Verification", "accuracy_key", "compare", "make_schedule"]

#: The same two limits for caches that store less than the model computes. The one that tells is the second, of the
#: typical difference: it shows that the caches of a layer are wrong, not what a cache type costs (that is measured on a
#: text). Single tokens may differ widely, because a router of experts that is nearly undecided chooses otherwise.
CACHE_FRACTIONS = {
    "float16 cache": 0.01,
    "bfloat16 cache": 0.03,
    "int8 cache": 0.15,
    "float8e4m3fn cache": 0.25,
    "int4 cache": 0.5,
}
CACHE_TOLERANCES = dict.fromkeys(CACHE_FRACTIONS, 10.0)
#: Largest difference of logits, as a fraction of their standard deviation, by compute type. "int8 products" are
#: those that round their activations: a difference in the last bit of one may flip a whole quantisation step.
TOLERANCES = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1, "int8 products": 5e-2, **CACHE_TOLERANCES}
#: Largest difference of logits, as a fraction of the effect that removing the context has.
CONTEXT_FRACTION = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.2, "int8 products": 0.01, **CACHE_FRACTIONS}
#: Differences are allowed up to this multiple of what the source differs from itself: on prefixes of the same tokens,
#: and with weights that are off by one unit in the last place.
NOISE_FACTOR = 2.0


class Oracle(Protocol):
    """What says which logits are right: it runs one sequence at a time."""

    def logits(self, tokens: Sequence[int]) -> Array:
        """Teacher-forced logits `[tokens, vocab]` of one sequence."""


@dataclass(frozen=True)
class Schedule:
    """Token sequences and the steps that compute them: per step, (sequence, number of tokens)."""

    sequences: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a comparison found. Differences are maxima over all logits of all tokens.

    `source_noise` is measured only when a limit is exceeded: see NOISE_FACTOR. A comparison that passes by it alone
    `leans_on_noise` and says little of a single attention: each is then compared by itself too
    (`attention_difference`, of the deviation of its output).
    """

    passed: bool
    difference: float
    tolerance: float
    source_noise: float
    context_fraction: float
    context_limit: float
    tokens: int
    sequences: int
    longest: int
    attention_difference: float | None = None

    @property
    def leans_on_noise(self) -> bool:
        """True when the limits without the source's noise are exceeded."""
        usual = self.difference <= self.tolerance and self.context_fraction <= self.context_limit
        return self.passed and not usual

    def to_dict(self) -> dict[str, Any]:
        """For the manifest and reports."""
        return asdict(self)

    def sentence(self) -> str:
        """One line for people."""
        verdict = "verified" if self.passed else "WRONG"
        noise = f", the source's own noise {self.source_noise:.1e}" if self.source_noise else ""
        alone = (
            f"; each attention by itself within {self.attention_difference:.1e}" if self.attention_difference else ""
        )
        return (
            f"{verdict}: {self.tokens} tokens of {self.sequences} sequences, logits within {self.difference:.1e} of "
            f"their deviation (limit {self.tolerance:.0e}{noise}) and {self.context_fraction:.2%} of the context's "
            f"effect (limit {self.context_limit:.0%}){alone}"
        )


def accuracy_key(compute: str, manifest: names.Manifest) -> str:
    """The key of tolerances for a model: of its compute type (a key itself) or of its caches, whichever is looser."""
    caches = {f"{layer.key_dtype} cache" for layer in manifest.layers if layer.key_dtype != manifest.compute_dtype}
    keys = [compute, *sorted(caches & CACHE_FRACTIONS.keys())]
    return max(keys, key=lambda key: (TOLERANCES[key], CONTEXT_FRACTION[key]))


def make_schedule(vocab: int, longest: int, *, stretch: int = 0, seed: int = 0, budget: int = 24) -> Schedule:
    """Eight sequences of mixed length up to `longest`, arriving one a step, computed under a small token budget.

    `stretch`: then a sequence of so many of the same tokens, in two chunks and single tokens at the end.
    """
    rng = np.random.default_rng(seed)
    lengths = [longest, 1, 2, max(3, longest // 2), 5, max(3, longest // 3), 9, max(4, longest - 3)]
    lengths = [min(n, longest) for n in lengths]
    sequences = [tuple(int(t) for t in rng.integers(0, vocab, n)) for n in lengths]
    done = [0] * len(sequences)
    steps: list[tuple[tuple[int, int], ...]] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        arrived = min(len(sequences), len(steps) + 2)
        left = budget
        step: list[tuple[int, int]] = []
        for index in rng.permutation(arrived):
            rest = lengths[index] - done[index]
            # A mix of single tokens and chunks, as decoding and prefilling sequences make it.
            count = min(rest, left, 1 if rng.random() < 0.4 else int(rng.integers(1, 12)))
            if count > 0:
                step.append((int(index), count))
                done[index] += count
                left -= count
        steps.append(tuple(step))
    if stretch:
        sequences.append(tuple(int(t) for t in rng.choice(np.concatenate(sequences), stretch)))
        first = stretch * 2 // 3
        steps += [((len(lengths), n),) for n in (first, stretch - first - 2, 1, 1)]
    return Schedule(tuple(sequences), tuple(steps))


def run_packed(packed: PackedModel, schedule: Schedule) -> list[Array]:
    """Logits `[tokens, vocab]` per sequence from the converted model, following the schedule."""
    done = [0] * len(schedule.sequences)
    parts: list[list[Array]] = [[] for _ in schedule.sequences]
    for step in schedule.steps:
        work = []
        for index, count in step:
            work.append((index, schedule.sequences[index][done[index] : done[index] + count]))
            done[index] += count
        for (index, _), logits in zip(step, packed.step(work), strict=True):
            parts[index].append(logits)
    return [np.concatenate(p) for p in parts]


def compare(
    source: Oracle,
    packed: PackedModel,
    schedule: Schedule,
    *,
    dtype: str = "float32",
    nudged: Callable[[], AbstractContextManager[Oracle]] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Runs both and compares every token's logits. `nudged` is the source with weights a unit in the last place off."""
    progress("running the source, one sequence at a time")
    expected = [source.logits(tokens).astype(np.float64) for tokens in schedule.sequences]
    progress("running the converted model, packed")
    actual = [logits.astype(np.float64) for logits in run_packed(packed, schedule)]
    alone = _without_context(source, schedule.sequences)
    deviation = max(float(np.std(np.concatenate(expected))), 1e-30)
    effect = float(np.sqrt(np.mean((np.concatenate(expected) - np.concatenate(alone)) ** 2)))
    largest, typical = _gap(actual, expected)
    difference, fraction = largest / deviation, typical / effect if effect > 0 else float("inf")
    tolerance, limit = TOLERANCES[dtype], CONTEXT_FRACTION[dtype]
    noise = usual = 0.0
    if (difference > tolerance or fraction > limit) and np.isfinite(largest):
        progress("measuring the source's own noise")
        noise, usual = _source_noise(source, nudged, schedule.sequences, expected)
    allowed = max(limit, NOISE_FACTOR * usual / effect if effect > 0 else 0.0)
    return Verification(
        passed=bool(difference <= max(tolerance, NOISE_FACTOR * noise / deviation) and fraction <= allowed),
        difference=difference,
        tolerance=tolerance,
        source_noise=noise / deviation,
        context_fraction=fraction,
        context_limit=limit,
        tokens=sum(map(len, schedule.sequences)),
        sequences=len(schedule.sequences),
        longest=max(map(len, schedule.sequences)),
    )


def _gap(ones: Sequence[Array], others: Sequence[Array]) -> tuple[float, float]:
    """The largest and the typical (root mean square) difference; infinite where a value is not finite."""
    gap = np.abs(np.concatenate(ones) - np.concatenate(others))
    if not np.all(np.isfinite(gap)):
        return float("inf"), float("inf")
    return float(np.max(gap)), float(np.sqrt(np.mean(gap**2)))


def _source_noise(
    source: Oracle,
    nudged: Callable[[], AbstractContextManager[Oracle]] | None,
    sequences: Sequence[Sequence[int]],
    expected: Sequence[Array],
) -> tuple[float, float]:
    """Largest and typical difference between the source and itself.

    Given a prefix of the same tokens: kernels that round their inputs (quantised products, half precision) differ by
    the number of rows they are given. With weights nudged: where activations are rounded to a few bits, the last bit
    of one float decides the rounding of others, and so on through all layers.
    """
    largest = typical = 0.0
    for tokens, logits in zip(sequences, expected, strict=True):
        for length in {1, 2, 3, 5, 8, len(tokens) // 2, len(tokens) - 1}:
            if 0 < length < len(tokens):
                again = source.logits(tokens[:length]).astype(np.float64)
                largest = max(largest, _finite(_gap([again], [logits[:length]]))[0])
    if nudged is not None:
        with nudged() as other:
            again_all = [other.logits(tokens).astype(np.float64) for tokens in sequences]
        most, typical = _finite(_gap(again_all, expected))
        largest = max(largest, most)
    return largest, typical


def _finite(gap: tuple[float, float]) -> tuple[float, float]:
    """A gap, or none where it is not finite: a source that overflows excuses nothing."""
    return gap if np.isfinite(gap[0]) else (0.0, 0.0)


def _without_context(source: Oracle, sequences: Sequence[Sequence[int]]) -> list[Array]:
    """Each token's logits when it is a sequence of its own."""
    known: dict[int, Array] = {}
    for tokens in sequences:
        for token in tokens:
            if token not in known:
                known[token] = source.logits([token])[0].astype(np.float64)
    return [np.stack([known[t] for t in tokens]) for tokens in sequences]
