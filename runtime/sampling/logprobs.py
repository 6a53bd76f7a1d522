"""Log-probabilities of the model's own distribution, as callers see them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .selection import BlockSums, top_tokens

__all__ = ["TokenLogprobs", "prompt_logprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What is reported of one token.

    token_id, logprob, rank: the token at this position, its log-probability, and 1 + the number of likelier tokens.
    top_token_ids, top_logprobs: the K likeliest tokens, best first (int64 and float32); K may be 0.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


def log_normaliser(row_V: NDArray[np.float32]) -> float:
    """log(sum(exp(row))) of logits that are finite or -inf, one of them finite."""
    peak = row_V.max()
    weights_V = row_V - peak
    np.exp(weights_V, out=weights_V)
    return float(peak) + math.log(BlockSums(weights_V).total)


def token_logprobs(row_V: NDArray[np.float32], token_id: int, top: int) -> TokenLogprobs:
    """Reports `token_id` and the `top` likeliest tokens (-1: all) of a row of raw logits."""
    normaliser = log_normaliser(row_V)
    own = row_V[token_id]
    top_token_ids = top_tokens(row_V, row_V.size if top == -1 else top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(own) - normaliser,
        rank=int(np.count_nonzero(row_V > own)) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=row_V[top_token_ids] - np.float32(normaliser),
    )


def prompt_logprobs(
    logits_RV: NDArray[np.float32], next_token_ids_R: NDArray[np.int64], top: int
) -> list[TokenLogprobs]:
    """Reports on prompt tokens: row r holds the logits after some prompt token, next_token_ids[r] is the one after it.

    The first token of a prompt has no logits before it; the caller puts None in its place.
    """
    rows = zip(logits_RV, next_token_ids_R.tolist(), strict=True)
    return [token_logprobs(row_V, token_id, top) for row_V, token_id in rows]
