"""Computes logits only for the rows asked for: gathers them before the last product with constant weights."""

from __future__ import annotations

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names

from ..errors import NotConvertible
from ..graph import is_constant, node_inputs
from ..recognise.probe import Probe
from .builder import Builder

__all__ = ["LogitsPlan", "gather_logits", "plan_logits"]

from dataclasses import dataclass

_PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits", "MatMulInteger"})


@dataclass(frozen=True)
class LogitsPlan:
    """Where rows are gathered: `value` along `axis`, as the input of `user` (None: at the logits themselves)."""

    value: ir.Value
    axis: int
    user: ir.Node | None
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
    user: ir.Node | None = None
    while (node := value.producer()) is not None:
        inputs = probe.view.data_inputs(node)
        loose = [v for v in node_inputs(node) if not probe.view.taint(v) and not _is_fixed(v)]
        if len(inputs) != 1 or loose:
            break
        if node.op_type in _PRODUCTS:
            user, value = node, inputs[0]
            break
        value = inputs[0]
    at = _token_axis(probe, value)
    if user is None or at is None:
        return LogitsPlan(logits, axes[0], None, vocab)
    return LogitsPlan(value, at, user, vocab)


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
    if plan.user is None:
        gathered = builder.node("Gather", [source, rows], {"axis": plan.axis}, stem="logits_rows")[0]
        result = gathered
    else:
        users = [(n, i) for n, i in source.uses() if n is plan.user]
        gathered = builder.node("Gather", [source, rows], {"axis": plan.axis}, stem="logits_rows")[0]
        for user, position in users:
            user.replace_input_with(position, gathered)
        result = old
    flat = builder.reshape(result, [-1, plan.vocab], "logits")
    if old.name == names.LOGITS:
        old.name = builder.name("logits_of_rows")
    flat.name = names.LOGITS
    flat.type = old.type
    flat.shape = ir.Shape(["rows", plan.vocab])
    return flat
