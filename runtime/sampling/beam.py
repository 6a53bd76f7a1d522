"""Beam search as a policy: candidates in, survivors out. It knows neither the engine nor the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .logprobs import log_normaliser
from .params import BeamSearchParams
from .selection import top_tokens

__all__ = ["BeamHypothesis", "BeamSearch", "BeamStep", "beam_candidates"]


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished beam.

    token_ids: its output, the ending token included.
    score: cumulative_logprob / len(token_ids) ** length_penalty.
    finish_reason: "stop" for end-of-sequence or a stop token (`stop_reason` is the latter), "length" for the limit.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The live beams after a step: beam i continues old beam parents[i] with token_ids[i]. Both empty at the end."""

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The beams of one prompt.

    At each step the continuations of all live beams are ranked by the sum of log-probabilities (ties: the lower beam,
    then the lower token id). Among the first `beam_width`, those that end are finished; the first `beam_width` that do
    not end are the live beams of the next step. Finished beams beyond the best `beam_width` are dropped.

    params: width, limits and scoring.
    eos_token_ids: end a beam unless `params.ignore_eos`.
    max_output_tokens: what the model's context leaves after the prompt.
    """

    def __init__(self, params: BeamSearchParams, *, eos_token_ids: Iterable[int], max_output_tokens: int) -> None:
        self._params = params
        eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._ends = eos | frozenset(params.stop_token_ids)
        self._eos = eos
        self._max_tokens = min(params.max_tokens, max_output_tokens)
        self._live = [_Beam((), 0.0)]
        self._finished: list[BeamHypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Continuations that each live beam has to bring for the step to be exact."""
        return self._params.beam_width + len(self._ends)

    @property
    def num_live(self) -> int:
        """Live beams: one at the start, then up to `beam_width`, none at the end."""
        return len(self._live)

    @property
    def is_finished(self) -> bool:
        """Whether no further step can change the result."""
        return not self._live

    def advance(self, token_ids_LK: NDArray[np.int64], logprobs_LK: NDArray[np.floating]) -> BeamStep:
        """Takes the K likeliest continuations of each of the L live beams, in the beams' order.

        K is at least `num_candidates`, or the whole vocabulary; a log-probability of -inf is no continuation.
        """
        parents, tokens = [], []
        survivors: list[_Beam] = []
        for rank, (logprob, parent, token) in enumerate(self._ranked(token_ids_LK, logprobs_LK)):
            ids = (*self._live[parent].token_ids, token)
            if token in self._ends:
                if rank < self._params.beam_width:
                    self._finish(ids, logprob, "stop", None if token in self._eos else token)
            elif len(survivors) < self._params.beam_width:
                survivors.append(_Beam(ids, logprob))
                parents.append(parent)
                tokens.append(token)
            if rank >= self._params.beam_width and len(survivors) == self._params.beam_width:
                break
        self._live = survivors
        if survivors and len(survivors[0].token_ids) >= self._max_tokens:
            for beam in survivors:
                self._finish(beam.token_ids, beam.logprob, "length", None)
            self._live = []
        elif self._is_decided():
            self._live = []
        return BeamStep(tuple(parents), tuple(tokens)) if self._live else BeamStep((), ())

    def best(self) -> list[BeamHypothesis]:
        """The finished beams, best first, at most `n` (fewer when the search found fewer or is not over)."""
        return self._finished[: self._params.n]

    def _ranked(
        self, token_ids_LK: NDArray[np.int64], logprobs_LK: NDArray[np.floating]
    ) -> list[tuple[float, int, int]]:
        """(sum of log-probabilities, beam, token), best first."""
        sums_LK = np.array([[beam.logprob] for beam in self._live]) + logprobs_LK.astype(np.float64)
        parents_LK = np.broadcast_to(np.arange(len(self._live))[:, None], sums_LK.shape)
        order = np.lexsort((token_ids_LK.ravel(), parents_LK.ravel(), -sums_LK.ravel()))
        order = order[: self._params.beam_width * (1 + len(self._ends))]  # holds beam_width that do not end
        order = order[sums_LK.ravel()[order] > -np.inf]
        columns = (sums_LK.ravel()[order], parents_LK.ravel()[order], token_ids_LK.ravel()[order])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _finish(self, ids: Sequence[int], logprob: float, reason: str, stop_reason: int | None) -> None:
        score = self._score(logprob, len(ids))
        self._finished.append(BeamHypothesis(tuple(ids), logprob, score, reason, stop_reason))
        self._finished.sort(key=lambda beam: -beam.score)  # stable: the earlier of equal ones stays ahead
        del self._finished[self._params.beam_width :]

    def _is_decided(self) -> bool:
        if not self._live or len(self._finished) < self._params.beam_width:
            return False
        if self._params.early_stopping:
            return True
        # A sum of log-probabilities only falls; what is left flatters it most at one of its two ends.
        lengths = (len(self._live[0].token_ids) + 1, self._max_tokens)
        attainable = max(self._score(beam.logprob, length) for beam in self._live for length in lengths)
        return attainable <= self._finished[-1].score


def beam_candidates(logits_LV: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The `count` likeliest tokens of each row, best first, and their log-probabilities: what `advance` takes."""
    ids = [top_tokens(row_V, count) for row_V in logits_LV]
    logprobs = [
        row_V[top].astype(np.float64) - log_normaliser(row_V) for row_V, top in zip(logits_LV, ids, strict=True)
    ]
    return np.stack(ids), np.stack(logprobs)
