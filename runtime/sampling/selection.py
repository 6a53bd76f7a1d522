"""Exact selection among vocabulary-sized rows without sorting them.

Everywhere the order is (value descending, token id ascending), so ties are settled and results do not depend on how
numpy happens to partition. `V` is the vocabulary, `n` a number of candidates.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["keep_largest", "lower_bound_of_top", "pick", "pick_from_vocabulary", "top_tokens"]

_COLUMNS: Final = 2048  # columns whose maxima bound the top k: their maxima cost as much as one pass over the row
_BLOCK: Final = 256  # tokens whose weights are added up first when a token is picked from the whole vocabulary


def lower_bound_of_top(row_V: NDArray[np.float32], k: int) -> np.float32:
    """A value that at least k entries of the row reach, and few more than k (k >= 1, k <= V).

    The row is folded into columns; the k-th largest column maximum is reached in k different columns.
    """
    size = row_V.size
    if k * 4 > _COLUMNS or size < 2 * _COLUMNS:
        return np.float32(np.partition(row_V, size - k)[size - k])
    folds = size // _COLUMNS
    maxima = row_V[: folds * _COLUMNS].reshape(folds, _COLUMNS).max(axis=0)
    maxima.partition(_COLUMNS - k)
    return np.float32(maxima[_COLUMNS - k])


def keep_largest(values_n: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest values; among equal ones the first (0 < count <= n)."""
    size = values_n.size
    if count >= size:
        return np.arange(size)
    cut = np.partition(values_n, size - count)[size - count]
    above = np.flatnonzero(values_n > cut)
    if above.size == count:
        return above
    level = np.flatnonzero(values_n == cut)[: count - above.size]
    return np.sort(np.concatenate((above, level)))


def top_tokens(row_V: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The k tokens of highest value, best first (k clamped to V)."""
    k = min(k, row_V.size)
    if k <= 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(row_V >= lower_bound_of_top(row_V, k))
    candidates = candidates[keep_largest(row_V[candidates], k)]
    return candidates[np.argsort(-row_V[candidates], kind="stable")]


def pick(weights_n: NDArray[np.float64], uniform: float) -> int:
    """Index i with probability weights[i] / sum: the first whose running sum exceeds uniform * sum."""
    running = np.cumsum(weights_n)
    total = running[-1]
    index = int(np.searchsorted(running, uniform * total, side="right"))
    # uniform * total may round up to total; then the answer is the last token of positive weight.
    return min(index, int(np.searchsorted(running, total, side="left")))


def pick_from_vocabulary(weights_V: NDArray[np.float32], uniform: float) -> int:
    """Like `pick` for a whole row: sums of blocks lead to the block, its running sum to the token."""
    whole = weights_V.size // _BLOCK * _BLOCK
    sums = np.empty(-(-weights_V.size // _BLOCK), np.float64)
    weights_V[:whole].reshape(-1, _BLOCK).sum(axis=1, out=sums[: whole // _BLOCK])
    if whole < weights_V.size:
        sums[-1] = weights_V[whole:].sum()
    running = np.cumsum(sums)
    block = min(
        int(np.searchsorted(running, uniform * running[-1], side="right")),
        int(np.searchsorted(running, running[-1], side="left")),
    )
    before = running[block - 1] if block else 0.0
    within = (uniform * running[-1] - before) / sums[block]
    start = block * _BLOCK
    return start + pick(weights_V[start : start + _BLOCK].astype(np.float64), min(max(within, 0.0), 1.0))
