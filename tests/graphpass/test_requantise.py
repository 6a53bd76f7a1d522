"""Activations quantised per tensor at run time: refused as they are, and quantised per token with an option.

The oracle is the source's own operator: given one row at a time, a scale for the tensor is a scale for the row.
"""

from __future__ import annotations

import json
from pathlib import Path

import decoder as d
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from pagegraft.custom_ops.manifest import MANIFEST_FILE, Manifest
from pagegraft.graphpass import ConvertOptions, NotConvertible, convert, inspect, verify
from pagegraft.graphpass.packed import PackedModel
from pagegraft.graphpass.requantise import requantise

OPTIONS = ConvertOptions(max_positions=128)
REQUANTIZE = ConvertOptions(max_positions=128, requantize=True)
K, N = 24, 10


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0])


def product(form: str, opset: int) -> onnx.ModelProto:
    """x `[1, T, K]` times quantised weights, in one of the forms that exporters and onnxruntime write."""
    rng = np.random.default_rng(4)
    signed = form != "unsigned weights"
    weights = rng.integers(-100, 100, (K, N)) if signed else rng.integers(0, 256, (K, N))
    kind = np.int8 if signed else np.uint8
    zero = np.array(rng.integers(-9, 9, N) if form == "zero point a column" else 3 if signed else 120, kind)
    constants = {"w": weights.astype(kind), "wz": zero, "ws": np.array(0.02, np.float32), "b": np.ones(N, np.float32)}
    if form == "zero point a column":
        constants["ws"] = rng.random(N).astype(np.float32)
    quantise = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    scale = helper.make_node("Mul", ["s", "ws"], ["sws"])
    taken_off = "" if form == "no zero point" else "z"
    nodes = {
        "fused": [
            helper.make_node("DynamicQuantizeMatMul", ["x", "w", "ws", "wz", "b"], ["y"], domain="com.microsoft")
        ],
        "to float": [
            quantise,
            helper.make_node(
                "MatMulIntegerToFloat", ["q", "w", "s", "ws", "z", "wz", "b"], ["y"], domain="com.microsoft"
            ),
        ],
        "dequantised": [quantise, helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])],
    }.get(form) or [
        quantise,
        scale,
        helper.make_node("MatMulInteger", ["q", "w", taken_off, "wz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "sws"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "rows", K])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "product", [x], [y], tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    "form",
    ["signed weights", "unsigned weights", "zero point a column", "no zero point", "fused", "to float", "dequantised"],
)
def test_each_row_is_what_the_source_makes_of_it_alone(form: str, opset: int) -> None:
    source = product(form, opset)
    rng = np.random.default_rng(9)
    x = (rng.standard_normal((1, 7, K)) * np.array([1, 30, 0.1, 5, 0, 1, 2])[:, None]).astype(np.float32)
    x[0, 5] = np.abs(x[0, 5])  # rows of one sign: the range is widened to hold zero
    x[0, 6] = -np.abs(x[0, 6])
    model = ir.serde.deserialize_model(source)
    assert requantise(model) == 1
    actual = run(ir.serde.serialize_model(model), x)
    alone = np.concatenate([run(source, x[:, i : i + 1]) for i in range(7)], axis=1)
    np.testing.assert_allclose(actual, alone, rtol=1e-6, atol=1e-6)
    assert np.max(np.abs(actual - run(source, x))) > 1e-2  # one scale for all rows is another result


def quantised(folder: Path, decoder: d.Decoder) -> Path:
    """A decoder whose products onnxruntime's own tool has quantised."""
    decoder.save(folder / "float")
    (folder / "source").mkdir()
    quantize_dynamic(folder / "float" / "model.onnx", folder / "source" / "model.onnx")
    return folder / "source"


def test_refused_as_it_is_and_the_hint_names_the_option(tmp_path: Path) -> None:
    source = quantised(tmp_path, d.Decoder())
    refusal = inspect(source, OPTIONS).refusal
    assert refusal is not None
    assert refusal.kind == "dynamic-quantisation"
    assert refusal.node
    assert "--requantize" in refusal.hint


@pytest.mark.parametrize("past", [True, False], ids=["past", "no past"])
def test_converts_and_states_what_changed(past: bool, tmp_path: Path) -> None:
    source = quantised(tmp_path, d.Decoder(past=past, rotate=d.rotary))
    report = convert(source, tmp_path / "out", REQUANTIZE)
    assert report.verification["verified"]
    assert any("quantised per token" in note for note in report.notes)
    recorded = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert recorded["source"]["requantised"] > 0
    effect = recorded["verification"]["requantised"]
    assert effect["activations"] == recorded["source"]["requantised"]
    assert 1e-3 < effect["logit_error_rms"] < 0.2
    assert effect["greedy_agreement"] > 0.5
    assert (effect["source_by_chunks_rms"] is not None) == past
    assert verify(source, tmp_path / "out", OPTIONS).passed  # the manifest says that it was requantised


def test_results_do_not_depend_on_batch_companions(tmp_path: Path) -> None:
    convert(quantised(tmp_path, d.Decoder()), tmp_path / "out", REQUANTIZE)
    nodes = onnx.load(tmp_path / "out" / "model.onnx").graph.node
    products = [i for i, n in enumerate(nodes) if n.op_type == "MatMulInteger"]
    (rows,) = [i for i, n in enumerate(nodes) if "logits_indices" in n.input]
    assert rows < products[-1]  # only the rows wanted go through the last product
    manifest = Manifest.load(tmp_path / "out")
    alone, together = (PackedModel(tmp_path / "out" / "model.onnx", manifest, block_size=4) for _ in range(2))
    expected = alone.step([(0, [5, 9, 2, 40])])[0]
    actual = together.step([(1, [7] * 11), (0, [5, 9, 2, 40]), (2, [1, 2])])[1]
    np.testing.assert_array_equal(actual, expected)


def test_other_uses_of_quantised_activations_are_refused(tmp_path: Path) -> None:
    source = quantised(tmp_path, d.Decoder())
    model = onnx.load(source / "model.onnx")
    codes = next(n.output[0] for n in model.graph.node if n.op_type == "DynamicQuantizeLinear")
    (last,) = [n for n in model.graph.node if "logits" in n.output]
    model.graph.node.insert(len(model.graph.node) - 1, helper.make_node("Cast", [codes], ["odd"], to=1, name="odd"))
    model.graph.node.insert(len(model.graph.node) - 1, helper.make_node("ReduceMax", ["odd"], ["most"], keepdims=0))
    last_output = last.output[0]
    last.output[0] = "plain"
    model.graph.node.append(helper.make_node("Add", ["plain", "most"], [last_output]))
    onnx.save(model, source / "model.onnx")
    with pytest.raises(NotConvertible, match="Cast reads quantised activations") as caught:
        convert(source, tmp_path / "out", REQUANTIZE)
    assert caught.value.node == "odd"
    assert caught.value.hint
    assert not (tmp_path / "out").exists()
