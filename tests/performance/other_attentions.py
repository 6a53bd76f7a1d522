"""What onnxruntime and torch offer instead of the paged op, as models bound to their buffers, for op_bench.py."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from attention_models import Run, Shape, bound, filled, numbers, shuffled_tables
from onnx import TensorProto, helper

__all__ = [
    "attention_23",
    "concat_attention",
    "gathered_attention",
    "group_query_attention",
    "torch_sdpa",
]


def _contiguous(shape: Shape, length: int) -> dict[str, ort.OrtValue]:
    dims = [shape.sequences, shape.kv_heads, length, shape.head_size]
    return {name: filled(dims, np.dtype(np.float32)) for name in ("past_key", "past_value")}


def group_query_attention(shape: Shape, *, threads: int) -> Run:
    """onnxruntime's fused attention with past and present in one buffer."""
    width = shape.kv_heads * shape.head_size
    caches = _contiguous(shape, shape.total)
    inputs = {
        "query": filled([shape.sequences, shape.new, shape.heads * shape.head_size], np.dtype(np.float32)),
        "key": filled([shape.sequences, shape.new, width], np.dtype(np.float32)),
        "value": filled([shape.sequences, shape.new, width], np.dtype(np.float32)),
        **caches,
        "seqlens_k": numbers([shape.total - 1] * shape.sequences),
        "total": numbers([shape.total]),
    }
    node = helper.make_node(
        "GroupQueryAttention",
        ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"],
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=shape.heads,
        kv_num_heads=shape.kv_heads,
    )
    outputs: dict[str, ort.OrtValue | int] = {
        "output": filled(inputs["query"].shape(), np.dtype(np.float32)),
        "present_key": caches["past_key"],
        "present_value": caches["past_value"],
    }
    return bound([node], inputs, outputs, threads)


def _exported(shape: Shape, key: str, value: str) -> list[onnx.NodeProto]:
    """Attention in plain operators as exporters write it, from `query` [S, H, n, D] and complete keys and values."""
    nodes = []
    repeat = shape.heads // shape.kv_heads
    for name in (key, value):
        if repeat > 1:
            nodes += [
                helper.make_node("Unsqueeze", [name, "two"], [f"{name}_5"]),
                helper.make_node("Expand", [f"{name}_5", "expanded"], [f"{name}_many"]),
                helper.make_node("Reshape", [f"{name}_many", "heads"], [f"{name}_all"]),
            ]
        else:
            nodes.append(helper.make_node("Identity", [name], [f"{name}_all"]))
    nodes += [
        helper.make_node("Transpose", [f"{key}_all"], ["keys_T"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "keys_T"], ["raw"]),
        helper.make_node("Mul", ["raw", "scale"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", f"{value}_all"], ["output"]),
    ]
    return nodes


def _exported_constants(shape: Shape) -> dict[str, ort.OrtValue]:
    repeat = shape.heads // shape.kv_heads
    return {
        "two": numbers([2], np.int64),
        "expanded": numbers([shape.sequences, shape.kv_heads, repeat, shape.total, shape.head_size], np.int64),
        "heads": numbers([shape.sequences, shape.heads, shape.total, shape.head_size], np.int64),
        "scale": numbers(shape.head_size**-0.5, np.float32),
    }


def _head_major(shape: Shape) -> dict[str, ort.OrtValue]:
    dims = [shape.sequences, shape.kv_heads, shape.new, shape.head_size]
    return {
        "query": filled([shape.sequences, shape.heads, shape.new, shape.head_size], np.dtype(np.float32)),
        "key": filled(dims, np.dtype(np.float32)),
        "value": filled(dims, np.dtype(np.float32)),
    }


def concat_attention(shape: Shape, *, threads: int) -> Run:
    """A decoder's attention as exported: past and new concatenated into a new present in each step."""
    inputs = {**_head_major(shape), **_contiguous(shape, shape.past), **_exported_constants(shape)}
    nodes = [
        helper.make_node("Concat", [f"past_{n}", n], [f"present_{n}"], axis=2) for n in ("key", "value")
    ] + _exported(shape, "present_key", "present_value")
    outputs: dict[str, ort.OrtValue | int] = {"output": TensorProto.FLOAT}
    for name in ("present_key", "present_value"):
        outputs[name] = _contiguous(shape, shape.total)["past_key"]
    return bound(nodes, inputs, outputs, threads)


def gathered_attention(shape: Shape, *, threads: int) -> Run:
    """A paged cache without the op: blocks gathered into contiguous keys and values, then attention as exported."""
    table = shuffled_tables(shape, 1)[0]
    blocks = table.size
    inputs = {**_head_major(shape), **_exported_constants(shape), "block_table": numbers(table)}
    del inputs["key"], inputs["value"]
    inputs["flat"] = numbers([shape.sequences, -1, shape.kv_heads, shape.head_size], np.int64)
    for name, number in (("length", shape.total), ("zero", 0), ("one", 1)):
        inputs[name] = numbers([number], np.int64)
    nodes = []
    for name in ("key", "value"):
        inputs[f"{name}_cache"] = filled(
            [blocks, shape.block_size, shape.kv_heads, shape.head_size], np.dtype(np.float32)
        )
        nodes += [
            helper.make_node("Gather", [f"{name}_cache", "block_table"], [f"{name}_blocks"], axis=0),
            helper.make_node("Reshape", [f"{name}_blocks", "flat"], [f"{name}_flat"]),
            helper.make_node("Slice", [f"{name}_flat", "zero", "length", "one"], [f"{name}_tokens"]),
            helper.make_node("Transpose", [f"{name}_tokens"], [name], perm=[0, 2, 1, 3]),
        ]
    return bound(nodes + _exported(shape, "key", "value"), inputs, {"output": TensorProto.FLOAT}, threads)


def attention_23(shape: Shape, *, threads: int) -> Run:
    """ONNX's own Attention node (opset 23) with a contiguous past."""
    inputs = {**_head_major(shape), **_contiguous(shape, shape.past)}
    node = helper.make_node(
        "Attention",
        ["query", "key", "value", "", "past_key", "past_value"],
        ["output", "present_key", "present_value"],
    )
    outputs: dict[str, ort.OrtValue | int] = dict.fromkeys(
        ("output", "present_key", "present_value"), TensorProto.FLOAT
    )
    return bound([node], inputs, outputs, threads)


def torch_sdpa(shape: Shape, *, threads: int) -> Run | None:
    """torch's scaled_dot_product_attention over a contiguous cache that is already complete; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    query = torch.rand(shape.sequences, shape.heads, shape.new, shape.head_size)
    key, value = (torch.rand(shape.sequences, shape.kv_heads, shape.total, shape.head_size) for _ in range(2))

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=shape.heads != shape.kv_heads)

    return run
