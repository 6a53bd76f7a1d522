"""Temperature, truncation and the draw: steps 8 to 13 of `Sampler`, for one row on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams
from .rng import ATTEMPTS
from .selection import (
    BlockSums,
    keep_largest,
    lower_bound_of_top,
    mass_before,
    nucleus,
    nucleus_candidates,
)

__all__ = ["distribution", "draw", "draw_from", "survivors"]

_LOWEST: Final = np.finfo(np.float32).min  # what is below is -inf: a token that was ruled out


def survivors(logits_V: NDArray[np.float32], peak: np.float32, params: SamplingParams) -> NDArray[np.int64] | None:
    """Token ids, ascending, that min_p and top_k leave (exactly, ties settled); None when neither is asked for.

    Both only compare, so no exponential is taken of what they discard.
    """
    by_count = 0 < params.top_k < logits_V.size
    if not by_count and params.min_p == 0.0:
        return None
    floor = _LOWEST
    if params.min_p > 0.0:
        floor = max(floor, np.float32(float(peak) + params.temperature * math.log(params.min_p)))
    if by_count:
        floor = max(floor, lower_bound_of_top(logits_V, params.top_k))
    ids_n = np.flatnonzero(logits_V >= floor)
    if by_count and ids_n.size > params.top_k:
        ids_n = ids_n[keep_largest(logits_V[ids_n], params.top_k)]
    return ids_n


def draw(
    logits_V: NDArray[np.float32], peak: np.float32, params: SamplingParams, uniform: Callable[[int], float]
) -> int:
    """Draws one token of a row with any number of candidates.

    peak: the largest logit; finite.
    uniform: attempt -> independent numbers in [0, 1).
    """
    if 0 < params.top_k < logits_V.size or params.min_p > 0.0 or params.typical_p < 1.0:
        return draw_from(*distribution(logits_V, peak, params), uniform(0))
    weights_V = _weights(logits_V, peak, params.temperature)
    sums = BlockSums(weights_V)
    if params.top_p == 1.0:
        return sums.find(uniform(0) * sums.total)
    return _draw_from_nucleus(weights_V, sums, params.top_p * sums.total, uniform)


def distribution(
    logits_V: NDArray[np.float32],
    peak: np.float32,
    params: SamplingParams,
    ids_n: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids that may be drawn, ascending, and their weights (proportional to probabilities, not normalised).

    ids_n: the row's `survivors`, where they are known.
    """
    if ids_n is None:
        ids_n = survivors(logits_V, peak, params)
    if ids_n is None:
        ids_n = np.flatnonzero(logits_V >= _LOWEST)
    weights_n = _weights(logits_V[ids_n], peak, params.temperature)
    if params.top_p < 1.0:
        kept = nucleus(weights_n, params.top_p * BlockSums(weights_n).total)
        ids_n, weights_n = ids_n[kept], weights_n[kept]
    if params.typical_p < 1.0:
        kept = _typical(weights_n, params.typical_p)
        ids_n, weights_n = ids_n[kept], weights_n[kept]
    return ids_n, weights_n


def draw_from(ids_n: NDArray[np.int64], weights_n: NDArray[np.float32], uniform: float) -> int:
    """Draws one of the ids by their weights."""
    sums = BlockSums(weights_n)
    return int(ids_n[sums.find(uniform * sums.total)])


def _weights(logits_n: NDArray[np.float32], peak: np.float32, temperature: float) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a mask may be the lowest float32: -inf is as good
        weights_n = logits_n - peak
        if temperature != 1.0:
            weights_n *= np.float32(1.0 / temperature)
    np.exp(weights_n, out=weights_n)
    return weights_n


def _draw_from_nucleus(
    weights_V: NDArray[np.float32], sums: BlockSums, mass: float, uniform: Callable[[int], float]
) -> int:
    """A draw from the whole distribution that happens to lie in the nucleus is a draw from the nucleus.

    Whether it does is one pass over the weights; finding all of the nucleus takes a sort, unless it is small.
    """
    for attempt in range(ATTEMPTS - 1):
        token_id = sums.find(uniform(attempt) * sums.total)
        # Where all the others together are not enough, this one is needed whatever its rank.
        if sums.total - float(weights_V[token_id]) < mass or mass_before(weights_V, token_id) < mass:
            return token_id
        if attempt == 0 and (candidates := nucleus_candidates(weights_V, mass)) is not None:
            weights_n = weights_V[candidates]
            kept = nucleus(weights_n, mass)
            return draw_from(candidates[kept], weights_n[kept], uniform(1))
    kept = nucleus(weights_V, mass)
    return draw_from(kept, weights_V[kept], uniform(ATTEMPTS - 1))


def _typical(weights_n: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """Indices, ascending, of the locally typical set (Meister et al., "Locally typical sampling", TACL 2023)."""
    probabilities_n = weights_n / np.float32(BlockSums(weights_n).total)
    with np.errstate(divide="ignore", invalid="ignore"):
        information_n = -np.log(probabilities_n)
        entropy = np.nansum(probabilities_n * information_n)
    # Floats that are not negative sort like their bits: with the index below them, equal distances keep their order.
    keys_n2 = np.empty((weights_n.size, 2), "<u4")
    keys_n2[:, 0] = np.arange(weights_n.size)
    keys_n2[:, 1] = np.abs(information_n - entropy).view(np.uint32)
    keys_n = keys_n2.view("<u8").ravel()
    keys_n.sort()
    order_n = keys_n2[:, 0].astype(np.int64)
    size = BlockSums(probabilities_n[order_n]).find(np.nextafter(mass, -np.inf)) + 1
    return np.sort(order_n[:size])
