"""ONNX's Attention operator, wrapped as one-layer models with past: the converted op equals ONNX's own reference.

Heads, sizes and attributes are those of the operator's causal node tests; the lengths are those of a decoder, where
each new token brings its own key and value. The oracle is onnx.reference, which shares no code with onnxruntime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.graphpass.packed import PackedModel

TOKENS, PAST, NEW = 48, 12, 4
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "causal": (3, 3, 8, 8, {}),
    "grouped": (9, 3, 8, 8, {}),
    "sizes differ": (3, 3, 8, 10, {}),
    "scaled": (3, 3, 8, 8, {"scale": 0.01}),
    "softcap": (3, 3, 8, 8, {"softcap": 2.0}),
    "grouped softcap scaled": (9, 3, 8, 8, {"softcap": 3.0, "scale": 0.7}),
}


def table(rng: np.random.Generator, width: int, name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(rng.standard_normal((TOKENS, width)).astype(np.float32), name)


def make(
    heads: int, groups: int, size: int, value_size: int, attributes: dict[str, Any], *, rank: int
) -> onnx.ModelProto:
    """Tokens look up their query, key and value; the attention's output, flattened, are the logits."""
    rng = np.random.default_rng(heads * 100 + rank)
    widths = {"q": heads * size, "k": groups * size, "v": groups * value_size}
    tables = [table(rng, width, f"{name}_table") for name, width in widths.items()]
    nodes = [helper.make_node("Gather", [f"{name}_table", "input_ids"], [name]) for name in widths]
    operands = list(widths)
    if rank == 4:
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            tables.append(numpy_helper.from_array(np.array([0, 0, count, -1], np.int64), f"{name}_shape"))
            nodes.append(helper.make_node("Reshape", [name, f"{name}_shape"], [f"{name}_split"]))
            nodes.append(helper.make_node("Transpose", [f"{name}_split"], [f"{name}4"], perm=[0, 2, 1, 3]))
        operands = ["q4", "k4", "v4"]
    else:
        attributes = {**attributes, "q_num_heads": heads, "kv_num_heads": groups}
    outputs = ["logits" if rank == 3 else "y", "present.0.key", "present.0.value"]
    inputs = [*operands, "", "past.0.key", "past.0.value"]
    nodes.append(helper.make_node("Attention", inputs, outputs, name="attention", is_causal=1, **attributes))
    if rank == 4:
        tables.append(numpy_helper.from_array(np.array([0, 0, heads * value_size], np.int64), "flat"))
        nodes.append(helper.make_node("Transpose", ["y"], ["y_rows"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", ["y_rows", "flat"], ["logits"]))
    caches = [("key", size), ("value", value_size)]
    f32 = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"])]
        + [helper.make_tensor_value_info(f"past.0.{p}", f32, ["batch", groups, "past", s]) for p, s in caches],
        [helper.make_tensor_value_info("logits", f32, ["batch", "new", heads * value_size])]
        + [helper.make_tensor_value_info(f"present.0.{p}", f32, ["batch", groups, "total", s]) for p, s in caches],
        tables,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, rank: int, tmp_path: Path) -> None:
    heads, groups, size, value_size, attributes = CASES[name]
    if rank == 4 and heads != groups:
        pytest.skip("grouped heads of rank 4 are covered by rank 3")
    model = make(heads, groups, size, value_size, attributes, rank=rank)
    source = tmp_path / "source"
    source.mkdir()
    onnx.save(model, source / "model.onnx")
    convert(source, tmp_path / "out", ConvertOptions(max_positions=64))

    tokens = np.random.default_rng(1).integers(0, TOKENS, PAST + NEW)
    reference = ReferenceEvaluator(model)
    empty = [np.zeros((1, groups, 0, s), np.float32) for s in (size, value_size)]
    first = reference.run(None, {"input_ids": tokens[None, :PAST], "past.0.key": empty[0], "past.0.value": empty[1]})
    second = reference.run(None, {"input_ids": tokens[None, PAST:], "past.0.key": first[1], "past.0.value": first[2]})
    packed = PackedModel(tmp_path / "out" / "model.onnx", Manifest.load(tmp_path / "out"), block_size=4)
    for piece, expected in ((tokens[:PAST], first[0]), (tokens[PAST:], second[0])):
        (actual,) = packed.step([(0, piece.tolist())])
        np.testing.assert_allclose(actual, expected[0], rtol=1e-4, atol=1e-5)
