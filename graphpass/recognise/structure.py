"""Proves what the structural values of a graph become when many sequences are packed into one row of tokens.

Structural values that the packed graph still reads (rotary tables, position lookups, shapes) were computed for one
sequence from lengths, mask and positions. Here the ones that equal the token positions are found by value, the ones
that are constant or shapes are found by value, and every one of them is shown to be right for a ragged batch:
evaluated on packed positions, it must be what the source gives each sequence by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..errors import NotConvertible
from ..evaluate import Array, Unevaluable
from ..graph import is_constant, node_inputs
from ..stand_ins import HEAVY_ELEMENTS
from .positions import Boundary, cone_of, find_positions, packed_feeds
from .probe import Probe, Size
from .site import AttentionSite
from .sizes import reachable_integers
from .tails import Tail, find_tails

__all__ = ["StructurePlan", "plan_structure"]

#: Values with more elements than this are not turned into constants.
_LARGEST_CONSTANT = 1 << 16
#: Their results vary though their operands do not.
_RANDOM_OPS = frozenset({"RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"})


@dataclass(frozen=True)
class StructurePlan:
    """What to do with the structural values that stay alive.

    `positions`: values to replace by the token positions plus a constant. `constants`: values that never change.
    `shapes`: shape operands that are constant but for one element, which is -1 here. `position_free`: nothing reads
    positions any more. `limit`: the longest context that the source's tables allow, None when none was met.
    """

    positions: Mapping[ir.Value, int] = field(default_factory=dict)
    constants: Mapping[ir.Value, Array] = field(default_factory=dict)
    shapes: Mapping[ir.Value, Array] = field(default_factory=dict)
    position_free: bool = False
    limit: int | None = None


def plan_structure(probe: Probe, sites: Sequence[AttentionSite], longest: int) -> StructurePlan:
    """Finds and proves the plan. Raises NotConvertible for a value that packing would change."""
    boundaries = _boundaries(probe, sites)
    cone = cone_of([b.value for b in boundaries])
    limit = _length_limit(probe, [b.value for b in boundaries], longest)
    longest = limit or longest
    positions = find_positions(probe, list(dict.fromkeys(b.value for b in boundaries)))
    tails = find_tails(probe, sites)
    for tail in tails:
        positions.update(_tail_positions(probe, tail, positions, longest))
    proven: set[tuple[ir.Value, bool]] = set()
    for boundary in boundaries:
        if (boundary.value, boundary.inside_tail) not in proven:
            _prove(probe, boundary, positions, longest, tails)
            proven.add((boundary.value, boundary.inside_tail))
    constants, shapes = _folds(probe, cone, positions, longest)
    live = _reads_positions(probe, boundaries, positions, constants)
    return StructurePlan(positions, constants, shapes, position_free=not live, limit=limit)


def _length_limit(probe: Probe, values: Sequence[ir.Value], longest: int) -> int | None:
    """The longest context that the source's own tables allow, when it is shorter than `longest`."""
    values = list(dict.fromkeys(values))
    if not values:
        return None

    def runs(length: int) -> bool:
        try:
            probe.structural(values, *((1, length - 1) if probe.has_past else (length, 0)))
        except Unevaluable:
            return False
        return True

    if runs(longest):
        return None
    low, high = 2, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def _boundaries(probe: Probe, sites: Sequence[AttentionSite]) -> list[Boundary]:
    """Structural inputs of token-dependent nodes that stay alive when attention is replaced."""
    jump = {s.output.value: s for s in sites}
    tails = {node for tail in find_tails(probe, sites) for node in tail.nodes}
    joined = {link.joined: link.past for s in sites for link in (*s.key_cache, *s.value_cache)}
    found: list[Boundary] = []
    seen: set[ir.Node] = set()
    stack = [probe.interface.logits]
    while stack:
        value = stack.pop()
        if value in jump:
            site = jump[value]
            stack.extend(site.operands)
            continue
        node = value.producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        for operand in node_inputs(node):
            if operand in joined and node not in tails:
                raise NotConvertible(
                    f"the past '{joined[operand].name}' is read by something else than attention",
                    node.name or "",
                    "caches can only be attended to",
                    kind="cache",
                )
            if probe.view.taint(operand):
                stack.append(operand)
            elif not is_constant(operand) and not _is_weight(operand):
                found.append(Boundary(operand, node, node in tails))
    return found


def _is_weight(value: ir.Value) -> bool:
    """True for a heavy weight in another form (transposed, cast, dequantised): computed from constants alone.

    It needs no proof, and evaluating it at many sizes would take memory of several times its own size.
    """
    heavy = False
    seen: set[ir.Node] = set()
    stack = [value]
    while stack:
        found = stack.pop()
        producer = found.producer()
        if producer is None:
            if found.const_value is None:
                return False
            heavy |= found.const_value.size > HEAVY_ELEMENTS
        elif producer not in seen:
            if not producer.inputs or producer.op_type in _RANDOM_OPS:
                return False
            seen.add(producer)
            stack.extend(node_inputs(producer))
    return heavy


def _tail_positions(probe: Probe, tail: Tail, positions: Mapping[ir.Value, int], longest: int) -> dict[ir.Value, int]:
    """Positions of all tokens that a tail reads as such (a rotation behind the cache), not to address its own rows."""
    read = tail.structural(probe)
    found = find_positions(probe, read, of_all=True)
    found = {value: offset for value, offset in found.items() if value not in positions}
    batches = _ragged_batches(probe, read, longest)
    if not found or tail.agrees(probe, positions, batches):
        return {}
    return found if tail.agrees(probe, {**positions, **found}, batches) else {}


def _ragged_batches(probe: Probe, values: Sequence[ir.Value], longest: int) -> list[tuple[Size, Size]]:
    """Pairs of sequences to pack: ordinary ones, around each constant that the values reach, and the longest."""
    if not probe.has_past:
        sizes: list[tuple[Size, Size]] = [((3, 0), (5, 0)), ((6, 0), (2, 0))]
        constants = [c for c in reachable_integers(values, set()) if 4 <= c < min(longest, 1024)]
        return sizes + [((c + 1, 0), (3, 0)) for c in constants] + [((min(longest, 1024), 0), (2, 0))]
    pairs: list[tuple[Size, Size]] = [((3, 4), (2, 9)), ((4, 0), (1, 17)), ((1, longest - 1), (3, 0))]
    for c in sorted(reachable_integers(values, set())):
        if 4 <= c <= longest - 2:
            pairs.extend([((2, c - 1), (3, 1)), ((3, 0), (1, c)), ((1, c + 1), (2, 2))])
    return [pair for pair in pairs if all(p >= 0 and n + p <= longest for n, p in pair)]


def _prove(
    probe: Probe, boundary: Boundary, positions: Mapping[ir.Value, int], longest: int, tails: Sequence[Tail]
) -> None:
    value = boundary.value
    for first, second in _ragged_batches(probe, [value], longest):
        packed = np.concatenate([np.arange(p, p + n) for n, p in (first, second)])
        actual = probe.evaluator.run([value], packed_feeds(probe, [value], positions, packed))[0]
        alone = [probe.structural([value], n, p)[0] for n, p in (first, second)]
        if _concatenates(actual, alone):
            continue
        at_zero = probe.structural([value], packed.size, 0)[0]
        if _same(actual, at_zero) and (
            _is_shape(probe, value, first) if boundary.inside_tail else _ignores_past(probe, value, first)
        ):
            continue
        if boundary.inside_tail and all(
            tail.agrees(probe, positions, _ragged_batches(probe, tail.structural(probe), longest))
            for tail in tails
            if boundary.user in tail.nodes
        ):
            return
        raise NotConvertible(
            f"'{value.name}' mixes the tokens of a batch: for sequences of {first} and {second} (new, past) tokens "
            "packed together it is not what each gets alone",
            boundary.user.name or "",
            f"if it switches at a length, convert for shorter contexts with --max-positions (now {longest})",
            kind="batch-global",
        )


def _is_shape(probe: Probe, value: ir.Value, size: Size) -> bool:
    """True for integers of which there are as many with a past as without: shapes of what lies behind a cache."""
    new, past = size
    with_past = probe.structural([value], new, past)[0]
    return with_past.dtype.kind in "iub" and with_past.shape == probe.structural([value], new, 0)[0].shape


def _concatenates(actual: Array, alone: Sequence[Array]) -> bool:
    """True when `actual` is the parts one behind the other along an axis, or equal to each of them."""
    if all(_same(actual, part) for part in alone):
        return True
    for axis, dim in enumerate(actual.shape):
        if all(p.ndim == actual.ndim for p in alone) and dim == sum(p.shape[axis] for p in alone):
            shapes = {p.shape[:axis] + p.shape[axis + 1 :] for p in alone}
            if len(shapes) == 1 and _same(actual, np.concatenate(alone, axis)):
                return True
    return False


def _same(left: Array, right: Array) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype.kind == "f":
        return bool(np.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True))
    return bool(np.array_equal(left, right))


def _ignores_past(probe: Probe, value: ir.Value, size: Size) -> bool:
    """True for numbers of new tokens and shapes made of them: no floats, which would be data that differs by batch."""
    new, past = size
    with_past = probe.structural([value], new, past)[0]
    return with_past.dtype.kind != "f" and _same(with_past, probe.structural([value], new, 0)[0])


def _folds(
    probe: Probe, cone: Sequence[ir.Value], positions: Mapping[ir.Value, int], longest: int
) -> tuple[dict[ir.Value, Array], dict[ir.Value, Array]]:
    """Values that are the same for every number of tokens and every position, and shapes with one varying element."""
    values = [v for v in cone if v.producer() is not None and v not in positions]
    if not values:
        return {}, {}
    runs: list[list[Array]] = []
    for tokens, start in ((2, 0), (3, 5), (7, 11), (64, 100)):
        packed = np.arange(start, start + tokens) % longest  # tables end there
        runs.append(probe.evaluator.run(values, packed_feeds(probe, values, positions, packed)))
    constants: dict[ir.Value, Array] = {}
    shapes: dict[ir.Value, Array] = {}
    for index, value in enumerate(values):
        arrays = [run[index] for run in runs]
        first = arrays[0]
        if first.size > _LARGEST_CONSTANT or any(a.shape != first.shape for a in arrays):
            continue
        varying = np.zeros(first.shape, bool)
        for array in arrays[1:]:
            varying |= array != first
        if not varying.any():
            constants[value] = first
        elif first.dtype == np.int64 and first.ndim == 1 and varying.sum() == 1 and not np.any(first[~varying] < 0):
            shapes[value] = np.where(varying, -1, first)
    return constants, shapes


def _reads_positions(
    probe: Probe,
    boundaries: Sequence[Boundary],
    positions: Mapping[ir.Value, int],
    constants: Mapping[ir.Value, Array],
) -> bool:
    seen: set[ir.Value] = set()
    stack = [b.value for b in boundaries]
    while stack:
        value = stack.pop()
        if value in positions or value is probe.interface.positions:
            return True
        producer = value.producer()
        if value in seen or value in constants or producer is None or producer.op_type in ("Shape", "Size"):
            continue
        seen.add(value)
        stack.extend(node_inputs(producer))
    return False
