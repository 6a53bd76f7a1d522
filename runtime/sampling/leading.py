"""The fewest entries, best first, that together reach a mass: found by narrowing down, mostly without sorting.

`n` entries, `s` of them a sample. The order is (key ascending, index ascending); keys are unsigned integers, so it is
total and exact. Floats that are not negative sort like their bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .selection import BLOCK, BlockSums

__all__ = ["Leading", "ascending_keys", "descending_keys", "leading", "mass_of"]

_AT_ONCE: Final = 2048  # so many entries are simply put in order
_SAMPLE: Final = 512  # entries that say where to look
_NARROW: Final = 24  # of these, as many as may lie between two places at the end
_BEYOND: Final = 1.2  # by how much farther to look than the sample says, so that the next place is on the other side
_AIMED_LOOKS: Final = 3  # from then on the range is halved: the sample says little about rows of few heavy entries


@dataclass(frozen=True, slots=True)
class Leading:
    """Entries with a key below `key`, and of those with this very key the ones up to index `last`."""

    key: int
    last: int

    def mask(self, keys_n: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """True for each of them."""
        cut, end = np.uint32(self.key), self.last + 1
        mask_n = keys_n < cut
        mask_n[:end] |= keys_n[:end] == cut
        return mask_n


def descending_keys(values_n: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Keys by which the largest value comes first; none may be negative."""
    return ~values_n.view(np.uint32)


def ascending_keys(values_n: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Keys by which the smallest value comes first; none may be negative."""
    return values_n.view(np.uint32)


def mass_of(weights_n: NDArray[np.float32], mask_n: NDArray[np.bool_]) -> float:
    """Sum of the weights where the mask is true."""
    factors_n = mask_n.view(np.int8).astype(np.float32)  # einsum would convert it slowly
    whole = weights_n.size // BLOCK * BLOCK
    sums_b = np.einsum("be,be->b", weights_n[:whole].reshape(-1, BLOCK), factors_n[:whole].reshape(-1, BLOCK))
    mass = float(sums_b.sum(dtype=np.float64))
    return mass + float(np.dot(weights_n[whole:], factors_n[whole:])) if whole < weights_n.size else mass


def leading(
    keys_n: NDArray[np.uint32], weights_n: NDArray[np.float32], mass: float, total: float | None = None
) -> Leading:
    """The fewest entries that together reach `mass`; at least one, and none behind the last of positive weight.

    weights_n: at least 0, one of them more. total: their sum, where it is known.
    """
    if keys_n.size <= _AT_ONCE:
        return _Part(keys_n, weights_n, np.arange(keys_n.size)).reaching(mass)
    return _narrowed(keys_n, weights_n, mass, total or BlockSums(weights_n).total)


def _narrowed(keys_n: NDArray[np.uint32], weights_n: NDArray[np.float32], mass: float, total: float) -> Leading:
    """Closes in on the place where the mass is reached, from both sides, and puts what is between in order.

    A sample of the entries says about where to look, and one pass over all of them what weighs less than a place there.
    """
    stride = keys_n.size // _SAMPLE
    sample_s = keys_n[::stride]
    order_s = sample_s.argsort()
    sample_s = sample_s[order_s]
    sums_s = weights_n[::stride][order_s].cumsum(dtype=np.float64)
    scale = float(sums_s[-1]) / total
    low, high = -1, sample_s.size  # ranks in the sample
    upto_low_n: NDArray[np.bool_] | None = None
    upto_high_n: NDArray[np.bool_] | None = None
    before, looks = 0.0, 0
    at = min(int(sums_s.searchsorted(mass * scale)), high - 1)
    while high - low > _NARROW:
        upto_n = keys_n <= sample_s[at]
        reached = mass_of(weights_n, upto_n)
        # Next, a little farther than where the sample says that it is.
        aim = int(sums_s.searchsorted(sums_s[at] + _BEYOND * (mass - reached) * scale))
        if reached < mass:
            low, upto_low_n, before, aim = at, upto_n, reached, aim + _NARROW // 4
        else:
            high, upto_high_n, aim = at, upto_n, aim - _NARROW // 4
        looks += 1
        at = min(max(aim, low + 1), high - 1) if looks < _AIMED_LOOKS else (low + high) // 2
    inside_n = np.ones(keys_n.size, np.bool_) if upto_high_n is None else upto_high_n
    if upto_low_n is not None:
        inside_n = inside_n ^ upto_low_n
    part = _Part(keys_n, weights_n, np.flatnonzero(inside_n))
    if part.total == 0.0:  # by rounding, the mass was reached before
        return Leading(int(sample_s[low]), keys_n.size - 1)
    return part.reaching(mass - before)


class _Part:
    """Some entries, in order. total: the sum of their weights."""

    def __init__(self, keys_n: NDArray[np.uint32], weights_n: NDArray[np.float32], inside_m: NDArray[np.int64]) -> None:
        self.total = 0.0
        if inside_m.size:
            self._pairs_m2 = np.empty((inside_m.size, 2), "<u4")
            self._pairs_m2[:, 0] = inside_m
            self._pairs_m2[:, 1] = keys_n[inside_m]
            self._pairs_m2.view("<u8").ravel().sort()
            self._sums = BlockSums(weights_n[self._pairs_m2[:, 0]])
            self.total = self._sums.total

    def reaching(self, mass: float) -> Leading:
        """Where the entries reach `mass`; their last one of positive weight if they do not."""
        # Reaching counts as enough: the largest number below `mass` must be exceeded.
        last, key = self._pairs_m2[self._sums.find(math.nextafter(mass, -math.inf))].tolist()
        return Leading(key, last)
