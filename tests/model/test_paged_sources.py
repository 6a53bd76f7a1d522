"""Sources that address pages of a pool inside their graph (paged_modules.py), and one with buffers of fixed length:
each converted model, packed and ragged, equals its source run through the source's own tables and slots.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from paged_forms import FORMS, PagedSource
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import NotConvertible, VerificationError, convert
from test_exports import ragged

SOURCES = Path(__file__).parents[1] / "data" / "exports"
MODELS = {
    "pages_given__dyn": "given",
    "pages_computed__ts": "computed",
    "pages_heads_first__ts": "heads_first",
    "buffer__mob": "buffer",
}
LENGTHS = (29, 1, 13, 40)
TOLERANCE, CONTEXT_FRACTION = 1e-4, 0.01


@pytest.mark.parametrize("name", list(MODELS))
def test_ragged_batch_equals_source(name: str, tmp_path: Path) -> None:
    report = convert(SOURCES / name, tmp_path / "out")
    assert [(x.heads, x.kv_heads, x.key_head_size, x.value_head_size, x.window) for x in report.layers] == [
        (4, 2, 8, 8, None)
    ] * 2
    rng = np.random.default_rng(2)
    sequences = [rng.integers(3, 128, n).tolist() for n in LENGTHS]
    oracle = PagedSource(SOURCES / name / "model.onnx", FORMS[MODELS[name]])
    wanted = np.concatenate([oracle.logits(s) for s in sequences])
    alone = np.concatenate([oracle.logits([t]) for s in sequences for t in s])
    gap = np.abs(np.concatenate(ragged(tmp_path / "out", sequences)) - wanted)
    effect = np.sqrt(np.mean((alone - wanted) ** 2))
    assert effect > 0.05 * wanted.std()  # the context matters: an attention that is wrong would show
    assert gap.max() <= TOLERANCE * wanted.std()
    assert gap.max() <= CONTEXT_FRACTION * effect


def test_the_interface_is_ours(tmp_path: Path) -> None:
    """Nothing of the source's tables, slots and pools is left."""
    for name in ("pages_given__dyn", "pages_computed__ts"):
        convert(SOURCES / name, tmp_path / name)
        model = onnx.load(tmp_path / name / "model.onnx")
        lengths = ["cumulative_sequence_lengths", "past_sequence_lengths", "block_table", "slot_mapping"]
        caches = [f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value")]
        assert [i.name for i in model.graph.input] == [
            "input_ids",
            "position_ids",
            *lengths,
            "logits_indices",
            *caches,
        ]
        assert not {"ScatterND", "ScatterElements", "GatherND"} & {n.op_type for n in model.graph.node}
        dims = [d.dim_param or d.dim_value for d in model.graph.input[-1].type.tensor_type.shape.dim]
        assert dims == ["num_blocks", "block_size", 2, 8]
        assert Manifest.load(tmp_path / name).verification["verified"]


# --- refusals --------------------------------------------------------------------------------------------------------

Edit = Callable[[onnx.GraphProto], None]


def _insert(graph: onnx.GraphProto, user: onnx.NodeProto, position: int, *nodes: onnx.NodeProto) -> None:
    """Puts nodes before a user, which then reads the output of the last at a position."""
    place = list(graph.node).index(user)
    for offset, node in enumerate(nodes):
        graph.node.insert(place + offset, node)
    user.input[position] = nodes[-1].output[0]


def _first(graph: onnx.GraphProto, op_type: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.op_type == op_type)


def slots_off_by_one(graph: onnx.GraphProto) -> None:
    """Keys of the first layer are written behind where they are read."""
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "one"))
    write = _first(graph, "ScatterND")
    _insert(graph, write, 1, helper.make_node("Add", [write.input[1], "one"], ["moved"], name="moved"))


def pool_is_changed(graph: onnx.GraphProto) -> None:
    """Keys of the past are doubled at every step: the pool is not kept as it is."""
    write = _first(graph, "ScatterND")
    _insert(graph, write, 0, helper.make_node("Add", [write.input[0], write.input[0]], ["twice"], name="twice"))


def second_reader(graph: onnx.GraphProto) -> None:
    """The mean of the whole pool is added to the logits."""
    (last,) = [n for n in graph.node if "logits" in n.output]
    last.output[0] = "plain_logits"
    graph.node.append(
        helper.make_node("ReduceMean", ["past_key_values.0.key"], ["mean_key"], name="mean_key", keepdims=0)
    )
    graph.node.append(helper.make_node("Add", ["plain_logits", "mean_key"], ["logits"], name="moved_logits"))


def no_present(graph: onnx.GraphProto) -> None:
    """The updated pool of the first keys is no output."""
    kept = [o for o in graph.output if o.name != "present.0.key"]
    del graph.output[:]
    graph.output.extend(kept)


def one_pool_for_both(graph: onnx.GraphProto) -> None:
    """Values of the first layer are written into the pool of the keys."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name == "past_key_values.0.value":
                node.input[position] = "past_key_values.0.key"
    kept = [i for i in graph.input if i.name != "past_key_values.0.value"]
    del graph.input[:]
    graph.input.extend(kept)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (slots_off_by_one, "not the sequence's rows in order"),
        (pool_is_changed, "'past_key_values.0.key' is no pool"),
        (second_reader, "something else"),
        (no_present, "no output hands it on"),
        (one_pool_for_both, "written 2 times"),
    ],
)
def test_refused_with_reason(edit: Edit, words: str, tmp_path: Path) -> None:
    model = onnx.load(SOURCES / "pages_given__dyn" / "model.onnx")
    edit(model.graph)
    (tmp_path / "source").mkdir()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(NotConvertible, match=words) as failure:
        convert(tmp_path / "source", tmp_path / "out")
    assert failure.value.kind in ("pages", "cache")
    assert failure.value.node
    assert failure.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_source_that_sees_unwritten_slots_does_not_pass_verification(tmp_path: Path) -> None:
    """Its mask shows what lies behind the context in the last page, which is nobody's row."""
    model = onnx.load(SOURCES / "pages_computed__ts" / "model.onnx")
    graph = model.graph
    producer = {out: n for n in graph.node for out in n.output}
    seen = producer[_first(graph, "Softmax").input[0]]
    while seen.op_type != "And":
        user, seen = seen, producer[seen.input[0]]
    within = producer[seen.input[1]]
    assert (user.input[0], within.op_type) == (seen.output[0], "Less")
    extra = [
        helper.make_node("Not", [within.output[0]], ["behind"], name="behind"),
        helper.make_node("Or", [seen.output[0], "behind"], ["seen_too"], name="seen_too"),
    ]
    _insert(graph, user, 0, *extra)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises((VerificationError, NotConvertible)) as failure:
        convert(tmp_path / "model.onnx", tmp_path / "out")
    assert isinstance(failure.value, VerificationError)
    assert not (tmp_path / "out").exists()
