"""Temperature, truncation and the draw: steps 8 to 13 of `Sampler`, for one row."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pagegraft.runtime.sampling.params import SamplingParams
from pagegraft.runtime.sampling.selection import keep_largest, lower_bound_of_top, pick, pick_from_vocabulary

__all__ = ["distribution", "draw"]


def draw(logits_V: NDArray[np.float32], peak: float, params: SamplingParams, uniform: float) -> int:
    """The token that `uniform` in [0, 1) picks; `peak` is the largest logit and finite."""
    if _truncates(params, logits_V.size):
        ids_n, weights_n = distribution(logits_V, peak, params)
        return int(ids_n[pick(weights_n, uniform)])
    return pick_from_vocabulary(_weights(logits_V, peak, params.temperature), uniform)


def distribution(
    logits_V: NDArray[np.float32], peak: float, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that may be drawn, ascending, and their weights (proportional to probabilities, not normalised)."""
    size, temperature = logits_V.size, params.temperature
    by_count = 0 < params.top_k < size
    total: float | None = None
    if by_count or params.min_p > 0.0:
        # Both only compare, so no exponential is taken of what they discard.
        floor = peak + temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        if by_count:
            floor = max(floor, float(lower_bound_of_top(logits_V, params.top_k)))
        ids_n = np.flatnonzero(logits_V >= np.float32(floor))
        if by_count and ids_n.size > params.top_k:
            ids_n = ids_n[keep_largest(logits_V[ids_n], params.top_k)]
    elif params.top_p < 1.0:
        weights_V = _weights(logits_V, peak, temperature)
        total = float(weights_V.sum())
        # Tokens below (1 - top_p) / V of the mass hold less than 1 - top_p together: the set lies above.
        ids_n = np.flatnonzero(weights_V >= np.float32(0.999 * (1.0 - params.top_p) * total / size))
    else:
        ids_n = np.flatnonzero(logits_V > -np.inf)
    values_n = logits_V[ids_n]
    weights_n = np.exp((values_n.astype(np.float64) - peak) / temperature)
    if params.top_p < 1.0:
        kept = _nucleus(values_n, weights_n, params.top_p * (weights_n.sum() if total is None else total), params)
        ids_n, weights_n = ids_n[kept], weights_n[kept]
    if params.typical_p < 1.0:
        kept = _typical(weights_n, params.typical_p)
        ids_n, weights_n = ids_n[kept], weights_n[kept]
    return ids_n, weights_n


def _truncates(params: SamplingParams, size: int) -> bool:
    return 0 < params.top_k < size or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0


def _weights(logits_V: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float32]:
    weights_V = logits_V - np.float32(peak)
    if temperature != 1.0:
        weights_V *= np.float32(1.0 / temperature)
    np.exp(weights_V, out=weights_V)
    return weights_V


def _nucleus(
    values_n: NDArray[np.float32], weights_n: NDArray[np.float64], mass: float, params: SamplingParams
) -> NDArray[np.int64]:
    descending = np.sort(weights_n)[::-1]
    count = int(np.searchsorted(np.cumsum(descending), mass, side="left")) + 1
    return keep_largest(values_n, min(count, values_n.size))


def _typical(weights_n: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    probabilities = weights_n / weights_n.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        information = -np.log(probabilities)
        entropy = np.nansum(probabilities * information)
        order = np.argsort(np.abs(information - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), mass, side="left")) + 1
    return np.sort(order[:count])
