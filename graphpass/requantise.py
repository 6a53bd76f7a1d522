"""Quantises activations per token instead of per tensor.

A product whose activations are quantised at run time by one scale for the whole tensor gives a token a result that
depends on what else is in the batch. With a scale and a zero point for each row the result is the token's own, and is
what the source itself computes when it is given one token at a time. The rule within a row is that of
DynamicQuantizeLinear. The integer kernels take one zero point only, so the product is of the stored codes, and the zero
point of a row times the sums of the weights' columns is taken off behind it; both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from .decompose import take_over
from .errors import NotConvertible
from .evaluate import Array
from .graph import is_constant, optional_input
from .rewrite.builder import Builder

__all__ = ["PER_TENSOR_OPS", "requantise", "requantised_activations"]

#: Metadata key of the nodes that make the codes of a requantised activation.
_KEY = "pagegraft.requantised"
#: Operators that quantise activations per tensor at run time.
PER_TENSOR_OPS = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})


@dataclass(frozen=True)
class _Rows:
    """Codes (uint8), scales and zero points (float32, `[..., 1]`) of a quantised activation."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value


def requantise(model: ir.Model) -> int:
    """Rewrites every product over activations quantised per tensor, in place; returns how many activations there were.

    Raises NotConvertible for a use of quantised activations that is no product with constant weights.
    """
    nodes = [n for n in model.graph if n.op_type in PER_TENSOR_OPS]
    if not nodes:
        return 0
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    builder = Builder(model.graph, "per_token")
    for node in [n for n in model.graph if n.op_type in ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")]:
        _take_apart(builder, node)
    quantisers = [n for n in model.graph if n.op_type == "DynamicQuantizeLinear"]
    for node in quantisers:
        _rewrite(builder, node)
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    return len(quantisers)


def requantised_activations(model: ir.Model) -> int:
    """How many activations of a model `requantise` has rewritten."""
    return sum(_KEY in node.metadata_props for node in model.graph)


def _refuse(node: ir.Node, what: str) -> NotConvertible:
    return NotConvertible(
        f"{what}, which cannot be requantised per token",
        node.name or "",
        "convert the float model, or one with weight-only quantisation",
        kind="dynamic-quantisation",
    )


def _take_apart(builder: Builder, node: ir.Node) -> None:
    """The com.microsoft operators that do several steps in one, in the operators that they stand for."""
    if node.op_type == "DynamicQuantizeMatMul":
        codes, scale, zero = builder.node("DynamicQuantizeLinear", node.inputs[:1], outputs=3, stem=node.name or "")
        weights, weight_scale, weight_zero, bias = (optional_input(node, i) for i in (1, 2, 3, 4))
    else:
        codes, weights, scale, weight_scale = node.inputs[:4]  # type: ignore[assignment]
        zero, weight_zero, bias = (optional_input(node, i) for i in (4, 5, 6))  # type: ignore[assignment]
    product = builder.node("MatMulInteger", [codes, weights, zero, weight_zero], stem=node.name or "")[0]
    scales = builder.node("Mul", [scale, weight_scale])[0]
    result = builder.node("Mul", [builder.cast(product, ir.DataType.FLOAT), scales])[0]
    if bias is not None:
        result = builder.node("Add", [result, bias])[0]
    take_over(node, 0, result)
    builder.graph.remove(node, safe=True)


def _rewrite(builder: Builder, node: ir.Node) -> None:
    """Replaces one quantiser and what its outputs are used for."""
    source = node.inputs[0]
    if source is None or any(out.is_graph_output() for out in node.outputs):
        raise _refuse(node, "quantised activations are an output of the model")
    rows = _quantised(builder, source, stem=node.name or "")
    codes, scale, zero = node.outputs
    for user, position in list(codes.uses()):
        if user.op_type == "MatMulInteger" and position == 0 and optional_input(user, 2) in (zero, None):
            _product(builder, user, rows)
        elif user.op_type == "DequantizeLinear" and position == 0 and list(user.inputs) == [codes, scale, zero]:
            _dequantise(builder, user, rows)
        else:
            raise _refuse(user, f"{user.op_type} reads quantised activations")
    for user, position in list(scale.uses()):
        other = optional_input(user, 1 - position) if user.op_type == "Mul" else None
        tensor = other.const_value if other is not None and is_constant(other) else None
        if tensor is None or tensor.shape.rank() > 1:
            raise _refuse(user, f"{user.op_type} reads the scale of quantised activations")
        user.replace_input_with(position, rows.scale)
    if zero.uses():
        raise _refuse(node, "the zero point of quantised activations is used elsewhere")


def _quantised(builder: Builder, source: ir.Value, *, stem: str) -> _Rows:
    """Each row of `[..., K]` by its own scale and zero point: its range, widened to hold zero, over 255 steps."""
    zero, steps = (builder.constant(np.array(x, np.float32)) for x in (0.0, 255.0))
    low = builder.node("Min", [_reduced(builder, "ReduceMin", source), zero])[0]
    high = builder.node("Max", [_reduced(builder, "ReduceMax", source), zero])[0]
    span = builder.node("Sub", [high, low])[0]
    empty = builder.node("Equal", [span, zero])[0]
    one = builder.constant(np.array(1.0, np.float32))
    scale = builder.node("Where", [empty, one, builder.node("Div", [span, steps])[0]], stem=f"{stem}/scale")[0]
    offset = builder.node("Neg", [builder.node("Div", [low, scale])[0]])[0]
    zero_point = _clipped(builder, builder.node("Round", [offset])[0], zero, steps)
    scaled = builder.node("Round", [builder.node("Div", [source, scale])[0]])[0]
    codes = _clipped(builder, builder.node("Add", [scaled, zero_point])[0], zero, steps)
    codes = builder.cast(codes, ir.DataType.UINT8)
    if (producer := codes.producer()) is not None:
        producer.metadata_props[_KEY] = source.name or ""
    return _Rows(codes, scale, zero_point)


def _clipped(builder: Builder, value: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    return builder.node("Clip", [value, low, high])[0]


def _reduced(builder: Builder, op_type: str, value: ir.Value) -> ir.Value:
    if (builder.graph.opset_imports.get("") or 18) < 18:
        return builder.node(op_type, [value], {"axes": [-1], "keepdims": 1})[0]
    return builder.node(op_type, [value, builder.constant(np.array([-1], np.int64))], {"keepdims": 1})[0]


def _product(builder: Builder, node: ir.Node, rows: _Rows) -> None:
    """codes x weights - zero point (when the node takes it off) x sums of the weights' columns, in integers."""
    weights, weight_zero = node.inputs[1], optional_input(node, 3)
    sums = builder.constant(_column_sums(node, weights, weight_zero), "column_sums")
    result = builder.node("MatMulInteger", [rows.codes, weights, None, weight_zero], stem=node.name or "")[0]
    if optional_input(node, 2) is not None:
        zero_point = builder.cast(rows.zero_point, ir.DataType.INT32)
        result = builder.node("Sub", [result, builder.node("Mul", [zero_point, sums])[0]])[0]
    take_over(node, 0, result)
    builder.graph.remove(node, safe=True)


def _column_sums(node: ir.Node, weights: ir.Value | None, zero: ir.Value | None) -> Array:
    """Sum over K of weights `[K, N]` less their zero point, as int32 `[N]`."""
    tensors = [v.const_value if is_constant(v) else None for v in (weights, zero) if v is not None]
    if not tensors or any(t is None for t in tensors) or tensors[0].shape.rank() != 2:  # type: ignore[union-attr]
        raise _refuse(node, "a product of quantised activations has no constant weights")
    arrays = [t.numpy() for t in tensors]  # type: ignore[union-attr]
    sums = arrays[0].sum(axis=0, dtype=np.int64)
    if len(arrays) > 1:
        sums = sums - arrays[0].shape[0] * arrays[1].astype(np.int64).reshape(-1)
    return np.asarray(sums, np.int32)


def _dequantise(builder: Builder, node: ir.Node, rows: _Rows) -> None:
    codes = builder.cast(rows.codes, ir.DataType.FLOAT)
    result = builder.node("Mul", [builder.node("Sub", [codes, rows.zero_point])[0], rows.scale])[0]
    take_over(node, 0, result)
    builder.graph.remove(node, safe=True)
