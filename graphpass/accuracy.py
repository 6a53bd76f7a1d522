"""What a cache type costs in accuracy: the same model with two kinds of cache, teacher-forced through one text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .evaluate import Array
from .packed import PackedModel
from .texts import TokenText

__all__ = ["KvAccuracy", "measure"]

_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class KvAccuracy:
    """A cache type against the same model's float cache, over every token of a text.

    Logit errors are relative to the standard deviation of all reference logits; `greedy_agreement` is the share of
    tokens after which both choose the same next one; perplexities are of the text's own next tokens.
    """

    text: str
    tokens: int
    logit_error_rms: float
    logit_error_max: float
    greedy_agreement: float
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """(perplexity - reference) / reference."""
        return self.perplexity / self.reference_perplexity - 1.0

    def to_dict(self) -> dict[str, Any]:
        """For the manifest and reports."""
        return {**asdict(self), "perplexity_change": self.perplexity_change}

    def sentence(self) -> str:
        """One line for people."""
        return (
            f"{self.tokens} tokens of {self.text}: {self.greedy_agreement:.2%} greedy agreement, perplexity "
            f"{self.perplexity:.3f} against {self.reference_perplexity:.3f} ({self.perplexity_change:+.3%}), logit "
            f"error {self.logit_error_rms:.2e} rms and {self.logit_error_max:.2e} at most (of the logits' deviation)"
        )


class _Tally:
    """Sums over the tokens seen so far."""

    def __init__(self) -> None:
        self.rows = self.agreed = self.targets = 0
        self.error_square = self.error_max = 0.0
        self.sum = self.square = self.count = 0.0
        self.loss = np.zeros(2)

    def add(self, reference: Array, actual: Array, targets: Sequence[int]) -> None:
        """Logits `[n, vocab]` of both; `targets` are the next tokens of the first rows."""
        gap = actual.astype(np.float32) - reference.astype(np.float32)
        self.error_square += float(np.vdot(gap, gap))
        # NaN must not hide in a comparison.
        largest = float(np.abs(gap).max())
        self.error_max = max(self.error_max, largest) if math.isfinite(largest) else math.inf
        self.sum += float(reference.sum(dtype=np.float64))
        self.square += float(np.vdot(reference.astype(np.float32), reference.astype(np.float32)))
        self.count += reference.size
        self.rows += len(reference)
        self.agreed += int(np.sum(reference.argmax(axis=1) == actual.argmax(axis=1)))
        self.targets += len(targets)
        for index, logits in enumerate((reference, actual)):
            self.loss[index] += _negative_log_likelihood(logits[: len(targets)].astype(np.float32), targets)

    def result(self, text: str) -> KvAccuracy:
        """The figures of all that was added."""
        mean = self.sum / self.count
        deviation = max(math.sqrt(max(self.square / self.count - mean**2, 0.0)), 1e-30)
        reference, actual = (float(np.exp(loss / max(self.targets, 1))) for loss in self.loss)
        return KvAccuracy(
            text=text,
            tokens=self.rows,
            logit_error_rms=math.sqrt(self.error_square / self.count) / deviation,
            logit_error_max=self.error_max / deviation,
            greedy_agreement=self.agreed / self.rows,
            perplexity=actual,
            reference_perplexity=reference,
        )


def _negative_log_likelihood(logits: Array, targets: Sequence[int]) -> float:
    """Sum over rows `[n, vocab]` of -log of the probability of each target; the sums are in float64."""
    top = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(axis=1, dtype=np.float64)) + top[:, 0]
    return float(np.sum(total - logits[np.arange(len(targets)), list(targets)]))


def measure(
    reference: PackedModel,
    candidate: PackedModel,
    windows: Sequence[Sequence[int]],
    text: TokenText,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> KvAccuracy:
    """Feeds the same tokens to both models, a sequence for each window, and compares all logits.

    A chunk's own keys and values are quantised before they are attended to, so the figures are those of decoding token
    by token.
    """
    tally, total = _Tally(), sum(map(len, windows))
    for sequence, window in enumerate(windows):
        for start in range(0, len(window), _CHUNK):
            work = [(sequence, window[start : start + _CHUNK])]
            targets = window[start + 1 : start + 1 + _CHUNK]
            tally.add(reference.step(work)[0], candidate.step(work)[0], targets)
            progress(f"measuring the cache type: {tally.rows} of {total} tokens")
    return tally.result(text.origin)
