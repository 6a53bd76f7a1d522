"""Feeds and runs a graph with pools for one sequence: which pages it has is up to the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..evaluate import Array, Evaluator
from ..graph import GraphView, static_size
from .interface import feed, shaped
from .pools import PoolGraph, Write

__all__ = ["PageProbe", "Roles"]

#: Meanings of the integer inputs, of "table", "slots", "slot page", "slot offset" and LENGTH_ROLES.
Roles = Mapping[ir.Value, str]

#: Sizes tried for open dimensions of a pool other than the one that counts pages.
_OPEN_SIZES = (4, 1)
#: Bounds of the open dimension of a probed pool, and the number of elements that is aimed at.
_FEWEST, _MOST, _ELEMENTS = 12, 4096, 1 << 22


class PageProbe(PoolGraph):
    """Evaluates the pools of one model for one sequence."""

    def __init__(self, model: ir.Model, writes: Sequence[Write]) -> None:
        super().__init__(model.graph, writes)
        self.pools = {w.pool: w for w in writes}
        self.view = GraphView(model.graph, [self.tokens], list(self.pools))
        self._evaluator = Evaluator(model, self.view)
        self.shapes = {w.pool: self.shape_guesses(w.pool)[0] for w in writes}

    def run(self, outputs: Sequence[ir.Value], feeds: Mapping[ir.Value, Array]) -> list[Array]:
        """Values of `outputs`; products with heavy weights have the right shape only."""
        return self._evaluator.run(outputs, feeds, light=True)

    def shape_guesses(self, pool: ir.Value) -> list[tuple[int | None, ...]]:
        """Shapes of a pool with None at the dimension that counts pages or slots."""
        dims = [static_size(d) for d in (pool.shape or ())]
        opens = [axis for axis, d in enumerate(dims) if d is None]
        counted = [
            tuple(None if a == axis else (other if d is None else d) for a, d in enumerate(dims))
            for axis in opens
            for other in (_OPEN_SIZES if len(opens) > 1 else (1,))
        ]
        return [*counted, tuple(1 if d is None else d for d in dims)]  # the last: all of it is one sequence's

    def count(self, pool: ir.Value) -> int:
        """Size of the open dimension of a probed pool."""
        rest = int(np.prod([d for d in self.shapes[pool] if d is not None]))
        return min(_MOST, max(_FEWEST, _ELEMENTS // rest))

    def pool_array(self, pool: ir.Value, count: int | None = None) -> Array:
        """A pool full of -1, which no written row has."""
        count = self.count(pool) if count is None else count
        shape = [count if d is None else d for d in self.shapes[pool]]
        return np.full(shape, -1.0, pool.dtype.numpy())  # type: ignore[union-attr]

    def feeds(
        self, size: tuple[int, int], table: Array, page: int, roles: Roles, count: int | None = None
    ) -> dict[ir.Value, Array]:
        """Feeds of all inputs for a sequence of (new, past) tokens whose pages the table lists."""
        new, past = size
        feeds: dict[ir.Value, Array] = {}
        for value in self.graph.inputs:
            kind = value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)
            rank = len(value.shape or ())
            if value in self.pools:
                feeds[value] = self.pool_array(value, count)
            elif value is self.tokens:
                feeds[value] = shaped(np.arange(new) % 7, rank, kind)
            elif value in self.positions:
                feeds[value] = shaped(np.arange(past, past + new), rank, kind)
            elif value in self.masks:
                feeds[value] = np.ones((1, past + new), kind)
            elif value in self.integers:
                feeds[value] = shaped(feed(roles.get(value, "total"), size, table, page), rank, kind)
        return feeds
