"""Temperature, truncation and the draw: steps 8 to 13 of `Sampler`, for one row on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .leading import ascending_keys, descending_keys, leading, mass_of
from .params import SamplingParams
from .rng import ATTEMPTS
from .selection import BlockSums, keep_largest, lower_bound_of_top, nucleus_candidates

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
    typical = params.typical_p < 1.0
    if 0 < params.top_k < logits_V.size or params.min_p > 0.0 or (typical and params.top_p < 1.0):
        return draw_from(*distribution(logits_V, peak, params), uniform(0))
    weights_V = _weights(logits_V, peak, params.temperature)
    if typical:
        return _draw_where(_typical(weights_V, params.typical_p), weights_V, uniform(0))
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
        possible_V = logits_V >= _LOWEST
        ids_n = None if possible_V.all() else np.flatnonzero(possible_V)
    weights_n = _weights(logits_V if ids_n is None else logits_V[ids_n], peak, params.temperature)
    if params.top_p < 1.0:
        kept = nucleus(weights_n, params.top_p * BlockSums(weights_n).total)
        ids_n, weights_n = kept if ids_n is None else ids_n[kept], weights_n[kept]
    if params.typical_p < 1.0:
        kept = np.flatnonzero(_typical(weights_n, params.typical_p))
        ids_n, weights_n = kept if ids_n is None else ids_n[kept], weights_n[kept]
    return np.arange(weights_n.size) if ids_n is None else ids_n, weights_n


def draw_from(ids_n: NDArray[np.int64], weights_n: NDArray[np.float32], uniform: float) -> int:
    """Draws one of the ids by their weights."""
    sums = BlockSums(weights_n)
    return int(ids_n[sums.find(uniform * sums.total)])


def _draw_where(mask_V: NDArray[np.bool_], weights_V: NDArray[np.float32], uniform: float) -> int:
    """As `draw_from`, of the tokens where the mask is true: cheaper than to collect them when they are many."""
    sums = BlockSums(weights_V * mask_V.view(np.int8).astype(np.float32))
    return sums.find(uniform * sums.total)


def _weights(logits_n: NDArray[np.float32], peak: np.float32, temperature: float) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a mask may be the lowest float32: -inf is as good
        weights_n = logits_n - peak
        if temperature != 1.0:
            weights_n *= np.float32(1.0 / temperature)
    np.exp(weights_n, out=weights_n)
    return weights_n


def nucleus(weights_n: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest weights, largest first, that together reach `mass`; at least one."""
    keys_n = descending_keys(weights_n)
    return np.flatnonzero(leading(keys_n, weights_n, mass).mask(keys_n))


def is_in_nucleus(weights_n: NDArray[np.float32], index: int, mass: float) -> bool:
    """Whether the weights that come before entry `index`, largest first, are less than `mass` together."""
    own = weights_n[index]
    larger = mass_of(weights_n, weights_n > own)
    return larger < mass and larger + float(own) * int(np.count_nonzero(weights_n[:index] == own)) < mass


def _draw_from_nucleus(
    weights_V: NDArray[np.float32], sums: BlockSums, mass: float, uniform: Callable[[int], float]
) -> int:
    """A draw from the whole distribution that happens to lie in the nucleus is a draw from the nucleus.

    Whether it does is one pass over the weights; finding where the nucleus ends takes several, unless it is small.
    """
    outside = -1.0
    for attempt in range(ATTEMPTS - 1):
        token_id = sums.find(uniform(attempt) * sums.total)
        own = float(weights_V[token_id])
        # Where all the others together are not enough, this one is needed whatever its rank.
        if sums.total - own < mass or (own >= outside and is_in_nucleus(weights_V, token_id, mass)):
            return token_id
        outside = max(outside, own)  # what is lighter lies outside as well
        if attempt == 0 and (candidates := nucleus_candidates(weights_V, mass)) is not None:
            weights_n = weights_V[candidates]
            kept = nucleus(weights_n, mass)
            return draw_from(candidates[kept], weights_n[kept], uniform(1))
    keys_V = descending_keys(weights_V)
    mask_V = leading(keys_V, weights_V, mass, sums.total).mask(keys_V)
    return _draw_where(mask_V, weights_V, uniform(ATTEMPTS - 1))


def _typical(weights_n: NDArray[np.float32], mass: float) -> NDArray[np.bool_]:
    """Where the locally typical set is (Meister et al., "Locally typical sampling", TACL 2023)."""
    probabilities_n = weights_n / np.float32(BlockSums(weights_n).total)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs_n = np.log(probabilities_n)
        products_n = probabilities_n * logs_n
    entropy = -products_n.sum()
    if np.isnan(entropy):  # a probability of 0 has no part in it
        entropy = -np.nansum(products_n)
    logs_n += entropy
    keys_n = ascending_keys(np.abs(logs_n, out=logs_n))
    return leading(keys_n, probabilities_n, mass, 1.0).mask(keys_n)
