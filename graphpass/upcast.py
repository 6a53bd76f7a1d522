"""Turns a bfloat16 model into a float32 one: onnxruntime has no bfloat16 kernels for CPU. Weights are converted one by
one, when they are written or evaluated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

__all__ = ["has_bfloat16", "upcast_bfloat16"]


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    yield graph
    yield from graph.subgraphs()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def has_bfloat16(model: ir.Model) -> bool:
    """True when any value, weight or cast of the model is bfloat16."""
    for graph in _graphs(model.graph):
        if any(value.dtype == ir.DataType.BFLOAT16 for value in _values(graph)):
            return True
        for node in graph:
            if any(_is_bfloat16(attribute) for attribute in node.attributes.values()):
                return True
    return False


def _is_bfloat16(attribute: ir.Attr) -> bool:
    if attribute.type == ir.AttributeType.INT and attribute.name in ("to", "dtype"):
        return attribute.as_int() == ir.DataType.BFLOAT16
    return attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.BFLOAT16


def upcast_bfloat16(model: ir.Model) -> bool:
    """Makes every bfloat16 value float32, in place; True when there was any."""
    if not has_bfloat16(model):
        return False
    for graph in _graphs(model.graph):
        for value in _values(graph):
            _upcast_value(value)
        for node in graph:
            for attribute in list(node.attributes.values()):
                if _is_bfloat16(attribute):
                    node.attributes[attribute.name] = _upcast_attribute(attribute)
    return True


def _upcast_value(value: ir.Value) -> None:
    if value.dtype == ir.DataType.BFLOAT16:
        value.dtype = ir.DataType.FLOAT
    tensor = value.const_value
    if tensor is not None and tensor.dtype == ir.DataType.BFLOAT16:
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(tensor.numpy().astype(np.float32), name=value.name),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape([int(d) for d in tensor.shape.numpy()]),
            name=value.name,
        )


def _upcast_attribute(attribute: ir.Attr) -> ir.Attr:
    if attribute.type == ir.AttributeType.INT:
        return ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
    return ir.AttrTensor(attribute.name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32)))
