"""Every kind of refusal: a reason, a node where there is one, a hint, and nothing written or changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import decoder as d
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from pagegraft.graphpass import ConvertOptions, NotConvertible, PagedAttentionPass, convert, inspect

OPTIONS = ConvertOptions(max_positions=128)
Edit = Callable[[onnx.GraphProto], None]


def recurrent_state(graph: onnx.GraphProto) -> None:
    """A state of three entries that the last tokens replace, as short convolutions keep it."""
    graph.input.append(helper.make_tensor_value_info("past.conv", TensorProto.FLOAT, ["batch", d.WIDTH, 3]))
    graph.output.append(helper.make_tensor_value_info("present.conv", TensorProto.FLOAT, ["batch", d.WIDTH, 3]))
    graph.node.append(helper.make_node("Identity", ["past.conv"], ["present.conv"], name="state"))


def dynamic_quantisation(graph: onnx.GraphProto) -> None:
    (last,) = [n for n in graph.node if "logits" in n.output]
    hidden = last.input[0]
    graph.node.insert(
        len(graph.node) - 1,
        helper.make_node("DynamicQuantizeLinear", [hidden], ["q", "s", "z"], name="quantise"),
    )
    graph.node.insert(len(graph.node) - 1, helper.make_node("DequantizeLinear", ["q", "s", "z"], ["back"]))
    last.input[0] = "back"


def encoder_input(graph: onnx.GraphProto) -> None:
    """Cross attention, over states that an encoder made, in front of the logits."""
    states = helper.make_tensor_value_info("encoder_hidden_states", TensorProto.FLOAT, ["batch", "source", d.WIDTH])
    graph.input.append(states)
    cross_attention(graph, states.name)


def uncached_states(graph: onnx.GraphProto) -> None:
    """Cross attention over states with a name that says nothing."""
    states = helper.make_tensor_value_info("context", TensorProto.FLOAT, ["batch", "source", d.WIDTH])
    graph.input.append(states)
    cross_attention(graph, states.name)


def cross_attention(graph: onnx.GraphProto, states: str) -> None:
    (last,) = [n for n in graph.node if "logits" in n.output]
    nodes = [
        helper.make_node("Transpose", [states], ["turned"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", [last.input[0], "turned"], ["scores"], name="cross scores"),
        helper.make_node("Softmax", ["scores"], ["weights"], name="cross softmax", axis=-1),
        helper.make_node("MatMul", ["weights", states], ["crossed"], name="cross values"),
    ]
    for node in nodes:
        graph.node.insert(len(graph.node) - 1, node)
    last.input[0] = "crossed"


def recurrent_layer(graph: onnx.GraphProto) -> None:
    """An LSTM over the tokens, whose state is not even kept between steps."""
    (last,) = [n for n in graph.node if "logits" in n.output]
    rng = np.random.default_rng(0)
    for name, shape in (("w", (1, 4 * d.WIDTH, d.WIDTH)), ("r", (1, 4 * d.WIDTH, d.WIDTH))):
        graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "directions"))
    nodes = [
        helper.make_node("Transpose", [last.input[0]], ["rows"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["rows", "w", "r"], ["states"], name="lstm", hidden_size=d.WIDTH),
        helper.make_node("Squeeze", ["states", "second"], ["squeezed"]),
        helper.make_node("Transpose", ["squeezed"], ["back"], perm=[1, 0, 2]),
    ]
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "second"))
    for node in nodes:
        graph.node.insert(len(graph.node) - 1, node)
    last.input[0] = "back"


def second_token_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ["batch", "new"]))


def whole_search(graph: onnx.GraphProto) -> None:
    """The tokens that a search gives, instead of logits."""
    (last,) = [n for n in graph.node if "logits" in n.output]
    last.op_type, last.domain, last.name = "GreedySearch", "com.microsoft", "search"


def no_presents(graph: onnx.GraphProto) -> None:
    kept = [o for o in graph.output if not o.name.startswith("present")]
    del graph.output[:]
    graph.output.extend(kept)


def custom_domain(graph: onnx.GraphProto) -> None:
    (last,) = [n for n in graph.node if "logits" in n.output]
    graph.node.insert(
        len(graph.node) - 1, helper.make_node("Secret", [last.input[0]], ["secret"], name="secret", domain="acme")
    )
    last.input[0] = "secret"


def second_reader(graph: onnx.GraphProto) -> None:
    """The mean of all cached keys is added to the hidden state."""
    (last,) = [n for n in graph.node if "logits" in n.output]
    graph.initializer.append(numpy_helper.from_array(np.array([0.0], np.float32), "nil"))
    nodes = [
        helper.make_node("ReduceMean", ["present.0.key"], ["mean"], name="mean", keepdims=0),
        helper.make_node("Add", [last.input[0], "mean"], ["moved"], name="moved"),
    ]
    for node in nodes:
        graph.node.insert(len(graph.node) - 1, node)
    last.input[0] = "moved"


def mask_of_rank_four(graph: onnx.GraphProto) -> None:
    (mask,) = [i for i in graph.input if i.name == "attention_mask"]
    mask.CopyFrom(helper.make_tensor_value_info("attention_mask", TensorProto.FLOAT, ["batch", 1, "new", "total"]))


def last_token_only(graph: onnx.GraphProto) -> None:
    (last,) = [n for n in graph.node if "logits" in n.output]
    for name, number in (("from", -1), ("to", 1 << 40), ("axis", 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), name))
    graph.node.insert(
        len(graph.node) - 1,
        helper.make_node("Slice", [last.input[0], "from", "to", "axis"], ["last"], name="slice"),
    )
    last.input[0] = "last"


def row_by_number_of_new_tokens(graph: onnx.GraphProto) -> None:
    """A float that depends on how many tokens a step has: of a batch, on its companions. No type is stated for it."""
    (last,) = [n for n in graph.node if "logits" in n.output]
    rows = np.random.default_rng(1).standard_normal((64, d.WIDTH)).astype(np.float32)
    graph.initializer.append(numpy_helper.from_array(rows, "rows"))
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "second"))
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "second"], ["count"]),
        helper.make_node("Gather", ["rows", "count"], ["row"]),
        helper.make_node("Add", [last.input[0], "row"], ["moved"], name="moved"),
    ]
    for node in nodes:
        graph.node.insert(len(graph.node) - 1, node)
    last.input[0] = "moved"


@pytest.mark.parametrize(
    ("edit", "kind", "words"),
    [
        (recurrent_state, "state", "does not grow"),
        (dynamic_quantisation, "dynamic-quantisation", "per tensor"),
        (encoder_input, "encoder-decoder", "encoder"),
        (no_presents, "cache", "no output hands it on"),
        (custom_domain, "custom-op", "acme::Secret"),
        (second_reader, "cache", "something else than attention"),
        (mask_of_rank_four, "mask", "rank 4"),
        (last_token_only, "interface", "one row of logits"),
        (uncached_states, "state", "context"),
        (recurrent_layer, "state", "LSTM keeps a recurrent state"),
        (second_token_input, "interface", "several inputs look like tokens"),
        (whole_search, "search", "GreedySearch is a whole search"),
        (row_by_number_of_new_tokens, "batch-global", "mixes the tokens of a batch"),
    ],
)
def test_refused_with_reason(edit: Edit, kind: str, words: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model = d.Decoder().model()
    edit(model.graph)
    model.opset_import.extend(helper.make_opsetid(name, 1) for name in ("acme", "com.microsoft"))
    onnx.save(model, source / "model.onnx")
    with pytest.raises(NotConvertible, match=words) as caught:
        convert(source, tmp_path / "out", OPTIONS)
    assert caught.value.kind == kind
    assert caught.value.hint
    assert caught.value.node or edit in (second_token_input, mask_of_rank_four)  # no node reads these
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    refusal = inspect(source, OPTIONS).refusal
    assert refusal is not None
    assert refusal.reason == caught.value.reason


def test_rotary_that_switches_for_the_whole_batch(tmp_path: Path) -> None:
    model = d.Decoder(rotate=d.rotary_switched_by_length, learned_positions=False)
    source = model.save(tmp_path / "source")
    with pytest.raises(NotConvertible, match="mixes the tokens") as caught:
        convert(source, tmp_path / "out", OPTIONS)
    assert caught.value.kind == "batch-global"
    assert "--max-positions" in caught.value.hint
    report = convert(source, tmp_path / "out", ConvertOptions(max_positions=20))
    assert report.max_positions == 20
    assert report.verification["verified"]


def test_no_attention(tmp_path: Path) -> None:
    g = d.Graph()
    hidden = g.op("Gather", g.weight(d.VOCAB, d.WIDTH), "input_ids", axis=0)
    g.op("MatMul", hidden, g.weight(d.WIDTH, d.VOCAB), outputs=("logits",))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"])
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", d.VOCAB])
    graph = helper.make_graph(g.nodes, "bag", [ids], [out], g.initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    report = inspect(tmp_path, OPTIONS)
    assert report.refusal is not None
    assert report.refusal.kind == "no-attention"


def test_a_classifier_that_takes_no_sequence_of_our_lengths(tmp_path: Path) -> None:
    """What it is comes first, not that onnxruntime does not run it on a decoder's inputs."""
    g = d.Graph()
    size = g.integers(-1, 2048)
    flat = g.op("Reshape", g.op("Cast", "bytes", to=TensorProto.FLOAT), size)
    g.op("Softmax", g.op("MatMul", flat, g.weight(2048, 3)), outputs=("label",))
    ids = helper.make_tensor_value_info("bytes", TensorProto.INT32, ["batch", 2048])
    out = helper.make_tensor_value_info("label", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(g.nodes, "classifier", [ids], [out], g.initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    with pytest.raises(NotConvertible, match="does not look like a decoder: no attention was found") as caught:
        convert(tmp_path, tmp_path / "out", OPTIONS)
    assert caught.value.kind == "no-attention"


def test_refusal_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    path = d.Decoder(visible=d.dilated).save(tmp_path / "source") / "model.onnx"
    model = ir.load(path)
    before = ir.serde.serialize_model(model).SerializeToString()
    with pytest.raises(NotConvertible):
        PagedAttentionPass(OPTIONS)(model)
    assert ir.serde.serialize_model(model).SerializeToString() == before


def test_pass_works_in_a_pipeline(tmp_path: Path) -> None:
    from onnx_ir.passes import Sequential, common

    model = ir.load(d.Decoder().save(tmp_path / "source") / "model.onnx")
    ours = PagedAttentionPass(OPTIONS)
    result = Sequential(common.CommonSubexpressionEliminationPass(), ours, common.TopologicalSortPass())(model)
    assert result.modified
    assert sum(node.op_type == "PagedAttention" for node in result.model.graph) == 2
    assert len(ours.layers) == 2
