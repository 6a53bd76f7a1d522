"""Finds by value which structural values are the token positions, and how they are fed when tokens are packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array
from ..graph import is_constant, node_inputs
from .probe import Probe, Size

__all__ = ["Boundary", "cone_of", "find_positions", "packed_feeds"]


@dataclass(frozen=True)
class Boundary:
    """A structural value that a token-dependent node reads."""

    value: ir.Value
    user: ir.Node
    inside_tail: bool


def cone_of(values: Iterable[ir.Value]) -> list[ir.Value]:
    """All non-constant values that the given structural values are computed from, themselves included."""
    found: dict[ir.Value, None] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        if value in found or is_constant(value):
            continue
        found[value] = None
        producer = value.producer()
        if producer is not None and producer.op_type not in ("Shape", "Size"):
            stack.extend(node_inputs(producer))
    return list(found)


def _position_sizes(probe: Probe) -> list[Size]:
    return [(5, 0), (3, 4), (4, 9), (1, 12)] if probe.has_past else [(5, 0), (3, 0), (11, 0)]


def find_positions(probe: Probe, read: Sequence[ir.Value], *, of_all: bool = False) -> dict[ir.Value, int]:
    """Values equal to the positions of the new tokens plus a constant that are not computed from the input for them,
    among those that the values `read` are computed from. `of_all`: equal to the positions of past and new tokens."""
    sizes = _position_sizes(probe)
    values = [v for v in cone_of(read) if v.producer() is not None]
    if not values:
        return {}
    runs = [probe.structural(values, n, p) for n, p in sizes]
    sizes = [(n + p, 0) for n, p in sizes] if of_all else sizes
    offsets: dict[ir.Value, int] = {}
    for index, value in enumerate(values):
        offset = _offset([run[index] for run in runs], sizes)
        if offset is not None:
            offsets[value] = offset
    chosen: dict[ir.Value, int] = {}
    seen: set[ir.Value] = set()
    stack = list(read)
    while stack:
        value = stack.pop()
        if value in seen or is_constant(value):
            continue
        seen.add(value)
        if value in offsets:
            if _needs_replacing(probe, value):
                origin = _most_upstream(value, offsets)
                chosen[origin] = offsets[origin]
            continue
        producer = value.producer()
        if producer is not None and producer.op_type not in ("Shape", "Size"):
            stack.extend(node_inputs(producer))
    return chosen


def _offset(arrays: Sequence[Array], sizes: Sequence[Size]) -> int | None:
    """The constant by which arrays exceed the positions of new tokens, or None."""
    found: set[int] = set()
    for array, (new, past) in zip(arrays, sizes, strict=True):
        if array.size != new or array.dtype.kind not in "if":
            return None
        difference = array.reshape(-1).astype(np.float64) - np.arange(past, past + new)
        if not np.isfinite(difference[0]) or not np.all(difference == difference[0]) or difference[0] % 1:
            return None
        found.add(int(difference[0]))
    return found.pop() if len(found) == 1 else None


def _needs_replacing(probe: Probe, value: ir.Value) -> bool:
    """True unless the value is computed from the position input alone (and the number of new tokens)."""
    inputs = {v for v in cone_of([value]) if v.producer() is None}
    if probe.interface.positions not in inputs:
        return True
    return probe.interface.mask in inputs


def _most_upstream(value: ir.Value, offsets: Mapping[ir.Value, int]) -> ir.Value:
    while (producer := value.producer()) is not None:
        nearer = [v for v in node_inputs(producer) if v in offsets]
        if len(nearer) != 1:
            break
        value = nearer[0]
    return value


def packed_feeds(
    probe: Probe, values: Sequence[ir.Value], positions: Mapping[ir.Value, int], packed: Array
) -> dict[ir.Value, Array]:
    """Feeds that evaluate structural values of the source graph as the packed graph will: one row of tokens, no past,
    and the packed positions wherever positions are read."""
    tokens = packed.size
    feeds = probe.structural_feeds(values, tokens, 0)
    given = probe.interface.positions
    if given is not None and given in feeds:
        feeds[given] = packed.astype(feeds[given].dtype).reshape(feeds[given].shape)
    for value, offset in positions.items():
        shape, kind = _position_form(probe, value, tokens)
        feeds[value] = (packed + offset).astype(kind).reshape(shape)
    return feeds


def _position_form(probe: Probe, value: ir.Value, tokens: int) -> tuple[tuple[int, ...], Any]:
    array = probe.structural([value], tokens, 0)[0]
    return array.shape, array.dtype
