"""Forms of caches and attention beyond the usual: one tensor for keys and values, latent caches, shared caches,
grouped heads in five dimensions, sequence first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import decoder as d
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pagegraft.graphpass import ConvertOptions, convert

OPTIONS = ConvertOptions(max_positions=128)
GROUPS, LATENT = 2, 12


Layer = Callable[[d.Graph, str, int, str], str]


def build(layer: Layer, shapes: dict[str, tuple[object, ...]], layers: int = 2) -> onnx.ModelProto:
    """A decoder with learned positions around attention layers of the given form."""
    g = d.Graph()
    first, dims = next(iter(shapes.items()))
    new, past = g.length("input_ids", 1), g.length(f"past.0.{first}", dims.index("past"))
    hidden = g.op("Gather", g.weight(d.VOCAB, d.WIDTH, scale=1.0), "input_ids", axis=0)
    hidden = g.op("Add", hidden, g.op("Gather", g.weight(256, d.WIDTH, scale=0.5), "position_ids", axis=0))
    query = g.op("Unsqueeze", g.op("Add", g.arange(new), past), g.integers(1))
    key = g.op("Unsqueeze", g.arange(g.op("Add", past, new)), g.integers(0))
    seen = g.op("LessOrEqual", key, query)
    mask = g.op("Where", seen, g.constant(0.0, np.float32), g.constant(-1e9, np.float32))
    for index in range(layers):
        hidden = g.op("Add", hidden, layer(g, hidden, index, mask))
    g.op("MatMul", hidden, g.weight(d.WIDTH, d.VOCAB), outputs=("logits",))
    integer = TensorProto.INT64
    inputs = [helper.make_tensor_value_info(n, integer, ["batch", "new"]) for n in ("input_ids", "position_ids")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", d.VOCAB])]
    produced = {name for node in g.nodes for name in node.output}
    for index in range(layers):
        for part, shape in shapes.items():
            if f"present.{index}.{part}" in produced:
                total = ["total" if x == "past" else x for x in shape]
                inputs.append(helper.make_tensor_value_info(f"past.{index}.{part}", TensorProto.FLOAT, list(shape)))
                outputs.append(helper.make_tensor_value_info(f"present.{index}.{part}", TensorProto.FLOAT, total))
    graph = helper.make_graph(g.nodes, "forms", inputs, outputs, g.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def heads(g: d.Graph, flat: str, count: int) -> str:
    """`[B, S, count * D]` to `[B, count, S, D]`."""
    return g.op("Transpose", g.op("Reshape", flat, g.integers(0, 0, count, d.SIZE)), perm=[0, 2, 1, 3])


def attend(g: d.Graph, query: str, key: str, value: str, mask: str) -> str:
    """Plain attention of `[B, H, S, D]`; the output projected."""
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = g.op("Add", g.op("Mul", scores, g.constant(0.35, np.float32)), mask)
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    flat = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.integers(0, 0, d.WIDTH))
    return g.op("MatMul", flat, g.weight(d.WIDTH, d.WIDTH))


def project(g: d.Graph, hidden: str, width: int) -> str:
    return g.op("MatMul", hidden, g.weight(d.WIDTH, width))


def one_tensor_for_both(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """`[B, P, 2 D]`: key and value of the one head behind each other."""
    both = project(g, hidden, 2 * d.SIZE)
    joined = g.op("Concat", f"past.{layer}.both", both, outputs=(f"present.{layer}.both",), axis=1)
    key = g.op("Split", joined, g.integers(d.SIZE, d.SIZE), outputs=(f"key{layer}", f"value{layer}"), axis=2)
    key, value = (g.op("Unsqueeze", x, g.integers(1)) for x in (key, f"value{layer}"))
    return attend(g, heads(g, project(g, hidden, d.WIDTH), d.HEADS), key, value, mask)


def latent(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """A latent cache `[B, P, R]` that a product turns into keys and values at every step."""
    small = project(g, hidden, LATENT)
    joined = g.op("Concat", f"past.{layer}.latent", small, outputs=(f"present.{layer}.latent",), axis=1)
    key, value = (heads(g, g.op("MatMul", joined, g.weight(LATENT, d.WIDTH)), d.HEADS) for _ in range(2))
    return attend(g, heads(g, project(g, hidden, d.WIDTH), d.HEADS), key, value, mask)


def joined(g: d.Graph, new: str, layer: int, part: str, axis: int) -> str:
    return g.op("Concat", f"past.{layer}.{part}", new, outputs=(f"present.{layer}.{part}",), axis=axis)


def shared(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """The second layer reads the caches of the first."""
    if layer == 0:
        for part in ("key", "value"):
            joined(g, heads(g, project(g, hidden, d.WIDTH), d.HEADS), 0, part, 2)
    query = heads(g, project(g, hidden, d.WIDTH), d.HEADS)
    return attend(g, query, "present.0.key", "present.0.value", mask)


def grouped(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """Queries `[B, G, R, S, D]` against keys `[B, G, 1, K, D]`."""
    each = d.HEADS // GROUPS
    query = g.op("Reshape", project(g, hidden, d.WIDTH), g.integers(0, 0, GROUPS, each, d.SIZE))
    query = g.op("Transpose", query, perm=[0, 2, 3, 1, 4])
    key, value = (
        joined(g, heads(g, project(g, hidden, GROUPS * d.SIZE), GROUPS), layer, p, 2) for p in ("key", "value")
    )
    key, value = (g.op("Unsqueeze", x, g.integers(2)) for x in (key, value))
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 2, 4, 3]))
    scores = g.op("Add", g.op("Mul", scores, g.constant(0.35, np.float32)), mask)
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    flat = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 3, 1, 2, 4]), g.integers(0, 0, d.WIDTH))
    return g.op("MatMul", flat, g.weight(d.WIDTH, d.WIDTH))


def sequence_first(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """Everything `[S, B, ...]`, products over `[B * H, ., .]`, caches `[P, B, H, D]`."""
    rows = g.op("Transpose", hidden, perm=[1, 0, 2])
    query, key, value = (
        g.op("Reshape", project(g, rows, d.WIDTH), g.integers(0, 0, d.HEADS, d.SIZE)) for _ in range(3)
    )
    key, value = joined(g, key, layer, "key", 0), joined(g, value, layer, "value", 0)

    def flat(x: str) -> str:
        merged = g.op("Concat", g.op("Unsqueeze", g.length(x, 0), g.integers(0)), g.integers(-1, d.SIZE), axis=0)
        return g.op("Transpose", g.op("Reshape", x, merged), perm=[1, 0, 2])

    scores = g.op("MatMul", flat(query), g.op("Transpose", flat(key), perm=[0, 2, 1]))
    scores = g.op("Add", g.op("Mul", scores, g.constant(0.35, np.float32)), mask)
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), flat(value))
    back = g.op("Reshape", g.op("Transpose", mixed, perm=[1, 0, 2]), g.integers(0, -1, d.WIDTH))
    return g.op("Transpose", g.op("MatMul", back, g.weight(d.WIDTH, d.WIDTH)), perm=[1, 0, 2])


def repeated_in_cache(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """Caches hold each key/value head as often as query heads use it."""
    index = g.constant(np.arange(d.HEADS) // (d.HEADS // GROUPS), np.int64)
    key, value = (
        joined(g, g.op("Gather", heads(g, project(g, hidden, GROUPS * d.SIZE), GROUPS), index, axis=1), layer, p, 2)
        for p in ("key", "value")
    )
    return attend(g, heads(g, project(g, hidden, d.WIDTH), d.HEADS), key, value, mask)


def stacked(g: d.Graph, hidden: str, layer: int, mask: str) -> str:
    """One tensor `[2, B, H, P, D]` a layer: keys and values are taken out of it, then stacked again."""
    names = (f"past{layer}.key", f"past{layer}.value")
    g.op("Split", f"past.{layer}.both", g.integers(1, 1), outputs=names, axis=0)
    key, value = (
        g.op(
            "Concat",
            g.op("Squeeze", name, g.integers(0)),
            heads(g, project(g, hidden, d.WIDTH), d.HEADS),
            axis=2,
        )
        for name in names
    )
    both = [g.op("Unsqueeze", x, g.integers(0)) for x in (key, value)]
    g.op("Concat", *both, outputs=(f"present.{layer}.both",), axis=0)
    return attend(g, heads(g, project(g, hidden, d.WIDTH), d.HEADS), key, value, mask)


BHSD = ("batch", d.HEADS, "past", d.SIZE)
FORMS: dict[str, tuple[Layer, dict[str, tuple[object, ...]], int]] = {
    "one tensor for both": (one_tensor_for_both, {"both": ("batch", "past", 2 * d.SIZE)}, 1),
    "stacked": (stacked, {"both": (2, "batch", "heads", "past", d.SIZE)}, d.HEADS),
    "latent": (latent, {"latent": ("batch", "past", LATENT)}, d.HEADS),
    "shared": (shared, {"key": BHSD, "value": BHSD}, d.HEADS),
    "grouped": (grouped, dict.fromkeys(("key", "value"), ("batch", GROUPS, "past", d.SIZE)), GROUPS),
    "sequence first": (
        sequence_first,
        dict.fromkeys(("key", "value"), ("past", "batch", d.HEADS, d.SIZE)),
        d.HEADS,
    ),
    "repeated in cache": (repeated_in_cache, {"key": BHSD, "value": BHSD}, GROUPS),
}


@pytest.mark.parametrize("name", FORMS)
def test_form_converts(name: str, tmp_path: Path) -> None:
    layer, shapes, kv_heads = FORMS[name]
    source = tmp_path / "source"
    source.mkdir()
    onnx.save(build(layer, shapes), source / "model.onnx")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.verification["difference"] < 1e-4
    assert [x.kv_heads for x in report.layers] == [kv_heads] * 2
    nodes = onnx.load(tmp_path / "out" / "model.onnx").graph.node
    attentions = [n for n in nodes if n.op_type == "PagedAttention"]
    if name == "shared":
        first, second = attentions
        assert list(second.input[3:5]) == list(first.output[1:3])
        assert report.kv_bytes_per_token == 2 * d.WIDTH * 4
    else:
        assert all(n.input[3].startswith("past_key_values.") for n in attentions)
