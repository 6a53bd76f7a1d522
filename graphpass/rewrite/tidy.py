"""Spells a few things the way onnxruntime's fusions look for them."""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder

__all__ = ["divide_instead_of_reciprocal"]


def divide_instead_of_reciprocal(builder: Builder) -> None:
    """`x * Reciprocal(y)` becomes `x / y`: onnxruntime fuses a norm that divides by a root, not one that multiplies
    by its inverse. The results differ by a rounding."""
    for node in list(builder.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        left, right = node.inputs
        inverse = _sole_reciprocal(right)
        factor = left
        if inverse is None:
            inverse, factor = _sole_reciprocal(left), right
        if inverse is None or factor is None:
            continue
        quotient = builder.node("Div", [factor, inverse.inputs[0]], stem=f"{node.name}/quotient")[0]
        node.outputs[0].replace_all_uses_with(quotient)


def _sole_reciprocal(value: ir.Value | None) -> ir.Node | None:
    """The Reciprocal that makes a value which nobody else reads."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Reciprocal" or len(producer.outputs[0].uses()) != 1:
        return None
    return producer
