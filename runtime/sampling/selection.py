"""Exact selection among vocabulary-sized rows, mostly without sorting them.

Everywhere the order is (value descending, token id ascending), so ties are settled and results do not depend on how
numpy happens to partition. `V` is the vocabulary, `n` any number of entries, `b` blocks of `BLOCK` of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK",
    "BlockSums",
    "keep_largest",
    "lower_bound_of_top",
    "nucleus_candidates",
    "top_tokens",
]

_COLUMNS: Final = 2048  # columns whose maxima bound the top k: their maxima cost as much as one pass over the row
BLOCK: Final = 256  # entries that are added up first where a running sum over all would cost too much


def lower_bound_of_top(row_V: NDArray[np.float32], k: int) -> np.float32:
    """A value that at least k entries of the row reach, and few more than k (1 <= k <= V).

    The row is folded into columns; the k-th largest column maximum is reached in k different columns.
    """
    size = row_V.size
    if k * 4 > _COLUMNS or size < 2 * _COLUMNS:
        return np.float32(np.partition(row_V, size - k)[size - k])
    maxima = _column_maxima(row_V)
    maxima.partition(_COLUMNS - k)
    return np.float32(maxima[_COLUMNS - k])


def _column_maxima(row_V: NDArray[np.float32]) -> NDArray[np.float32]:
    folds = row_V.size // _COLUMNS
    return np.asarray(row_V[: folds * _COLUMNS].reshape(folds, _COLUMNS).max(axis=0))


def keep_largest(values_n: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest values; among equal ones the first (1 <= count <= n)."""
    size = values_n.size
    if count >= size:
        return np.arange(size)
    cut = np.partition(values_n, size - count)[size - count]
    reaching = np.flatnonzero(values_n >= cut)
    if reaching.size == count:
        return reaching
    ties = np.flatnonzero(values_n[reaching] == cut)
    return np.delete(reaching, ties[count - reaching.size :])


def top_tokens(row_V: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The k tokens of highest value, best first (k clamped to V)."""
    k = min(k, row_V.size)
    if k <= 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(row_V >= lower_bound_of_top(row_V, k))
    candidates = candidates[keep_largest(row_V[candidates], k)]
    return candidates[np.argsort(-row_V[candidates], kind="stable")]


class BlockSums:
    """Running sums of weights at two levels, blocks and entries: one pass over the weights, then a short search.

    weights_n: float32, at least 0.
    total: their sum.
    """

    __slots__ = ("_running_b", "_weights_n", "total")

    def __init__(self, weights_n: NDArray[np.float32]) -> None:
        self._weights_n = weights_n
        whole = weights_n.size // BLOCK * BLOCK
        sums_b = np.empty(-(-weights_n.size // BLOCK), np.float32)
        if whole:
            # einsum adds up short rows twice as fast as sum(axis=1) does.
            np.einsum("be->b", weights_n[:whole].reshape(-1, BLOCK), out=sums_b[: whole // BLOCK])
        if whole < weights_n.size:
            sums_b[-1] = weights_n[whole:].sum()
        self._running_b = sums_b.cumsum(dtype=np.float64)
        self.total = float(self._running_b[-1])

    def find(self, mass: float) -> int:
        """The first entry whose running sum exceeds `mass`; the last one of positive weight if none does."""
        running_b = self._running_b
        block = min(int(running_b.searchsorted(mass, "right")), int(running_b.searchsorted(self.total, "left")))
        before = float(running_b[block - 1]) if block else 0.0
        start = block * BLOCK
        running = self._weights_n[start : start + BLOCK].cumsum(dtype=np.float64)
        # The two levels round differently, so `mass - before` may lie a little outside of the block's own sum.
        index = min(int(running.searchsorted(mass - before, "right")), int(running.searchsorted(running[-1], "left")))
        return start + index


def nucleus_candidates(weights_n: NDArray[np.float32], mass: float) -> NDArray[np.int64] | None:
    """Indices, ascending, of a small set that holds the nucleus of `mass`; None when no small one is found quickly.

    Where some column maxima reach the mass, so do all the weights not below the smallest of them.
    """
    if weights_n.size < 2 * _COLUMNS:
        return None
    maxima = _column_maxima(weights_n)
    if maxima.sum(dtype=np.float64) < mass:
        return None
    maxima = np.sort(maxima)[::-1]
    for count in (_COLUMNS // 8, _COLUMNS):  # of most rows, few columns hold the nucleus
        needed = int(np.cumsum(maxima[:count], dtype=np.float64).searchsorted(mass * (1 + 1e-6)))
        if needed < count:
            return np.flatnonzero(weights_n >= maxima[needed])
    return None
