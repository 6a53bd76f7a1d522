"""Finds what else a graph computes from its pools and tables, so that it can follow a contiguous cache instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array
from ..graph import node_inputs
from .probe import PageProbe
from .proof import Context

__all__ = ["PageStructure", "find_structure"]


@dataclass(frozen=True)
class PageStructure:
    """`lengths`: integers that are, at any size, the number of positions of a context (table entries times page), with
    rank and type, the most upstream ones. `constants`: values from shapes of pools that never vary."""

    lengths: Mapping[ir.Value, tuple[int, np.dtype[Any]]]
    constants: Mapping[ir.Value, Array]


def find_structure(probe: PageProbe, found: Sequence[Context]) -> PageStructure:
    """Evaluates all structural values at several numbers of tokens, pages and table entries.

    Shapes of contexts, and of what is behind them, are left alone: they follow what takes the contexts' place.
    """
    context = found[0]
    whole = "table" not in context.roles.values()
    values = [v for n in probe.graph for v in n.outputs if v.name and not probe.view.taint(v)]
    shapes = _from_pool_shapes(probe, {c.value for c in found})
    forms: dict[ir.Value, tuple[int, np.dtype[Any]]] = {}
    constants: dict[ir.Value, Array] = {}
    for turn, (entries, size) in enumerate(((3, (2, 1)), (5, (1, 3)), (11, (4, 2)))):
        count = entries * 8 if whole else entries * context.page // context.positions + 2
        feeds = probe.feeds(size, np.arange(entries), context.page, context.roles, count)
        expected = count * context.positions if whole else entries * context.page
        keep = [v for v in values if turn == 0 or v in forms or v in constants]
        for value, array in zip(keep, probe.run(keep, feeds), strict=True):
            is_length = array.dtype.kind == "i" and array.size == 1 and int(array.reshape(-1)[0]) == expected
            if turn == 0:
                forms.update({value: (array.ndim, array.dtype)} if is_length else {})
                constants.update({value: array} if value in shapes else {})
            if not is_length:
                forms.pop(value, None)
            if value in constants and not np.array_equal(array, constants[value]):
                del constants[value]
    lengths = {v: form for v, form in forms.items() if not any(i in forms for i in _inputs(v))}
    return PageStructure(lengths, constants)


def _inputs(value: ir.Value) -> list[ir.Value]:
    producer = value.producer()
    return [] if producer is None else node_inputs(producer)


def _from_pool_shapes(probe: PageProbe, contexts: set[ir.Value]) -> set[ir.Value]:
    """Structural values computed from the shape of a pool, or of what is read from one before the contexts."""
    before: set[ir.Value] = set(probe.pools)
    found: set[ir.Value] = set()
    for node in probe.graph:
        inputs = node_inputs(node)
        if node.op_type in ("Shape", "Size"):
            derived = node.inputs[0] in before
        else:
            before.update(v for v in node.outputs if v not in contexts and any(i in before for i in inputs))
            derived = any(v in found for v in inputs)
        if derived:
            found.update(v for v in node.outputs if not probe.view.taint(v))
    return found
