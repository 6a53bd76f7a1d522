"""Builds small decoders whose attentions are fused nodes, given as a function that adds one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import decoder as d
import onnx
from onnx import TensorProto, helper

Layer = Callable[[d.Graph, str, int, d.Ranges], str]


def build(layer: Layer, *, stacked: bool = False, past: bool = True, opset: int = 17) -> onnx.ModelProto:
    """Two attentions in residual branches. Caches are `[B, H, P, D]`, or `[2, B, H, P, D]` when `stacked`."""
    g = d.Graph()
    axis, parts = (3, ("",)) if stacked else (2, (".key", ".value"))
    new = g.length("input_ids", 1)
    start = g.length(f"past.0{parts[0]}", axis) if past else g.scalar(0)
    total = g.op("Add", start, new)
    unsqueezed = {"axes": [0]} if opset < 13 else {}
    axes = () if opset < 13 else (g.integers(0),)
    query = g.op("Reshape", g.op("Range", start, total, g.scalar(1)), g.integers(-1, 1))
    key = g.op("Unsqueeze", g.arange(total), *axes, **unsqueezed)
    ranges = d.Ranges(query, key, total)
    hidden = g.op("Gather", g.weight(d.VOCAB, d.WIDTH, scale=1.0), "input_ids", axis=0)
    hidden = g.op("Add", hidden, g.op("Gather", g.weight(256, d.WIDTH, scale=0.5), "position_ids", axis=0))
    for index in range(2):
        hidden = g.op("Add", hidden, layer(g, hidden, index, ranges))
    g.op("MatMul", hidden, g.weight(d.WIDTH, d.VOCAB), outputs=("logits",))
    read = {name for node in g.nodes for name in node.input}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length])
        for name, length in (("input_ids", "new"), ("position_ids", "new"), ("attention_mask", "total"))
        if name in read
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", d.VOCAB])]
    for name in [f"{i}{part}" for i in range(2) for part in parts] if past else []:
        lead = [2] if stacked else []
        for values, word, length in ((inputs, "past", "past"), (outputs, "present", "total")):
            shape = [*lead, "batch", "heads" if stacked else d.HEADS, length, d.SIZE]
            values.append(helper.make_tensor_value_info(f"{word}.{name}", TensorProto.FLOAT, shape))
    graph = helper.make_graph(g.nodes, "fused", inputs, outputs, g.initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def save(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    return folder
