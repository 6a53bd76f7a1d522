"""A source that finds its pages itself, run through its own tables and slots, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import VerificationError
from ..evaluate import Array
from ..source_session import SourceSession, numpy_type
from .interface import PagedInterface, Pool, feed, shaped

__all__ = ["PagedSourceModel"]

#: What unwritten slots hold is finite (a masked NaN would still be NaN in a product) and large enough to show.
_GARBAGE = 30.0


class PagedSourceModel:
    """The untouched source in onnxruntime. Its pools start out full of garbage; each sequence gets pages in a random
    order, and what it leaves behind stays."""

    def __init__(self, model: Path, pages: PagedInterface, *, longest: int) -> None:
        """`longest` is the most tokens of a sequence. Raises VerificationError when onnxruntime cannot load it."""
        self._session = SourceSession(model)
        self._pages = pages
        self._rng = np.random.default_rng(29)
        wanted = -(-longest // pages.page) + 2
        self._pools = {pool.source: self._pool(pool, wanted * pages.page) for pool in pages.pools}
        self._count = min(self._capacity(pool, self._pools[pool.source]) // pages.page for pool in pages.pools)

    def _pool(self, pool: Pool, slots: int) -> Array:
        shape = [-(-slots // pool.positions) if d is None else d for d in pool.shape]
        return (self._rng.standard_normal(shape) * _GARBAGE).astype(pool.dtype)

    @staticmethod
    def _capacity(pool: Pool, array: Array) -> int:
        counted = [n for n, d in zip(array.shape, pool.shape, strict=True) if d is None]
        return pool.positions * (counted[0] if counted else 1)

    def logits(self, tokens: Sequence[int], *, chunk: int | None = None) -> Array:
        """Teacher-forced logits `[tokens, vocab]` of one sequence, in two steps or `chunk` tokens at a time.

        Raises VerificationError when the source itself fails.
        """
        page, total = self._pages.page, len(tokens)
        needed = -(-total // page)
        if needed > self._count:
            raise VerificationError(f"the source has {self._count} pages, a sequence of {total} tokens needs {needed}")
        tabled = "table" in self._pages.roles.values()
        order = self._rng.permutation(self._count)[:needed] if tabled else np.arange(needed)
        parts: list[Array] = []
        step = chunk or -(-2 * total // 3)
        for start in range(0, total, step):
            piece = tokens[start : start + step]
            table = order[: -(-(start + len(piece)) // page)]
            parts.append(self._run(piece, start, table).reshape(len(piece), -1))
        return np.concatenate(parts)

    def _run(self, tokens: Sequence[int], past: int, table: Array) -> Array:
        names = [self._session.logits, *(pool.present for pool in self._pages.pools)]
        feeds = self._feeds(tokens, past, table)
        logits, *updated = self._session.run(names, feeds, new=len(tokens), past=past)
        self._pools = {pool.source: array for pool, array in zip(self._pages.pools, updated, strict=True)}
        return np.asarray(logits)

    def _feeds(self, tokens: Sequence[int], past: int, table: Array) -> dict[str, Array]:
        size, roles = (len(tokens), past), self._pages.roles
        feeds: dict[str, Array] = dict(self._pools)
        for info in self._session.inputs.values():
            if info.name in feeds:
                continue
            kind = numpy_type(info.type)
            rank = len(info.shape)
            if info.name in roles:
                feeds[info.name] = shaped(feed(roles[info.name], size, table, self._pages.page), rank, kind)
            elif "mask" in info.name:
                feeds[info.name] = np.ones((1, past + len(tokens)), kind)
            elif "position" in info.name:
                feeds[info.name] = shaped(np.arange(past, past + len(tokens)), rank, kind)
            else:
                feeds[info.name] = shaped(np.asarray(tokens), rank, kind)
        return feeds
