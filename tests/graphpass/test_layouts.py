"""Caches of any layout, rotary embedding in the graph or in the op: the converted model equals its source."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import decoder as d
import onnx
import pytest
from pagegraft.graphpass import ConvertOptions, convert

OPTIONS = ConvertOptions(max_positions=128)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_cache_layouts(axes: tuple[int, int, int, int], tmp_path: Path) -> None:
    source = d.Decoder(cache_axes=axes).save(tmp_path / "source")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.verification["difference"] < 1e-4
    assert [layer.kv_heads for layer in report.layers] == [d.HEADS] * 2


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("past", [True, False], ids=["past", "no past"])
def test_rotary_is_fused_and_equal(interleaved: bool, past: bool, tmp_path: Path) -> None:
    model = d.Decoder(rotate=partial(d.rotary, interleaved=interleaved), learned_positions=False, past=past)
    source = model.save(tmp_path / "source")
    fused = convert(source, tmp_path / "fused", OPTIONS)
    plain = convert(source, tmp_path / "plain", replace(OPTIONS, fuse=False))
    assert [layer.fused for layer in fused.layers] == [("rotary",)] * 2
    assert [layer.fused for layer in plain.layers] == [()] * 2
    assert fused.verification["difference"] < 1e-4
    assert plain.verification["difference"] < 1e-4
    graph = onnx.load(tmp_path / "fused" / "model.onnx").graph
    nodes = [n for n in graph.node if n.op_type == "PagedAttention"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    assert attributes["do_rotary"] == 1
    assert attributes.get("rotary_interleaved", 0) == int(interleaved)
    assert not {"Cos", "Sin"} & {n.op_type for n in graph.node}


def test_graph_has_no_leftovers(tmp_path: Path) -> None:
    """Nothing of masks, cache arithmetic or shapes stays behind."""
    source = d.Decoder(rotate=d.rotary, learned_positions=False).save(tmp_path / "source")
    convert(source, tmp_path / "out", OPTIONS)
    model = onnx.load(tmp_path / "out" / "model.onnx")
    left = {n.op_type for n in model.graph.node}
    assert left <= {"Gather", "MatMul", "Reshape", "Add", "PagedAttention"}
    onnx.shape_inference.infer_shapes(model)


def test_interface_of_a_converted_model(tmp_path: Path) -> None:
    convert(d.Decoder().save(tmp_path / "source"), tmp_path / "out", OPTIONS)
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    shapes = {
        v.name: [x.dim_param or x.dim_value for x in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    cache = ["num_blocks", "block_size", d.HEADS, d.SIZE]
    assert shapes["input_ids"] == shapes["position_ids"] == shapes["slot_mapping"] == ["tokens"]
    assert shapes["cumulative_sequence_lengths"] == ["sequences_plus_one"]
    assert shapes["past_sequence_lengths"] == ["sequences"]
    assert shapes["logits_indices"] == ["rows"]
    assert shapes["logits"] == ["rows", d.VOCAB]
    for layer in range(2):
        for part in ("key", "value"):
            assert shapes[f"past_key_values.{layer}.{part}"] == cache
            assert shapes[f"present.{layer}.{part}"] == cache


def test_norms_are_spelled_as_onnxruntime_fuses_them(tmp_path: Path) -> None:
    """A root-mean-square norm that multiplies by a reciprocal ends up as one fused node."""
    import onnxruntime
    from pagegraft.custom_ops import register

    class Normed(d.Decoder):
        def _attention(self, g: d.Graph, hidden: str, layer: int, mask: str, ranges: d.Ranges) -> str:
            square = g.op("Pow", hidden, g.constant(2.0, "float32"))
            mean = g.op("Add", g.op("ReduceMean", square, axes=[-1]), g.constant(1e-5, "float32"))
            normed = g.op("Mul", hidden, g.op("Reciprocal", g.op("Sqrt", mean)))
            weighted = g.op("Mul", g.constant([1.5] * d.WIDTH, "float32"), normed)
            return super()._attention(g, weighted, layer, mask, ranges)

    convert(Normed().save(tmp_path / "source"), tmp_path / "out", OPTIONS)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    register(options)
    onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), options)
    ops = [n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert ops.count("SimplifiedLayerNormalization") == 2
    assert not {"Sqrt", "Reciprocal"} & set(ops)


def _norm(g: d.Graph, x: str, width: int) -> str:
    mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1])
    root = g.op("Sqrt", g.op("Add", mean, g.constant(1e-5, "float32")))
    gain = g.constant(1.0 + 0.3 * g.rng.standard_normal(width), "float32")
    return g.op("Mul", g.op("Div", x, root), gain)


def _normed_rotary(g: d.Graph, x: str, positions: str, total: str) -> str:
    return d.rotary(g, _norm(g, x, d.SIZE), positions, total)


class _NormAcrossHeads(d.Decoder):
    def _heads(self, g: d.Graph, hidden: str) -> str:
        flat = _norm(g, g.op("MatMul", hidden, g.weight(d.WIDTH, d.WIDTH)), d.WIDTH)
        return g.op("Transpose", g.op("Reshape", flat, g.integers(0, 0, d.HEADS, d.SIZE)), perm=[0, 2, 1, 3])


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        (d.Decoder(rotate=_normed_rotary, learned_positions=False), ("rotary", "q norm", "k norm")),
        (_NormAcrossHeads(rotate=d.rotary, learned_positions=False), ("rotary",)),
    ],
    ids=["each head", "across heads"],
)
def test_norms_before_rotary(model: d.Decoder, fused: tuple[str, ...], tmp_path: Path) -> None:
    """A norm of each head goes into the op; one across heads, which the op cannot do, stays and rotary still goes."""
    report = convert(model.save(tmp_path / "source"), tmp_path / "out", OPTIONS)
    assert [layer.fused for layer in report.layers] == [fused] * 2
    assert report.verification["difference"] < 1e-4


@pytest.mark.parametrize("tied", [False, True], ids=["own weights", "transposed embedding"])
def test_only_the_rows_asked_for_meet_the_output_weights(tied: bool, tmp_path: Path) -> None:
    """Rows are gathered before the last product, a small model's largest, also when its weights are computed."""
    model = d.Decoder().model()
    if tied:
        embedding, last = model.graph.node[0].input[0], model.graph.node[-1]
        turned = onnx.helper.make_node("Transpose", [embedding], ["tied"], perm=[1, 0])
        model.graph.node.insert(0, turned)
        last.input[1] = "tied"
    (tmp_path / "source").mkdir()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    convert(tmp_path / "source", tmp_path / "out", OPTIONS)
    nodes = {name: n for n in onnx.load(tmp_path / "out" / "model.onnx").graph.node for name in n.output}
    node = nodes["logits"]
    while node.op_type != "MatMul":
        assert node.op_type == "Reshape"
        node = nodes[node.input[0]]
    rows = nodes[node.input[0]]
    assert rows.op_type == "Gather"
    assert rows.input[1] == "logits_indices"
