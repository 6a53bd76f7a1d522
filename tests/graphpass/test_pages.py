"""Pools of pages written by ScatterND and read through a table, in front of one fused attention over padded keys; the
form that the authors of an exporter describe for it, built by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decoder as d
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import ConvertOptions, NotConvertible, convert
from pagegraft.graphpass.packed import PackedModel

OPTIONS = ConvertOptions(max_positions=96)
PAGE = 16


@dataclass(frozen=True, kw_only=True)
class PagedDecoder:
    """Pools `[pages, PAGE, width]`, tokens `[1, T]`, slots `[T]`, a table `[M]` and the length `[1]` of the context.

    `each_token`: the context is gathered for each token by itself, from a table `[T, M]`. `causal`: whether the
    attention is.
    """

    each_token: bool = False
    causal: bool = True
    pages: int | str = "pages"

    def save(self, folder: Path) -> Path:
        """Writes the model into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(self.model(), folder / "model.onnx")
        return folder

    def model(self) -> onnx.ModelProto:
        """The graph."""
        g = d.Graph()
        hidden = g.op("Gather", g.weight(d.VOCAB, d.WIDTH, scale=1.0), "input_ids", axis=0)
        hidden = g.op("Add", hidden, g.op("Gather", g.weight(512, d.WIDTH, scale=0.5), "position_ids", axis=0))
        for layer in range(2):
            hidden = g.op("Add", hidden, self._attention(g, hidden, layer))
        g.op("MatMul", hidden, g.weight(d.WIDTH, d.VOCAB), outputs=("logits",))
        return self._wrap(g)

    def _attention(self, g: d.Graph, hidden: str, layer: int) -> str:
        query, key, value = (g.op("MatMul", hidden, g.weight(d.WIDTH, d.WIDTH, scale=0.3)) for _ in range(3))
        contexts = [self._context(g, new, f"{part}_pool.{layer}") for part, new in (("key", key), ("value", value))]
        if self.each_token:
            mixed = self._attend_each(g, query, *contexts)
        else:
            mixed = g.op(
                "Attention",
                query,
                *contexts,
                "",
                "",
                "",
                "context_length",
                is_causal=int(self.causal),
                q_num_heads=d.HEADS,
                kv_num_heads=d.HEADS,
            )
        return g.op("MatMul", mixed, g.weight(d.WIDTH, d.WIDTH))

    def _context(self, g: d.Graph, new: str, pool: str) -> str:
        slots = g.op("Unsqueeze", "slots", g.integers(1))
        flat = g.op("Reshape", pool, g.integers(-1, d.WIDTH))
        written = g.op("ScatterND", flat, slots, g.op("Reshape", new, g.integers(-1, d.WIDTH)))
        updated = g.op("Reshape", written, g.integers(-1, PAGE, d.WIDTH), outputs=(f"updated_{pool}",))
        gathered = g.op("Gather", updated, "table", axis=0)
        return g.op("Reshape", gathered, g.integers(0 if self.each_token else 1, -1, d.WIDTH))

    def _attend_each(self, g: d.Graph, query: str, key: str, value: str) -> str:
        """One head over `[T, K, width]`."""
        rows = g.op("Reshape", query, g.integers(-1, 1, d.WIDTH))
        scores = g.op("MatMul", rows, g.op("Transpose", key, perm=[0, 2, 1]))
        at = g.op("Unsqueeze", g.arange(g.length(key, 1)), g.integers(0, 1))
        seen = g.op("LessOrEqual", at, g.op("Reshape", "position_ids", g.integers(-1, 1, 1)))
        scores = g.op("Where", seen, scores, g.constant(-1e9, np.float32))
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
        return g.op("Reshape", mixed, g.integers(1, -1, d.WIDTH))

    def _wrap(self, g: d.Graph) -> onnx.ModelProto:
        table: list[Any] = ["new", "entries"] if self.each_token else ["entries"]
        integers = {"input_ids": [1, "new"], "position_ids": [1, "new"], "slots": ["new"], "table": table}
        integers |= {} if self.each_token else {"context_length": [1]}
        pools = [f"{part}_pool.{layer}" for layer in range(2) for part in ("key", "value")]
        shape = [self.pages, PAGE, d.WIDTH]
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, dims) for n, dims in integers.items()]
        inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in pools]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "new", d.VOCAB])]
        outputs += [helper.make_tensor_value_info(f"updated_{n}", TensorProto.FLOAT, shape) for n in pools]
        graph = helper.make_graph(g.nodes, "paged", inputs, outputs, g.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


@pytest.mark.parametrize("pages", ["pages", 12], ids=["any number of pages", "12 pages"])
def test_fused_attention_over_gathered_pages(pages: int | str, tmp_path: Path) -> None:
    report = convert(PagedDecoder(pages=pages).save(tmp_path / "source"), tmp_path / "out", OPTIONS)
    assert report.verification["difference"] < 1e-4
    assert [(x.form, x.heads, x.kv_heads, x.mask) for x in report.layers] == [("Attention", 4, 4, "causal")] * 2
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert not {"slots", "table", "context_length"} & {i.name for i in graph.input}
    assert {n.op_type for n in graph.node} <= {"Gather", "MatMul", "Reshape", "Add", "PagedAttention"}


def test_a_table_with_a_row_for_each_token(tmp_path: Path) -> None:
    """As a step that mixes sequences itself has it; here all rows are one sequence's."""
    source = PagedDecoder(each_token=True).save(tmp_path / "source")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert [(x.heads, x.kv_heads, x.key_head_size) for x in report.layers] == [(1, 1, d.WIDTH)] * 2
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, d.VOCAB, 21)
    table, positions = np.array([4, 1]), np.arange(21)
    feeds = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "slots": table[positions // PAGE] * PAGE + positions % PAGE,
        "table": np.repeat(table[None], 21, axis=0),
    }
    session = onnxruntime.InferenceSession(str(source / "model.onnx"))
    pools = [i.name for i in session.get_inputs() if "pool" in i.name]
    garbage = {name: rng.standard_normal((6, PAGE, d.WIDTH)).astype(np.float32) for name in pools}
    expected = session.run(["logits"], {**feeds, **garbage})[0][0]
    packed = PackedModel(tmp_path / "out" / "model.onnx", Manifest.load(tmp_path / "out"), num_blocks=16, block_size=4)
    actual = [packed.step([(0, tokens[:9].tolist())])[0], packed.step([(0, tokens[9:].tolist())])[0]]
    assert np.abs(np.concatenate(actual) - expected).max() < 1e-4 * expected.std()


def test_attention_over_all_of_the_context_is_refused(tmp_path: Path) -> None:
    """Without the causal rule, new tokens see each other both ways."""
    source = PagedDecoder(causal=False).save(tmp_path / "source")
    with pytest.raises(NotConvertible, match="in its future") as failure:
        convert(source, tmp_path / "out", OPTIONS)
    assert failure.value.kind == "mask"


def added_at_the_end(g: onnx.GraphProto, name: str) -> None:
    """Adds an input to the hidden states in front of the logits."""
    (last,) = [n for n in g.node if "logits" in n.output]
    for node in (
        helper.make_node("Cast", [name], [f"{name}_float"], to=TensorProto.FLOAT),
        helper.make_node("Add", [last.input[0], f"{name}_float"], [f"{name}_added"], name=f"{name}_added"),
    ):
        g.node.insert(len(g.node) - 1, node)
    last.input[0] = f"{name}_added"


def moves_the_slots(g: onnx.GraphProto, name: str) -> None:
    """Adds an input to the slots."""
    for node in g.node:
        node.input[:] = [f"{name}_slots" if x == "slots" else x for x in node.input]
    g.node.insert(0, helper.make_node("Add", ["slots", name], [f"{name}_slots"]))


@pytest.mark.parametrize(
    ("edit", "words"),
    [(added_at_the_end, "no page shows what these inputs mean"), (moves_the_slots, "inputs address the pool")],
)
def test_more_inputs_than_meanings_can_be_tried_for_are_refused(edit: Any, words: str, tmp_path: Path) -> None:
    """Every combination of meanings is tried, and each takes a look at the whole model: many would take for ever."""
    source = PagedDecoder().save(tmp_path / "source")
    model = onnx.load(source / "model.onnx")
    for index in range(7):
        model.graph.input.append(helper.make_tensor_value_info(f"extra_{index}", TensorProto.INT64, [1]))
        edit(model.graph, f"extra_{index}")
    onnx.save(model, source / "model.onnx")
    with pytest.raises(NotConvertible, match=words) as failure:
        convert(source, tmp_path / "out", OPTIONS)
    assert failure.value.kind == "pages"
    assert failure.value.node
    assert failure.value.hint


def test_an_input_that_nothing_reads_needs_no_meaning(tmp_path: Path) -> None:
    source = PagedDecoder().save(tmp_path / "source")
    model = onnx.load(source / "model.onnx")
    for index in range(4):
        model.graph.input.append(helper.make_tensor_value_info(f"extra_{index}", TensorProto.INT64, [1]))
    onnx.save(model, source / "model.onnx")
    assert convert(source, tmp_path / "out", OPTIONS).verification["verified"]
