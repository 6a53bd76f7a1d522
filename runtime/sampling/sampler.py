"""Chooses the next token of every sequence of a step from its row of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import SamplingError
from .logprobs import TokenLogprobs, token_logprobs
from .narrow import MAX_CANDIDATES, Candidates, draw_together
from .state import SamplingState
from .truncation import distribution, draw, draw_from, survivors

__all__ = ["SampledTokens", "Sampler"]

_FLOAT32 = np.dtype(np.float32)
_NOTHING_LEFT = (
    "allowed_token_ids, structured_outputs, bad words, min_tokens and logit_bias together leave no token to choose"
)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The outcome of one step; row r belongs to states[r].

    token_ids: int64 [R]; -1 in a row that has an error.
    logprobs: row -> what was asked for; rows that asked for nothing are absent.
    errors: row -> why nothing could be drawn (non-finite logits, everything banned). Other rows are unaffected.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, SamplingError]


class Sampler:
    """Samples the rows of a step, each with its own parameters. Stateless: all memory is in the `SamplingState`s.

    The order in which a row's logits are processed is normative:
        0. Log-probabilities to report are taken from the raw logits, in float32: they are the model's own.
        1. `allowed_token_ids`: every other logit becomes -inf. `structured_outputs`: so does every logit of a token
            after which the output could not get its form, and of end-of-sequence where it does not have it yet.
        2. `bad_words_token_ids`: tokens that would complete one become -inf.
        3. `min_tokens`: below it, end-of-sequence (unless `ignore_eos`) and `stop_token_ids` become -inf.
        4. `logit_bias` is added.
        5. `repetition_penalty` over prompt and output: a positive logit is divided by it, another multiplied.
        6. `frequency_penalty` times the count in the output is subtracted, then `presence_penalty` where it occurs.
        7. Greedy (temperature below 1e-5): the largest logit, ties to the lowest id. Nothing below happens.
        8. `temperature` divides.
        9. `min_p`: tokens below min_p times the largest probability go.
        10. `top_k`: exactly the k largest stay; ties to the lowest id.
        11. `top_p`, over the probabilities of what is left: the smallest set, largest first, ties to the lowest id,
            that reaches the mass.
        12. `typical_p`, over the probabilities of what is left: the smallest set, by |information - entropy| ascending,
            ties to the lowest id, that reaches the mass.
        13. One token is drawn: the first, in order of ids, whose running sum of probability exceeds u times the total,
            u being the number at (seed, choice, position).
    What a row gives depends on that row, its state and nothing else. Passes over the vocabulary go row by row, because
    a row stays in the processor's cache and the batch does not; what follows them is done for all rows together.
    """

    def sample(self, logits_RV: NDArray[np.floating], states: Sequence[SamplingState]) -> SampledTokens:
        """One token for each row; the states are read, not advanced (`SamplingState.append` does that).

        logits_RV: float32 (others are converted), never modified; R == len(states).
        """
        if logits_RV.ndim != 2 or logits_RV.shape[0] != len(states):
            raise SamplingError(f"logits have shape {logits_RV.shape}, but the step has {len(states)} rows to sample")
        if logits_RV.dtype != _FLOAT32:
            logits_RV = logits_RV.astype(np.float32)
        best_R = logits_RV.argmax(axis=1)
        result = SampledTokens(best_R, {}, {})
        if not _all_finite(logits_RV, best_R):
            peaks_R = logits_RV[np.arange(len(states)), best_R]
            for row in np.flatnonzero(~np.isfinite(peaks_R)).tolist():
                _fail(result, row, f"its largest logit is {peaks_R[row]}: the model computed no distribution")
        todo = [row for row, state in enumerate(states) if not state.takes_argmax and row not in result.errors]
        if not todo:
            return result
        narrow: dict[int, Candidates] = {}
        for row in todo:
            _choose(result, narrow, row, logits_RV[row], states[row])
        if narrow:
            best_R[list(narrow)] = draw_together(list(narrow.values()))
        for row in todo:
            if (top := states[row].logprobs) is not None and row not in result.errors:
                result.logprobs[row] = token_logprobs(logits_RV[row], int(best_R[row]), top)
        return result


def _all_finite(logits_RV: NDArray[np.float32], best_R: NDArray[np.int64]) -> bool:
    """Whether every row has a finite largest logit. argmax stops at a NaN, so one look at the winner covers the row."""
    if best_R.size == 1:
        return math.isfinite(logits_RV[0, best_R[0]])
    return math.isfinite(np.add.reduce(logits_RV[np.arange(best_R.size), best_R]))


def _choose(
    result: SampledTokens,
    narrow: dict[int, Candidates],
    row: int,
    logits_V: NDArray[np.float32],
    state: SamplingState,
) -> None:
    """Puts the row's token into the result, or its candidates into `narrow` if they are few."""
    best = int(result.token_ids[row])
    if state.edits_logits:
        logits_V = logits_V.copy()
        state.edit(logits_V)
        best = int(logits_V.argmax())
        if not np.isfinite(logits_V[best]):
            _fail(result, row, _NOTHING_LEFT)
            return
    params, peak = state.params, logits_V[best]
    if params.is_greedy:
        result.token_ids[row] = best
        return
    ids_n = survivors(logits_V, peak, params)
    if ids_n is None:
        result.token_ids[row] = draw(logits_V, peak, params, state.uniform)
    elif ids_n.size <= MAX_CANDIDATES and params.typical_p == 1.0:
        narrow[row] = Candidates(ids_n, logits_V[ids_n], peak, params, state.uniform())
    else:
        result.token_ids[row] = draw_from(*distribution(logits_V, peak, params, ids_n), state.uniform())


def _fail(result: SampledTokens, row: int, reason: str) -> None:
    result.token_ids[row] = -1
    result.errors[row] = SamplingError(f"no token can be sampled for row {row}: {reason}")
