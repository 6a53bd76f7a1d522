"""Speculative decoding: which of several proposed tokens stand, such that the outcome is distributed as without them.

Two ways. `verify_draft` is for proposals that carry no probabilities (n-gram look-up, prompt look-up): each position is
sampled as always, and a proposal stands if it is what was sampled. It is accepted with exactly the probability that
rejection sampling gives it, and the tokens are those that the same seed gives without speculation.
`reject_or_resample` is for a draft model that drew its proposals from a distribution of its own (Leviathan et al.,
"Fast inference from transformers via speculative decoding", ICML 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import SamplingError
from .logprobs import TokenLogprobs
from .sampler import Sampler
from .state import SamplingState

__all__ = ["VerifiedTokens", "reject_or_resample", "verify_draft"]


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """The tokens that one sequence gains in a step: the proposals that stand and one more.

    logprobs: one for each token if the sequence asked for them, else empty.
    error: set when a row could not be sampled; the tokens before it stand.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    error: SamplingError | None = None


def verify_draft(
    sampler: Sampler, logits_PV: NDArray[np.float32], state: SamplingState, draft_token_ids: Sequence[int]
) -> VerifiedTokens:
    """Verifies proposals for one sequence, and takes up the resulting tokens in `state`.

    logits_PV: row i holds the logits after the first i proposals; one row more than there are proposals.
    """
    if logits_PV.shape[0] != len(draft_token_ids) + 1:
        raise SamplingError(
            f"{len(draft_token_ids)} proposed tokens need {len(draft_token_ids) + 1} rows of logits, "
            f"not {logits_PV.shape[0]}"
        )
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for row in range(logits_PV.shape[0]):
        sampled = sampler.sample(logits_PV[row : row + 1], [state])
        if sampled.errors:
            return VerifiedTokens(tokens, logprobs, sampled.errors[0])
        token_id = int(sampled.token_ids[0])
        state.append(token_id)
        tokens.append(token_id)
        logprobs += sampled.logprobs.values()
        if row < len(draft_token_ids) and token_id != draft_token_ids[row]:
            break
    return VerifiedTokens(tokens, logprobs)


def reject_or_resample(
    target_V: NDArray[np.floating], draft_V: NDArray[np.floating], draft_token_id: int, uniforms: tuple[float, float]
) -> tuple[int, bool]:
    """The token at one position, distributed as `target_V`, given a proposal from `draft_V`; and whether that stood.

    target_V, draft_V: probabilities over the vocabulary after all processors, each with sum 1.
    uniforms: two independent numbers in [0, 1), for the acceptance and for the replacement.

    Raises SamplingError when the draft could not have drawn the proposal.
    """
    if not draft_V[draft_token_id] > 0:
        raise SamplingError(
            f"token {draft_token_id} was proposed with probability 0; give the distribution that it was drawn from"
        )
    if uniforms[0] * draft_V[draft_token_id] < target_V[draft_token_id]:
        return draft_token_id, True
    running = np.cumsum(np.maximum(target_V.astype(np.float64) - draft_V, 0.0))
    index = int(running.searchsorted(uniforms[1] * running[-1], "right"))
    return min(index, int(running.searchsorted(running[-1], "left"))), False
