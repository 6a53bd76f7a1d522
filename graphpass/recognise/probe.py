"""Evaluates a source graph for one sequence of chosen lengths: shapes of all values, and structural values exactly.

A size is (new, past): `new` tokens on top of `past` cached ones, batch 1, nothing masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array, Evaluator, Unevaluable
from ..graph import GraphView, integer, node_inputs
from ..io_contract import SourceInterface
from ..paging.interface import feed, shaped

__all__ = ["Probe", "Size"]

Size = tuple[int, int]

#: Shapes are measured at these sizes; the last one checks that they are affine in both lengths.
_SIZES_WITH_PAST: tuple[Size, ...] = ((3, 5), (4, 5), (3, 7), (6, 11))
_SIZES_WITHOUT: tuple[Size, ...] = ((3, 0), (4, 0), (9, 0))
#: For sources that take either no past or one new token.
_SIZES_SINGLE: tuple[Size, ...] = ((3, 0), (4, 0), (1, 5), (1, 7), (1, 11))


class Probe:
    """Shapes and structural values of a source model as functions of (new, past)."""

    def __init__(self, model: ir.Model, view: GraphView, interface: SourceInterface) -> None:
        self.model = model
        self.view = view
        self.interface = interface
        self.evaluator = Evaluator(model, view)
        self.has_past = bool(interface.caches)
        self._cache_shapes: dict[ir.Value, tuple[int | None, ...]] = {}
        self._affine: dict[ir.Value, tuple[tuple[int, int, int], ...]] = {}
        #: Least number of past entries that a cache input must have room for (a kernel that keeps a ring of a window).
        self.capacities: dict[ir.Value, int] = {}
        #: The source declares that each step brings one new token, or takes no more behind a past: it is evaluated at
        #: such sizes only.
        self.single_token = _declares_single_token(interface)
        self.dtypes: dict[ir.Value, np.dtype[Any]] = {}
        #: Values with an axis of rows that holds all tokens of one head before those of the next.
        self.tokens_innermost: set[ir.Value] = set()

    def set_cache_shape(self, cache: ir.Value, shape: tuple[int | None, ...]) -> None:
        """States a cache input's shape for batch 1; None marks the axis of past tokens."""
        self._cache_shapes[cache] = shape
        self._affine[cache] = tuple((0, 0, 1) if d is None else (d, 0, 0) for d in shape)

    def cache_shape(self, cache: ir.Value) -> tuple[int | None, ...]:
        """A cache input's shape for batch 1, None at the axis of past tokens."""
        return self._cache_shapes[cache]

    def graph_feeds(self, new: int, past: int) -> dict[ir.Value, Array]:
        """Feeds of every graph input that is not a cache."""
        io = self.interface
        feeds: dict[ir.Value, Array] = {io.tokens: (np.arange(new) % 7)[None].astype(io.tokens.dtype.numpy())}  # type: ignore[union-attr]
        if io.mask is not None:
            feeds[io.mask] = np.ones((1, past + new), io.mask.dtype.numpy())  # type: ignore[union-attr]
        if io.positions is not None:
            kind = io.positions.dtype.numpy()  # type: ignore[union-attr]
            rank = len(io.positions.shape or (1, 1))
            positions = np.arange(past, past + new, dtype=kind)
            feeds[io.positions] = positions.reshape((1,) * (rank - 1) + (new,))
        for scalar in io.scalars:
            shape = [d if isinstance(d, int) else 1 for d in (scalar.shape or ())]
            feeds[scalar] = np.full(shape, past, scalar.dtype.numpy())  # type: ignore[union-attr]
        for value, role in io.paged.items():
            rank, kind = len(value.shape or ()), value.dtype.numpy()  # type: ignore[union-attr]
            feeds[value] = shaped(feed(role, (new, past), np.arange(past + new), 1), rank, kind)
        return feeds

    def cache_feeds(self, past: int) -> dict[ir.Value, Array]:
        """Zero caches of `past` tokens."""
        return {
            cache: np.zeros([past if d is None else d for d in shape], cache.dtype.numpy())  # type: ignore[union-attr]
            for cache, shape in self._cache_shapes.items()
        }

    def measure(self) -> None:
        """Runs the model without its heavy weights at a few sizes and fits the shape of every value."""
        sizes = _SIZES_WITH_PAST if self.has_past else _SIZES_WITHOUT
        values = [
            v
            for n in self.view.graph
            for v in (n.outputs[:1] if n.op_type == "GroupQueryAttention" else n.outputs)
            if v.name and self.view.taint(v)
        ]
        try:
            runs = [self._shapes(values, new, past) for new, past in sizes]
        except Unevaluable:
            if not self.has_past:
                raise
            self.single_token, sizes = True, _SIZES_SINGLE
            runs = [self._shapes(values, new, past) for new, past in sizes]
        for index, value in enumerate(values):
            fitted = _fit_shapes(sizes, [run[index] for run in runs])
            if fitted is not None and value not in self.view.dynamic:
                self._affine[value] = fitted
        io = self.interface
        for given in (io.tokens, io.positions, io.mask):
            if given is not None:
                length = (0, 1, 1) if given is io.mask else (0, 1, 0)
                rank = len(given.shape or (1, 1))
                self._affine[given] = ((1, 0, 0),) * (rank - 1) + (length,)

    def _shapes(self, values: Sequence[ir.Value], new: int, past: int) -> list[tuple[int, ...]]:
        feeds = self.graph_feeds(new, past) | self.cache_feeds(past)
        arrays = self.evaluator.run(values, feeds, light=True)
        for value, array in zip(values, arrays, strict=True):
            self.dtypes[value] = array.dtype
        return [a.shape for a in arrays]

    def shape(self, value: ir.Value, new: int, past: int) -> tuple[int, ...]:
        """A value's shape at a size. Raises Unevaluable when it depends on more than the two lengths."""
        if value in self._affine:
            return tuple(c + a * new + b * past for c, a, b in self._affine[value])
        if value.is_initializer() and value.const_value is not None:
            return tuple(int(d) for d in value.const_value.shape.numpy())
        raise Unevaluable("a shape depends on more than the lengths", value.name or "", kind="shape")

    def affine(self, value: ir.Value) -> tuple[tuple[int, int, int], ...] | None:
        """Per axis (constant, factor of new, factor of past), or None when the shape is not affine."""
        return self._affine.get(value)

    def dtype(self, value: ir.Value) -> np.dtype[Any]:
        """A value's element type in numpy's terms."""
        if value in self.dtypes:
            return self.dtypes[value]
        if value.dtype is None:
            raise Unevaluable("the element type of a value is unknown", value.name or "")
        return np.dtype(value.dtype.numpy())

    def structural_feeds(self, values: Iterable[ir.Value], new: int, past: int) -> dict[ir.Value, Array]:
        """Feeds that make structural values computable: graph inputs, and the shapes of data values they read."""
        feeds = self.graph_feeds(new, past)
        seen: set[ir.Node] = set()
        stack = list(values)
        while stack:
            producer = stack.pop().producer()
            if producer is None or producer in seen:
                continue
            seen.add(producer)
            source = producer.inputs[0] if producer.inputs else None
            if producer.op_type in ("Shape", "Size") and source is not None and self._fixed_shape(source):
                feeds[producer.outputs[0]] = self._shape_output(producer, self.shape(source, new, past))
                continue
            stack.extend(node_inputs(producer))
        used = _graph_inputs_used(values, set(feeds))
        return {v: a for v, a in feeds.items() if v.producer() is not None or v in used}

    def _fixed_shape(self, source: ir.Value) -> bool:
        return bool(self.view.taint(source)) or source in self._affine

    @staticmethod
    def _shape_output(node: ir.Node, shape: tuple[int, ...]) -> Array:
        if node.op_type == "Size":
            return np.array(int(np.prod(shape)), np.int64)
        start = integer(node, "start")
        end = integer(node, "end", len(shape))
        return np.array(shape[start:end], np.int64)

    def structural(self, values: Sequence[ir.Value], new: int, past: int) -> list[Array]:
        """Exact values of structural graph values at a size."""
        return self.evaluator.run(values, self.structural_feeds(values, new, past))

    def region(self, outputs: Sequence[ir.Value], given: Mapping[ir.Value, Array], new: int, past: int) -> list[Array]:
        """Values of a region whose tainted inputs are given; its structural inputs are computed at (new, past)."""
        return self.evaluator.run(outputs, self.region_feeds(outputs, given, new, past))

    def region_feeds(
        self, outputs: Sequence[ir.Value], given: Mapping[ir.Value, Array], new: int, past: int
    ) -> dict[ir.Value, Array]:
        """The feeds of `region`: the given values and what its structural inputs need."""
        nodes = set()
        structural: dict[ir.Value, None] = {}
        caches: dict[ir.Value, Array] = {}
        stack = [v for v in outputs if v not in given]
        while stack:
            value = stack.pop()
            if not self.view.taint(value):
                structural[value] = None
                continue
            producer = value.producer()
            if value in self._cache_shapes:
                shape = [past if d is None else d for d in self._cache_shapes[value]]
                caches[value] = np.zeros(shape, self.dtype(value))
            if producer is None or producer in nodes:
                continue
            nodes.add(producer)
            stack.extend(v for v in node_inputs(producer) if v not in given)
        return {**self.structural_feeds(list(structural), new, past), **caches, **given}


def _declares_single_token(interface: SourceInterface) -> bool:
    """True when a present output is declared to be exactly one entry longer than its past."""
    for present in interface.presents:
        for dim in present.shape or ():
            text = "" if isinstance(dim, int) or dim.value is None else str(dim.value).replace(" ", "")
            if text.endswith("+1") and not text[:-2].endswith("sequence_length+sequence_length"):
                return True
    return False


def _graph_inputs_used(values: Iterable[ir.Value], stops: set[ir.Value]) -> set[ir.Value]:
    used: set[ir.Value] = set()
    seen: set[ir.Node] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        producer = value.producer()
        if producer is None:
            used.add(value)
        elif value not in stops and producer not in seen:
            seen.add(producer)
            stack.extend(node_inputs(producer))
    return used


def _fit_shapes(sizes: Sequence[Size], shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int, int], ...] | None:
    """Per axis (constant, factor of new, factor of past) that explains all measured shapes, or None."""
    if len({len(s) for s in shapes}) != 1:
        return None
    terms = np.array([(1, new, past) for new, past in sizes])
    measured = np.array(shapes).reshape(len(sizes), -1)
    fitted = np.rint(np.linalg.lstsq(terms, measured, rcond=None)[0]).astype(np.int64)
    if not np.array_equal(terms @ fitted, measured):
        return None
    return tuple((int(c), int(a), int(b)) for c, a, b in fitted.T)
