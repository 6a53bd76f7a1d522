"""A read-only view of a graph: which values depend on token data, which on caches, and which only on shapes.

Values that depend only on shapes, positions, masks and constants are called *structural*: they can be evaluated
exactly without the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

__all__ = [
    "CACHE",
    "DATA",
    "GraphView",
    "implicit_inputs",
    "integer",
    "is_constant",
    "number",
    "optional_input",
    "static_size",
    "unique_name",
]

DATA = 1
CACHE = 2

#: Ops whose output depends on the shape of their input only.
_SHAPE_OPS = frozenset({"Shape", "Size"})
#: Ops whose output's shape depends on the data of their input, and ops whose output has the shape of the first input.
_DATA_SHAPED_OPS = frozenset({"NonZero", "Unique", "Compress"})
_SCATTER_OPS = frozenset({"ScatterElements", "ScatterND", "Scatter"})


def is_constant(value: ir.Value | None) -> bool:
    """True for an initializer that is not also a graph input."""
    return value is not None and value.is_initializer() and not value.is_graph_input()


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """An integer attribute, or its default."""
    return node.attributes[name].as_int() if name in node.attributes else default


def number(node: ir.Node, name: str, default: float = 0.0) -> float:
    """A float attribute, or its default."""
    return node.attributes[name].as_float() if name in node.attributes else default


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """An input, or None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def static_size(dim: int | ir.SymbolicDim, symbols: Mapping[str, int] | None = None) -> int | None:
    """A dimension's size: stated, stated as a text, or known for its symbol."""
    if isinstance(dim, int):
        return dim
    text = str(dim.value) if dim.value is not None else ""
    return int(text) if text.isdigit() else (symbols or {}).get(text)


def implicit_inputs(node: ir.Node) -> list[ir.Value]:
    """Outer values that the node's subgraphs (of If, Loop, Scan) use."""
    found: list[ir.Value] = []
    if node.op_type not in ("If", "Loop", "Scan"):
        return found
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.extend(_free_values(attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                found.extend(_free_values(graph))
    return found


def _free_values(graph: ir.Graph) -> Iterator[ir.Value]:
    local = set(graph.inputs) | set(graph.initializers.values())
    for node in graph:
        for value in (*node.inputs, *implicit_inputs(node)):
            if value is not None and value not in local:
                yield value
        local.update(node.outputs)
    for value in graph.outputs:
        if value not in local:
            yield value


def node_inputs(node: ir.Node) -> list[ir.Value]:
    """All values that a node reads, the ones its subgraphs capture included."""
    return [v for v in node.inputs if v is not None] + implicit_inputs(node)


def unique_name(graph: ir.Graph, stem: str) -> str:
    """A value name that the graph does not use yet."""
    used = {v.name for n in graph for v in n.outputs}
    used |= {v.name for v in graph.inputs} | set(graph.initializers)
    name, count = stem, 0
    while name in used:
        count += 1
        name = f"{stem}_{count}"
    return name


class GraphView:
    """Dependence of every value of a graph, and walks over it.

    `data` are the graph inputs that carry token data (input_ids), `caches` those that carry past keys and values.
    """

    def __init__(self, graph: ir.Graph, data: Iterable[ir.Value], caches: Iterable[ir.Value]) -> None:
        self.graph = graph
        self.order: dict[ir.Node, int] = {}
        self._taint: dict[ir.Value, int] = dict.fromkeys(data, DATA)
        self._taint.update(dict.fromkeys(caches, CACHE))
        self.by_name: dict[str, ir.Value] = {}
        for value in (*graph.inputs, *graph.initializers.values()):
            self.by_name[value.name or ""] = value
        #: Values whose very shape depends on token data (what NonZero finds, and what is computed from it).
        self.dynamic: set[ir.Value] = set()
        for index, node in enumerate(graph):
            self.order[node] = index
            taint = self._node_taint(node)
            dynamic = self._is_dynamic(node, taint)
            for out in node.outputs:
                self._taint[out] = taint
                self.by_name[out.name or ""] = out
                if dynamic:
                    self.dynamic.add(out)

    def _node_taint(self, node: ir.Node) -> int:
        inputs = node_inputs(node)
        if node.op_type in _SHAPE_OPS and not node.domain:
            return self._taint.get(inputs[0], 0) if inputs[0] in self.dynamic else 0
        taint = 0
        for value in inputs:
            taint |= self._taint.get(value, 0)
        return taint

    def _is_dynamic(self, node: ir.Node, taint: int) -> bool:
        if not taint or node.op_type in _SHAPE_OPS:
            return False
        if node.op_type in _DATA_SHAPED_OPS:
            return True
        inputs = node_inputs(node)
        return any(v in self.dynamic for v in (inputs[:1] if node.op_type in _SCATTER_OPS else inputs))

    def taint(self, value: ir.Value | None) -> int:
        """Bits DATA and CACHE of what the value depends on; 0 is structural."""
        return 0 if value is None else self._taint.get(value, 0)

    def is_data(self, value: ir.Value | None) -> bool:
        """True when the value depends on token data."""
        return bool(self.taint(value) & DATA)

    def tainted_inputs(self, node: ir.Node) -> list[ir.Value]:
        """Distinct inputs that are not structural, in order."""
        seen: dict[ir.Value, None] = {}
        for value in node_inputs(node):
            if self.taint(value):
                seen[value] = None
        return list(seen)

    def data_inputs(self, node: ir.Node) -> list[ir.Value]:
        """Distinct inputs that depend on token data, in order."""
        return [v for v in self.tainted_inputs(node) if self.is_data(v)]

    def dominators(self, *targets: ir.Value, limit: int = 64) -> list[ir.Value]:
        """Values that every token-data path into the targets passes, nearest first; a single target is one itself.

        Stops at products with constant weights (their output is the last one given), at graph inputs, and after
        `limit` nodes.
        """
        found: list[ir.Value] = []
        pending = set(targets)
        for _ in range(limit):
            if len(pending) == 1:
                found.append(next(iter(pending)))
            latest = self.latest(pending)
            producer = latest.producer()
            if producer is None or self.ends_walk(producer):
                break
            pending.discard(latest)
            pending.update(self.data_inputs(producer))
        return found

    def latest(self, values: Iterable[ir.Value]) -> ir.Value:
        """The one that is computed last."""
        return max(values, key=lambda v: -1 if (producer := v.producer()) is None else self.order[producer])

    def ends_walk(self, node: ir.Node) -> bool:
        """True for products with constant weights and lookups by tokens: no layout is followed through them."""
        if node.op_type == "Gather":
            return not self.taint(node.inputs[0])  # a lookup by tokens
        if node.op_type in ("MatMul", "Gemm", "MatMulNBits", "MatMulInteger"):
            return len(self.data_inputs(node)) <= 1
        return False

    def between(self, start: Iterable[ir.Value], end: ir.Value) -> list[ir.Node]:
        """Nodes on token-data or cache paths from any of `start` to `end`, in graph order."""
        stops = set(start)
        nodes: set[ir.Node] = set()
        stack = [end]
        while stack:
            value = stack.pop()
            producer = value.producer()
            if value in stops or producer is None or producer in nodes:
                continue
            nodes.add(producer)
            stack.extend(self.tainted_inputs(producer))
        return sorted(nodes, key=self.order.__getitem__)
