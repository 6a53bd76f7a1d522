"""Stand-ins for nodes with heavy weights, where only the shapes of values are wanted and no weight is to be read."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from .graph import integer, is_constant

__all__ = ["HEAVY_ELEMENTS", "stand_in_for"]

#: Weights with more elements than this are not read when only shapes are wanted.
HEAVY_ELEMENTS = 1 << 16


def _heavy_width(node: ir.Node) -> int | None:
    """Width of the output's last axis when the node is a product or lookup with a heavy constant."""
    if node.op_type == "MatMulNBits":
        return node.attributes["N"].as_int()
    position = 0 if node.op_type == "Gather" else 1
    if node.op_type not in ("MatMul", "Gemm", "Gather") or len(node.inputs) <= position:
        return None
    weight = node.inputs[position]
    flipped = node.op_type == "Gemm" and integer(node, "transB") == 1
    producer = weight.producer() if weight is not None else None
    if producer is not None and producer.op_type == "Transpose":
        weight, flipped = producer.inputs[0], not flipped
    if weight is None or not is_constant(weight) or weight.const_value is None:
        return None
    shape = [int(d) for d in weight.const_value.shape.numpy()]
    if len(shape) != 2 or weight.const_value.size <= HEAVY_ELEMENTS:
        return None
    if node.op_type == "Gather":
        return shape[1] if integer(node, "axis") == 0 and not flipped else None
    return shape[0] if flipped else shape[1]


def _attention_stand_in(node: ir.Node, initializers: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
    """The output shape of a fused attention with grouped heads; its kernel has demands on cache sizes of its own."""
    query, key = node.inputs[0], node.inputs[1]
    out, name = node.outputs[0].name or "", (query.name if query is not None else "") or ""
    if key is not None:
        return [helper.make_node("Identity", [name], [out])]
    heads, groups = node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()
    initializers[f"{out}/share"] = onnx.numpy_helper.from_array(np.array(heads, np.int64), f"{out}/share")
    initializers[f"{out}/parts"] = onnx.numpy_helper.from_array(np.array(heads + 2 * groups, np.int64), f"{out}/parts")
    initializers[f"{out}/zero"] = onnx.numpy_helper.from_array(np.zeros(1, np.int64), f"{out}/zero")
    initializers[f"{out}/axis"] = onnx.numpy_helper.from_array(np.array([-1], np.int64), f"{out}/axis")
    return [
        helper.make_node("Shape", [name], [f"{out}/shape"], start=-1),
        helper.make_node("Mul", [f"{out}/shape", f"{out}/share"], [f"{out}/scaled"]),
        helper.make_node("Div", [f"{out}/scaled", f"{out}/parts"], [f"{out}/end"]),
        helper.make_node("Slice", [name, f"{out}/zero", f"{out}/end", f"{out}/axis"], [out]),
    ]


def stand_in_for(node: ir.Node, initializers: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto] | None:
    """Nodes that give a heavy product's output shape without its weights; None when the node is not heavy."""
    if node.op_type == "GroupQueryAttention":
        return _attention_stand_in(node, initializers)
    width = _heavy_width(node)
    if width is None:
        return None
    out = node.outputs[0].name or ""
    source = node.inputs[1 if node.op_type == "Gather" else 0]
    ones = f"{out}/ones"
    weight = node.inputs[{"Gather": 0, "MatMulNBits": 2}.get(node.op_type, 1)]
    if weight is not None and not is_constant(weight) and (producer := weight.producer()) is not None:
        weight = producer.inputs[0]
    kind = np.float16 if weight is not None and weight.dtype == ir.DataType.FLOAT16 else np.float32
    initializers[ones] = onnx.numpy_helper.from_array(np.full(width, 0.01, kind), ones)
    name = (source.name if source is not None else "") or ""
    if node.op_type == "Gather":
        axes = f"{out}/axes"
        initializers[axes] = onnx.numpy_helper.from_array(np.array([-1], np.int64), axes)
        return [
            helper.make_node("Cast", [name], [f"{out}/f"], to=int(helper.np_dtype_to_tensor_dtype(np.dtype(kind)))),
            helper.make_node("Unsqueeze", [f"{out}/f", axes], [f"{out}/u"]),
            helper.make_node("Mul", [f"{out}/u", ones], [out]),
        ]
    for key, bounds in (("starts", 0), ("ends", 1), ("axis", -1)):
        initializers[f"{out}/{key}"] = onnx.numpy_helper.from_array(np.array([bounds], np.int64), f"{out}/{key}")
    return [
        helper.make_node("Slice", [name, f"{out}/starts", f"{out}/ends", f"{out}/axis"], [f"{out}/s"]),
        helper.make_node("Mul", [f"{out}/s", ones], [out]),
    ]
