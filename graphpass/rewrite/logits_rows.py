"""Computes logits only for the rows asked for: gathers them before the last product with constant weights."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names

from ..errors import NotConvertible
from ..graph import integer, is_constant, node_inputs
from ..recognise.probe import Probe
from .builder import Builder

__all__ = ["LogitsPlan", "gather_logits", "plan_logits"]

_PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits", "MatMulInteger"})
#: Operators that compute each row from the same row of their operands, the others being constants.
_ROW_BY_ROW = frozenset(
    {
        *("Add", "Cast", "Clip", "Div", "Equal", "Max", "Min", "Mul", "Neg", "Round", "Sub", "Where"),
        *("Sigmoid", "Tanh", "Sqrt", "Pow"),
    }
)


@dataclass(frozen=True)
class LogitsPlan:
    """Where rows are gathered: `value` along `axis`, as the input of `users` (none: at the logits themselves)."""

    value: ir.Value
    axis: int
    users: tuple[ir.Node, ...]
    vocab: int


def plan_logits(probe: Probe) -> LogitsPlan:
    """Finds the place. Raises NotConvertible when the source has no logits for every token."""
    logits = probe.interface.logits
    affine = probe.affine(logits)
    if affine is None or len(affine) < 2:
        raise NotConvertible(f"output '{logits.name}' has no fixed layout", kind="interface")
    axes = [a for a, (_, per_new, _) in enumerate(affine) if per_new]
    if len(axes) != 1 or affine[axes[0]] != (0, 1, 0):
        raise NotConvertible(
            f"output '{logits.name}' does not have one row of logits a token",
            logits.producer().name or "" if logits.producer() else "",  # type: ignore[union-attr]
            "export with logits for all tokens",
            kind="interface",
        )
    vocab = affine[-1][0]
    value = logits
    users: tuple[ir.Node, ...] = ()
    while (node := value.producer()) is not None:
        inputs = probe.view.data_inputs(node)
        loose = [v for v in node_inputs(node) if not probe.view.taint(v) and not _is_fixed(v)]
        if loose:
            break
        nodes, start = ([node], inputs[0]) if len(inputs) == 1 else _row_by_row(probe, node)
        if start is None:
            break
        value = start
        if any(n.op_type in _PRODUCTS for n in nodes):
            users = tuple(n for n in nodes if start in node_inputs(n))
            break
    at = _token_axis(probe, value)
    if not users or at is None:
        return LogitsPlan(logits, axes[0], (), vocab)
    return LogitsPlan(value, at, users, vocab)


def _row_by_row(probe: Probe, last: ir.Node, limit: int = 40) -> tuple[list[ir.Node], ir.Value | None]:
    """The nodes that compute the output of `last` from one value, each row from its own row; None when there is none.

    Products whose activations are quantised for each token have several ways from those to the result.
    """
    view = probe.view
    nodes, pending = [last], set(view.data_inputs(last))
    while len(pending) > 1 and len(nodes) < limit:
        latest = view.latest(pending)
        node = latest.producer()
        if node is None:
            return nodes, None
        nodes.append(node)
        pending.discard(latest)
        pending.update(view.data_inputs(node))
    fixed = all(is_constant(v) for n in nodes for v in node_inputs(n) if not view.taint(v))
    if len(pending) != 1 or not fixed or not all(_keeps_rows(n) for n in nodes):
        return nodes, None
    return nodes, pending.pop()


def _keeps_rows(node: ir.Node) -> bool:
    if node.op_type == "MatMulInteger":
        return is_constant(node.inputs[1])
    if node.op_type not in ("ReduceMin", "ReduceMax"):
        return node.op_type in _ROW_BY_ROW
    given = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
    axes = node.attributes["axes"].as_ints() if "axes" in node.attributes else () if given is None else given.numpy()
    return integer(node, "keepdims", 1) == 1 and [int(a) for a in axes] == [-1]


def _is_fixed(value: ir.Value) -> bool:
    """True for a constant and for what is computed from constants alone, like the transposed embedding as weights."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value in seen or is_constant(value):
            continue
        seen.add(value)
        node = value.producer()
        inputs = node_inputs(node) if node is not None else []
        if not inputs:  # an input of the graph, or a node that makes something of nothing, like RandomNormal
            return False
        pending.extend(inputs)
    return True


def _token_axis(probe: Probe, value: ir.Value) -> int | None:
    affine = probe.affine(value)
    if affine is None:
        return None
    axes = [a for a, (_, per_new, _) in enumerate(affine) if per_new]
    return axes[0] if len(axes) == 1 and affine[axes[0]] == (0, 1, 0) and axes[0] != len(affine) - 1 else None


def gather_logits(builder: Builder, plan: LogitsPlan, old: ir.Value, rows: ir.Value) -> ir.Value:
    """Edits the graph; the new output `[R, vocab]`, which takes the name of the contract."""
    source = plan.value
    users = [(n, i) for n, i in source.uses() if n in plan.users]
    gathered = builder.node("Gather", [source, rows], {"axis": plan.axis}, stem="logits_rows")[0]
    for user, position in users:
        user.replace_input_with(position, gathered)
    result = old if users else gathered
    flat = builder.reshape(result, [-1, plan.vocab], "logits")
    if old.name == names.LOGITS:
        old.name = builder.name("logits_of_rows")
    flat.name = names.LOGITS
    flat.type = old.type
    flat.shape = ir.Shape(["rows", plan.vocab])
    return flat
