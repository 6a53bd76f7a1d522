"""Spells Einsum over two token operands out in Transpose, Unsqueeze and MatMul: recognition then sees the product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graph import is_constant
from .rewrite.builder import Builder

__all__ = ["spell_out_einsum"]


@dataclass(frozen=True)
class _Product:
    """Axis letters of a batched product: `lead` of either or both factors, then `row`, `inner` and `column`."""

    left: str
    right: str
    out: str
    lead: str
    row: str
    inner: str
    column: str


def spell_out_einsum(model: ir.Model) -> None:
    """Replaces every Einsum that is one batched product of two values, in place; others stay as they are."""
    if model.opset_imports.get("", 13) < 13:  # Unsqueeze had its axes in an attribute
        return
    builder: Builder | None = None
    for node in [n for n in model.graph if n.op_type == "Einsum" and not n.domain]:
        product = _read(node.attributes["equation"].as_string(), len(node.inputs))
        if product is None or any(value is None or is_constant(value) for value in node.inputs):
            continue
        builder = builder or Builder(model.graph, "einsum")
        _replace(builder, node, product)


def _read(equation: str, factors: int) -> _Product | None:
    """The batched product that an equation states, or None."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow or factors != 2 or "." in equation:
        return None
    left, right = terms.split(",")
    if any(len(set(term)) != len(term) for term in (left, right, out)):
        return None
    inner = [c for c in left if c in right and c not in out]
    rows, columns = ([c for c in out if c in mine and c not in other] for mine, other in ((left, right), (right, left)))
    if len(inner) != 1 or not rows or not columns or set(left + right) != {*out, *inner}:
        return None
    # MatMul broadcasts leading axes: all but the last letter of one factor alone join them.
    row, column = rows[-1], columns[-1]
    lead = "".join(c for c in out if c not in (row, column))
    return _Product(left, right, out, lead, row, inner[0], column)


def _replace(builder: Builder, node: ir.Node, product: _Product) -> None:
    left = _arranged(builder, node.inputs[0], product.left, product.lead, product.row + product.inner)
    right = _arranged(builder, node.inputs[1], product.right, product.lead, product.inner + product.column)
    made = product.lead + product.row + product.column
    result = builder.node("MatMul", [left, right])[0]
    if made != product.out:
        result = builder.transpose(result, [made.index(c) for c in product.out])
    old = node.outputs[0]
    name, graph_output = old.name, old.is_graph_output()
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    if graph_output:
        old.name, result.name = f"{name}/replaced", name
        result.type, result.shape = old.type, old.shape


def _arranged(builder: Builder, value: ir.Value | None, axes: str, lead: str, tail: str) -> ir.Value:
    """The value with axes `lead` and `tail` in this order; of length one where it has no such axis."""
    if value is None:
        raise ValueError("an Einsum has no operand")
    order = [c for c in lead + tail if c in axes]
    if order != list(axes):
        value = builder.transpose(value, [axes.index(c) for c in order])
    absent = [i for i, c in enumerate(lead) if c not in axes]
    if absent:
        value = builder.node("Unsqueeze", [value, builder.constant(np.array(absent, np.int64))])[0]
    return value
