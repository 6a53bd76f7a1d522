"""Where a graph writes new rows into pools, reads them back, and which of its inputs say where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..errors import NotConvertible
from ..graph import is_constant, node_inputs

__all__ = ["PoolGraph", "Read", "Write", "find_writes", "sources_of"]

#: Positions of the indices and of the updates among the inputs of ops that write rows into a tensor.
_WRITERS = {"ScatterND": (1, 2), "ScatterElements": (1, 2), "TensorScatter": (2, 1)}
_READERS = frozenset({"Gather", "GatherND", "GatherElements"})
_REARRANGE = frozenset({"Identity", "Reshape", "Transpose", "Cast", "Unsqueeze", "Squeeze", "Flatten"})


@dataclass(frozen=True)
class Write:
    """A pool, and where new rows are scattered into it."""

    pool: ir.Value
    node: ir.Node

    @property
    def updated(self) -> ir.Value:
        """The pool with the new rows."""
        return self.node.outputs[0]

    @property
    def updates(self) -> ir.Value:
        """The new rows."""
        return self._input(1)

    @property
    def indices(self) -> ir.Value:
        """Where they go."""
        return self._input(0)

    def _input(self, which: int) -> ir.Value:
        position = _WRITERS[self.node.op_type][which]
        value = self.node.inputs[position] if position < len(self.node.inputs) else None
        if value is None:
            raise NotConvertible("a write into a pool lacks an input", self.node.name or "", kind="pages")
        return value


@dataclass(frozen=True)
class Read:
    """A node that reads the updated pool, and the values behind it that may be a sequence's context, nearest first."""

    node: ir.Node
    candidates: tuple[ir.Value, ...]
    tables: tuple[ir.Value, ...]


def find_writes(graph: ir.Graph) -> list[Write]:
    """Every float input that rows are scattered into, as it is or rearranged."""
    writes: list[Write] = []
    for value in graph.inputs:
        if value.dtype is None or not value.dtype.is_floating_point() or len(value.shape or ()) < 2:
            continue
        stack, seen = [value], {value}
        while stack:
            for user, position in stack.pop().uses():
                if user.op_type in _WRITERS and position == 0:
                    writes.append(Write(value, user))
                elif user.op_type in _REARRANGE and position == 0 and user.outputs[0] not in seen:
                    seen.add(user.outputs[0])
                    stack.append(user.outputs[0])
    pools = [w.pool for w in writes]
    for pool in pools:
        if pools.count(pool) > 1:
            raise NotConvertible(
                f"the pool '{pool.name}' is written {pools.count(pool)} times in one step",
                next(w.node.name or "" for w in writes if w.pool is pool),
                "export with one pool for the keys and one for the values of each layer",
                kind="pages",
            )
    return writes


def sources_of(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    """Graph inputs whose data, not only their shape, values depend on."""
    found: dict[ir.Value, None] = {}
    stack, seen = [v for v in values if v is not None], set()
    while stack:
        value = stack.pop()
        producer = value.producer()
        if producer is None:
            if value.is_graph_input():
                found[value] = None
        elif producer not in seen and producer.op_type not in ("Shape", "Size"):
            seen.add(producer)
            stack.extend(node_inputs(producer))
    return list(found)


class PoolGraph:
    """A graph with pools: its inputs by their meaning, as far as their names and readers tell it.

    `integers` are those that address pages or count tokens.
    """

    def __init__(self, graph: ir.Graph, writes: Sequence[Write]) -> None:
        self.graph = graph
        self.writes = writes
        integers = [v for v in graph.inputs if v.dtype in (ir.DataType.INT64, ir.DataType.INT32)]
        addressing = set(sources_of([w.indices for w in writes]))
        self.positions = [v for v in integers if "position" in (v.name or "")]
        self.masks = [v for v in integers if "mask" in (v.name or "")]
        rest = [v for v in integers if v not in self.positions and v not in self.masks]
        self.tokens = self._find_tokens([v for v in rest if v not in addressing] or rest)
        self.integers = [v for v in rest if v is not self.tokens]

    def _find_tokens(self, candidates: Sequence[ir.Value]) -> ir.Value:
        """The integer input that rows of a constant table are looked up by."""
        for value in candidates:
            stack = [value]
            while stack:
                for user, position in stack.pop().uses():
                    if user.op_type == "Gather" and position == 1 and is_constant(user.inputs[0]):
                        return value
                    if user.op_type in _REARRANGE and position == 0:
                        stack.append(user.outputs[0])
        if len(candidates) == 1:
            return candidates[0]
        raise NotConvertible(
            "a model with pages has no input of tokens",
            hint="export the text decoder with input_ids of [batch, sequence]",
            kind="interface",
        )

    def reads(self, write: Write) -> list[Read]:
        """The nodes that read an updated pool by an index, or the pool as a whole when none does."""
        found: list[Read] = []
        stack, seen = [write.updated], {write.updated}
        while stack:
            value = stack.pop()
            for user, position in value.uses():
                if user.op_type in _READERS and position == 0:
                    tables = [v for v in sources_of(user.inputs[1:2]) if v in self.integers]
                    if tables:  # else it repeats heads
                        found.append(Read(user, self._chain(user.outputs[0]), tuple(tables)))
                elif user.op_type in _REARRANGE and position == 0 and user.outputs[0] not in seen:
                    seen.add(user.outputs[0])
                    stack.append(user.outputs[0])
        if not found and any(n.op_type not in ("Shape", "Size") for n, _ in write.updated.uses()):
            found.append(Read(write.node, self._chain(write.updated), ()))
        return found

    def _chain(self, start: ir.Value, limit: int = 8) -> tuple[ir.Value, ...]:
        chain = [start]
        while len(chain) < limit:
            users = {n for n, p in chain[-1].uses() if n.op_type in _REARRANGE | {"Slice", "Concat"} and p == 0}
            if len(users) != 1:
                break
            chain.append(users.pop().outputs[0])
        return tuple(chain)

    def present(self, write: Write) -> ir.Value | None:
        """The graph output that is the updated pool, as it is or rearranged."""
        for output in self.graph.outputs:
            value: ir.Value | None = output
            while value is not None and value is not write.updated:
                producer = value.producer()
                value = producer.inputs[0] if producer is not None and producer.op_type in _REARRANGE else None
            if value is not None:
                return output
        return None
