"""Finds by evaluation how one value is laid out in another: fed with numbers that name their place, a region that only
moves, repeats and scales elements shows where each went."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array, Unevaluable
from .probe import Probe
from .site import Operand, Output

__all__ = ["Moved", "find_operand", "find_output", "moved"]

#: Token count of layout probes; a prime, so that it is no head count or size by accident.
TOKENS = 7


@dataclass(frozen=True)
class Moved:
    """`target.flat[i] == scale * source.flat[index.flat[i]]` for every element."""

    index: np.ndarray[Any, Any]
    scale: float


def moved(probe: Probe, source: ir.Value, target: ir.Value, *, tokens: int = TOKENS) -> Moved | None:
    """How `target` takes its elements from `source` at (tokens, 0), or None when it does more than move them."""
    try:
        shape = probe.shape(source, tokens, 0)
        dtype = probe.dtype(source)
        if dtype.kind != "f":
            return None
        ones = _run(probe, source, target, np.ones(shape, dtype), tokens)
    except Unevaluable:
        return None
    if ones.size == 0 or not np.all(ones == ones.flat[0]) or not np.isfinite(ones.flat[0]) or ones.flat[0] == 0:
        return None
    scale = float(ones.flat[0])
    count = int(np.prod(shape))
    place = np.arange(count)
    index = np.zeros(ones.shape, np.int64)
    base = 256  # digits that float16 holds exactly, scaled or not
    for power in range(max(1, int(np.ceil(np.log(max(count, 2)) / np.log(base))))):
        digit = (place // base**power) % base
        out = _run(probe, source, target, digit.reshape(shape).astype(dtype), tokens)
        index += np.rint(out.astype(np.float64) / scale).astype(np.int64) * base**power
    if index.min() < 0 or index.max() >= count:
        return None
    sample = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    out = _run(probe, source, target, sample, tokens).astype(np.float64)
    expected = scale * sample.reshape(-1)[index].astype(np.float64)
    tolerance = 4e-3 if dtype == np.float16 else 1e-5
    return Moved(index, scale) if np.allclose(out, expected, rtol=tolerance, atol=tolerance) else None


def _run(probe: Probe, source: ir.Value, target: ir.Value, array: Array, tokens: int) -> Array:
    return probe.region([target], {source: array}, tokens, 0)[0]


def find_operand(probe: Probe, candidates: Sequence[ir.Value], target: ir.Value, place_HTD: Array) -> Operand | None:
    """The best value among `candidates` (nearest first) to take an operand from.

    `place_HTD` gives, per (head, token, channel), the flat place in `target` of the operand's element. Preferred is a
    value from before heads are repeated; then the farthest that is `[T, heads * size]` already; then the farthest that
    a transpose turns into it.
    """
    best: Operand | None = None
    for candidate in candidates:
        found = moved(probe, candidate, target)
        if found is None:
            break
        source_HTD = found.index.reshape(-1)[place_HTD]
        operand = _operand(probe, candidate, source_HTD, found.scale)
        if operand is None:
            continue
        if (
            best is None
            or operand.heads < best.heads
            or (operand.heads == best.heads and (operand.perm is None or best.perm is not None))
        ):
            best = operand
    return best


def _operand(probe: Probe, value: ir.Value, source_HTD: Array, scale: float) -> Operand | None:
    heads, tokens, size = source_HTD.shape
    repeat = _repeats(source_HTD)
    unique_GTD = source_HTD[::repeat]
    groups = heads // repeat
    shape = probe.shape(value, tokens, 0)
    if int(np.prod(shape)) != unique_GTD.size or np.unique(unique_GTD).size != unique_GTD.size:
        return None
    wanted = unique_GTD.transpose(1, 0, 2).reshape(-1)
    if np.array_equal(wanted, np.arange(wanted.size)):
        return Operand(value=value, heads=groups, size=size, scale=scale)
    perm = _permutation(shape, wanted)
    return None if perm is None else Operand(value=value, heads=groups, size=size, perm=perm, scale=scale)


def _repeats(source_HTD: Array) -> int:
    """The largest R such that each R consecutive heads take the same elements."""
    heads = source_HTD.shape[0]
    for repeat in range(heads, 1, -1):
        if heads % repeat == 0 and np.array_equal(source_HTD, np.repeat(source_HTD[::repeat], repeat, axis=0)):
            return repeat
    return 1


def _permutation(shape: tuple[int, ...], wanted: Array) -> tuple[int, ...] | None:
    """The axis order whose transpose lists the elements in the wanted order."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    large = [a for a, d in enumerate(shape) if d > 1]
    unit = [a for a, d in enumerate(shape) if d == 1]
    for order in itertools.permutations(large):
        if np.array_equal(places.transpose((*unit, *order)).reshape(-1), wanted):
            return (*unit, *order)
    return None


def find_output(probe: Probe, start: ir.Value, place_HTD: Array) -> Output | None:
    """The farthest value downstream of `start` that holds the attention output as `[T, H * Dv]`, else the nearest one
    that a transpose makes of it."""
    tokens = place_HTD.shape[1]
    wanted = place_HTD.transpose(1, 0, 2).reshape(-1)
    best: Output | None = None
    transposed: Output | None = None
    for value in _forward_chain(probe, start):
        found = moved(probe, start, value)
        if found is None or found.scale != 1.0:
            break
        if found.index.size != wanted.size:
            continue
        if np.array_equal(found.index.reshape(-1), wanted):
            dims = _dims(probe, value)
            best = Output(value=value, dims=dims) if dims is not None else best
        elif transposed is None:
            places = np.argsort(found.index.reshape(-1))
            if np.array_equal(found.index.reshape(-1)[places], np.arange(wanted.size)):
                transposed = _transposed(probe, value, places[wanted], tokens)
    return best or transposed


def _transposed(probe: Probe, value: ir.Value, wanted: Array, tokens: int) -> Output | None:
    """The output at a value whose elements at the places `wanted`, in this order, are `[T, H * Dv]`."""
    perm = _permutation(probe.shape(value, tokens, 0), wanted)
    if perm is None:
        return None
    affine = probe.affine(value) or ()
    dims = tuple(-1 if affine[a][1] else affine[a][0] for a in perm)
    return Output(value=value, dims=dims, perm=tuple(int(a) for a in np.argsort(perm)))


def _forward_chain(probe: Probe, start: ir.Value, limit: int = 10) -> list[ir.Value]:
    chain = [start]
    value = start
    for _ in range(limit):
        users = {node for node, _ in value.uses() if node.op_type != "Shape" and node in probe.view.order}
        if len(users) != 1:
            break
        user = users.pop()
        if len(probe.view.tainted_inputs(user)) != 1 or len(user.outputs) != 1 or probe.view.ends_walk(user):
            break
        value = user.outputs[0]
        chain.append(value)
    return chain


def _dims(probe: Probe, value: ir.Value) -> tuple[int, ...] | None:
    affine = probe.affine(value)
    if affine is None or sum(1 for _, per_new, _ in affine if per_new) != 1:
        return None
    return tuple(-1 if per_new else constant for constant, per_new, _ in affine)
