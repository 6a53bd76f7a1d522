"""com.microsoft's MultiHeadAttention and Attention nodes become PagedAttention; the oracle is onnxruntime's own kernel,
which runs the source with the nodes as they are. What such a node can say and a paged attention cannot is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoder as d
import numpy as np
import onnx
import pytest
from fused_decoder import Layer, build, save
from onnx import TensorProto
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import ConvertOptions, NotConvertible, convert, inspect

OPTIONS = ConvertOptions(max_positions=128)
SLOPES = (0.5, 0.25, 0.125, 0.0625)


def bias_of(visible: d.Visible, *, slopes: tuple[float, ...] = ()) -> Callable[[d.Graph, d.Ranges], str]:
    """`[1, 1 or H, S, K]`: 0 where seen and -10000 where not, plus what ALiBi adds."""

    def bias(g: d.Graph, r: d.Ranges) -> str:
        added = g.op("Where", visible(g, r), g.constant(0.0, np.float32), g.constant(-10000.0, np.float32))
        added = g.op("Unsqueeze", added, g.integers(0, 1))
        return d.alibi(slopes)(g, added, r) if slopes else added

    return bias


def ones_mask(g: d.Graph, _: d.Ranges) -> str:
    return g.op("Cast", "attention_mask", to=TensorProto.INT32)


def causal_mask(g: d.Graph, r: d.Ranges) -> str:
    """`[1, S, K]` of ones and zeros."""
    return g.op("Unsqueeze", g.op("Cast", d.causal(g, r), to=TensorProto.INT32), g.integers(0))


def lengths(g: d.Graph, r: d.Ranges) -> str:
    """`[B]`: the number of keys of the one sequence."""
    return g.op("Cast", g.op("Reshape", r.total, g.integers(1)), to=TensorProto.INT32)


def length_and_start(first: int) -> Callable[[d.Graph, d.Ranges], str]:
    """`[2 * B]`: the end of the one sequence's keys, then their start."""

    def bounds(g: d.Graph, r: d.Ranges) -> str:
        return g.op("Concat", lengths(g, r), g.constant([first], np.int32), axis=0)

    return bounds


def running_sums(g: d.Graph, r: d.Ranges) -> str:
    """`[3 * B + 2]`: the length of the keys, then the sums of lengths of queries and keys, each from 0."""
    length, zero = lengths(g, r), g.constant([0], np.int32)
    return g.op("Concat", length, zero, length, zero, length, axis=0)


def multi_head(
    bias: Callable[[d.Graph, d.Ranges], str] | None = None,
    mask: Callable[[d.Graph, d.Ranges], str] | None = None,
    *,
    past: bool = True,
    projection_bias: bool = False,
    outputs: int = 3,
    extra: tuple[str, ...] = (),
    **attributes: Any,
) -> Layer:
    def layer(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
        operands = [g.op("MatMul", hidden, g.weight(d.WIDTH, d.WIDTH)) for _ in range(3)]
        added = g.weight(3 * d.WIDTH) if projection_bias else ""
        caches = [f"past.{index}.{part}" if past else "" for part in ("key", "value")]
        names = (f"y{index}", *(f"present.{index}.{p}" if past else "" for p in ("key", "value")), f"qk{index}")
        inputs = (*operands, added, mask(g, r) if mask else "", bias(g, r) if bias else "", *caches, *extra)
        return g.op(
            "MultiHeadAttention",
            *inputs,
            outputs=names[:outputs],
            domain="com.microsoft",
            num_heads=d.HEADS,
            **attributes,
        )

    return layer


def merged(
    mask: Callable[[d.Graph, d.Ranges], str] | None = None,
    *,
    past: bool = True,
    sizes: tuple[int, ...] = (),
    bias: Callable[[d.Graph, d.Ranges], str] | None = None,
    **attributes: Any,
) -> Layer:
    def layer(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
        width = sum(sizes) or 3 * d.WIDTH
        weights, added = g.weight(d.WIDTH, width, scale=0.3), g.weight(width)
        stated = {"qkv_hidden_sizes": list(sizes)} if sizes else {}
        out = g.op(
            "Attention",
            *(hidden, weights, added, mask(g, r) if mask else "", f"past.{index}" if past else ""),
            bias(g, r) if bias else "",
            outputs=(f"y{index}", f"present.{index}") if past else (f"y{index}",),
            domain="com.microsoft",
            num_heads=d.HEADS,
            **stated,
            **attributes,
        )
        return g.op("MatMul", out, g.weight(sizes[2], d.WIDTH)) if sizes else out

    return layer


CAUSAL = bias_of(d.causal)
#: name -> (layer, how the model is built, expected mask)
CASES: dict[str, tuple[Layer, dict[str, Any], str]] = {
    "bias": (multi_head(CAUSAL), {}, "causal"),
    "bias of a window": (multi_head(bias_of(d.window(6))), {}, "window 6"),
    "bias of alibi": (multi_head(bias_of(d.causal, slopes=SLOPES)), {}, "causal + alibi"),
    "unidirectional": (multi_head(unidirectional=1), {}, "causal"),
    "unidirectional, padding mask": (multi_head(mask=ones_mask, unidirectional=1), {}, "causal"),
    "mask of rank 3": (multi_head(mask=causal_mask), {}, "causal"),
    "lengths": (multi_head(mask=lengths, unidirectional=1, mask_filter_value=-1e9), {}, "causal"),
    "running sums": (multi_head(mask=running_sums, past=False, outputs=1, unidirectional=1), {"past": False}, "causal"),
    "merged weights, length and start": (
        merged(length_and_start(0), past=False, unidirectional=1),
        {"past": False},
        "causal",
    ),
    "biased operands, scaled": (multi_head(CAUSAL, projection_bias=True, scale=0.2), {}, "causal"),
    "no past": (multi_head(CAUSAL, past=False, outputs=1), {"past": False}, "causal"),
    "merged weights": (merged(unidirectional=1), {"stacked": True}, "causal"),
    "merged weights, mask": (merged(ones_mask, unidirectional=1), {"stacked": True}, "causal"),
    "merged weights, old opset": (merged(ones_mask, unidirectional=1), {"stacked": True, "opset": 12}, "causal"),
    "merged weights, bias": (merged(bias=CAUSAL, past=False), {"past": False}, "causal"),
    "merged weights, no past": (
        merged(past=False, sizes=(d.WIDTH, d.WIDTH, 2 * d.WIDTH), unidirectional=1),
        {"past": False},
        "causal",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_converts_and_equals_its_source(name: str, tmp_path: Path) -> None:
    layer, how, mask = CASES[name]
    source = save(build(layer, **how), tmp_path / "source")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.verification["difference"] < 1e-4
    assert [x.mask for x in report.layers] == [mask] * 2
    op = "com.microsoft Attention" if "merged" in name else "MultiHeadAttention"
    assert all(x.form.startswith(op) for x in report.layers)
    nodes = onnx.load(tmp_path / "out" / "model.onnx").graph.node
    assert not [n for n in nodes if n.op_type in ("MultiHeadAttention", "Attention", "Softmax")]
    geometry = Manifest.load(tmp_path / "out").layers[0]
    assert (geometry.kv_heads, geometry.key_head_size) == (d.HEADS, d.SIZE)


def test_packed_operands_are_read_as_the_operator_defines_them(tmp_path: Path) -> None:
    """onnxruntime has no CPU kernel for `[B, S, H, 3, D]`: numpy says what the model computes."""
    weights = np.random.default_rng(3).standard_normal((d.VOCAB, 3 * d.WIDTH)).astype(np.float32)

    def layer(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
        packed = g.op("Gather", g.constant(weights), "input_ids", axis=0)
        packed = g.op("Reshape", packed, g.integers(0, 0, d.HEADS, 3, d.SIZE))
        names = (f"y{index}", f"present.{index}.key", f"present.{index}.value")
        inputs = (packed, "", "", "", "", CAUSAL(g, r), f"past.{index}.key", f"past.{index}.value")
        return g.op("MultiHeadAttention", *inputs, outputs=names, domain="com.microsoft", num_heads=d.HEADS)

    model = build(layer)
    (last,) = [n for n in model.graph.node if "logits" in n.output]
    last.op_type, last.input[0] = "Identity", "y1"
    del last.input[1:]
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = d.WIDTH
    source = save(model, tmp_path / "source")
    convert(source, tmp_path / "out", ConvertOptions(max_positions=128, verify=False))
    from pagegraft.graphpass.packed import PackedModel

    packed = PackedModel(tmp_path / "out" / "model.onnx", Manifest.load(tmp_path / "out"), block_size=4)
    tokens = [3, 9, 1, 40, 9, 22, 7]
    actual = np.concatenate([packed.step([(0, tokens[:4])])[0], packed.step([(0, tokens[4:])])[0]])
    query, key, value = weights[tokens].astype(np.float64).reshape(7, d.HEADS, 3, d.SIZE).transpose(2, 1, 0, 3)
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(d.SIZE)
    scores = np.where(np.tri(7, dtype=bool), scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (weight / weight.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(7, d.WIDTH)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def shared_buffer(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
    length = g.op("Cast", g.op("Reshape", r.total, g.integers(1)), to=TensorProto.INT32)
    return multi_head(CAUSAL, extra=(length,))(g, hidden, index, r)


def used_scores(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
    out = multi_head(CAUSAL, outputs=4)(g, hidden, index, r)
    return g.op("Add", out, g.op("ReduceMean", f"qk{index}", keepdims=0))


def mask_of_rank_four(g: d.Graph, r: d.Ranges) -> str:
    return g.op("Unsqueeze", causal_mask(g, r), g.integers(1))


def one_token_a_step(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
    operands = [g.op("MatMul", hidden, g.weight(d.WIDTH, d.WIDTH)) for _ in range(3)]
    names = (f"y{index}", f"present.{index}.key", f"present.{index}.value")
    inputs = (*operands, "", "", f"past.{index}.key", f"past.{index}.value")
    return g.op("DecoderMaskedMultiHeadAttention", *inputs, outputs=names, domain="com.microsoft", num_heads=d.HEADS)


def sparse(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
    operands = [g.op("MatMul", hidden, g.weight(d.WIDTH, d.WIDTH)) for _ in range(3)]
    names = (f"y{index}", f"present.{index}.key", f"present.{index}.value")
    rows, columns = g.constant([[0, 1]], np.int32), g.constant([[0]], np.int32)
    total = g.op("Cast", r.total, to=TensorProto.INT32)
    inputs = (*operands, f"past.{index}.key", f"past.{index}.value", rows, columns, total, lengths(g, r))
    attributes = {"num_heads": d.HEADS, "kv_num_heads": d.HEADS, "sparse_block_size": 64}
    return g.op("SparseAttention", *inputs, outputs=names, domain="com.microsoft", **attributes)


REFUSED: dict[str, tuple[Layer, dict[str, Any], str, str]] = {
    "both ways": (multi_head(mask=ones_mask), {}, "mask", "in its future"),
    "both ways, merged": (merged(ones_mask), {"stacked": True}, "mask", "in its future"),
    "dilated bias": (multi_head(bias_of(d.dilated)), {}, "mask", "holes"),
    "shared buffer": (shared_buffer, {}, "fused", "past_sequence_length"),
    "scores used": (used_scores, {}, "score", "used elsewhere"),
    "mask of rank 4": (merged(mask_of_rank_four), {"stacked": True}, "mask", "rank 4"),
    "rotates itself": (merged(do_rotary=1, unidirectional=1), {"stacked": True}, "fused", "rotates"),
    "one token a step": (one_token_a_step, {}, "fused", "DecoderMaskedMultiHeadAttention"),
    "keys from the fourth on": (
        merged(length_and_start(3), past=False, unidirectional=1),
        {"past": False},
        "score",
        "scores pass a function",
    ),
    "sparse": (sparse, {}, "mask", "SparseAttention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_node_and_hint(name: str, tmp_path: Path) -> None:
    layer, how, kind, words = REFUSED[name]
    source = save(build(layer, **how), tmp_path / "source")
    with pytest.raises(NotConvertible, match=words) as caught:
        convert(source, tmp_path / "out", OPTIONS)
    assert caught.value.kind == kind
    assert caught.value.node
    assert caught.value.hint
    assert not (tmp_path / "out").exists()
    refusal = inspect(source, OPTIONS).refusal
    assert refusal is not None
    assert refusal.reason == caught.value.reason
