"""The float64 reference against ONNX's own node tests of Attention and RotaryEmbedding.

Expected values come from the onnx package. Boolean masks have no input in PagedAttention; with block size 1 each
position is a block, so a masked position is an unmapped block, and each query row is a sequence of one token.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from contiguous import gathered, paged
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import AttentionAttributes

Array = np.ndarray[Any, Any]


def _node_tests(module: str) -> dict[str, Any]:
    # onnx's public collector imports the cases of every operator; these two modules suffice.
    nodes = importlib.import_module("onnx.backend.test.case.node")
    importlib.import_module(f"onnx.backend.test.case.node.{module}")
    op = {"attention": "Attention", "rotaryembedding": "RotaryEmbedding"}[module]
    return {
        case.name: case
        for case in nodes._NodeTestCases
        if case.model.graph.node[0].op_type == op and len(case.model.graph.node) == 1
    }


ATTENTION = _node_tests("attention")
ROTARY = _node_tests("rotaryembedding")


@dataclass
class OnnxAttention:
    """One Attention node test with 4-D operands: [batch, heads, length, size]."""

    attributes: dict[str, Any]
    inputs: dict[str, Array]
    outputs: dict[str, Array]

    @classmethod
    def of(cls, case: Any) -> OnnxAttention:
        node = case.model.graph.node[0]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
        feeds, results = case.data_sets[0]
        inputs = dict(zip([n for n, i in zip(names, node.input, strict=False) if i], feeds, strict=True))
        out_names = ("Y", "present_key", "present_value", "qk")
        outputs = dict(zip([n for n, o in zip(out_names, node.output, strict=False) if o], results, strict=True))
        inputs, outputs = dict(inputs), dict(outputs)
        if inputs["Q"].ndim == 3:
            for name, heads in (("Q", "q_num_heads"), ("K", "kv_num_heads"), ("V", "kv_num_heads")):
                x = inputs[name]
                inputs[name] = x.reshape(*x.shape[:2], attributes[heads], -1).swapaxes(1, 2)
            y = outputs["Y"]
            outputs["Y"] = y.reshape(*y.shape[:2], attributes["q_num_heads"], -1).swapaxes(1, 2)
        return cls(attributes, inputs, outputs)

    @property
    def past(self) -> int:
        return int(self.inputs["past_key"].shape[2]) if "past_key" in self.inputs else 0

    def boolean_mask(self) -> Array | None:
        """The mask as booleans [batch, heads, rows, keys], None for no mask; ValueError when it is a bias."""
        mask = self.inputs.get("attn_mask")
        if mask is None:
            return None
        if mask.dtype != bool:
            if not np.isin(mask, (0, -np.inf)).all():
                raise ValueError("an additive bias")
            mask = mask == 0
        Q, keys = self.inputs["Q"], self.past + self.inputs["K"].shape[2]
        mask = np.pad(np.atleast_2d(mask), [(0, 0)] * (max(mask.ndim, 2) - 1) + [(0, keys - mask.shape[-1])])
        return np.broadcast_to(mask, (*Q.shape[:3], keys))

    def expressible(self) -> bool:
        try:
            self.boolean_mask()
        except ValueError:
            return False
        right = self.attributes.get("right_window_size", -1)
        return right < 0


def _attributes(case: OnnxAttention, heads: int, kv_heads: int) -> AttentionAttributes:
    left = case.attributes.get("left_window_size", -1)
    return AttentionAttributes(
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=case.attributes.get("scale"),
        softcap=case.attributes.get("softcap", 0.0),
        is_causal=case.attributes.get("is_causal", 0),
        local_window_size=left + 1 if left >= 0 else -1,
    )


def _whole(case: OnnxAttention) -> tuple[Array, Array | None, Array | None]:
    """Runs a case without mask as one sequence a batch entry; returns Y and the presents."""
    Q, K, V = (case.inputs[n] for n in "QKV")
    batch, heads, rows, size = Q.shape
    keys = case.past + K.shape[2]
    full_K, full_V = K, V
    if case.past:
        zeros = np.zeros_like(K), np.zeros_like(V)
        full_K = np.concatenate([case.inputs["past_key"], zeros[0]], axis=2)
        full_V = np.concatenate([case.inputs["past_value"], zeros[1]], axis=2)
    lengths = case.inputs.get("nonpad_kv_seqlen", np.full(batch, keys))
    # ONNX aligns a causal block without past or lengths at the top left: its first row is position 0.
    aligned = case.past if case.attributes.get("is_causal") and "nonpad_kv_seqlen" not in case.inputs else None
    first = lengths - rows if aligned is None else np.full(batch, aligned)
    # Rows past the last key (fewer keys than rows) look at positions without a block.
    block_size = 1 if case.past + rows > keys else 4
    key_pool, table = paged(full_K.transpose(0, 2, 1, 3), block_size=block_size, seed=1)
    value_pool, _ = paged(full_V.transpose(0, 2, 1, 3), block_size=block_size, seed=1)
    slots = np.full(batch * rows, -1)
    new_K, new_V = np.zeros((batch, rows, *K.shape[1::2])), np.zeros((batch, rows, *V.shape[1::2]))
    if case.past:
        new_K[:, : K.shape[2]], new_V[:, : K.shape[2]] = K[:, :, :rows].swapaxes(1, 2), V[:, :, :rows].swapaxes(1, 2)
        at = case.past + np.arange(K.shape[2])
        slots = np.full((batch, rows), -1)
        slots[:, : K.shape[2]] = table[:, at // block_size] * block_size + at % block_size
    feeds = {
        "query": Q.swapaxes(1, 2).reshape(batch * rows, heads * size),
        "key": new_K.reshape(batch * rows, -1).astype(Q.dtype),
        "value": new_V.reshape(batch * rows, -1).astype(Q.dtype),
        "key_cache": key_pool,
        "value_cache": value_pool,
        "cumulative_sequence_length": (np.arange(batch + 1) * rows).astype(np.int32),
        "past_seqlens": first.astype(np.int32),
        "block_table": np.pad(table, ((0, 0), (0, rows)), constant_values=-1),
        "slot_mapping": slots.reshape(-1).astype(np.int32),
    }
    out = paged_attention(feeds, _attributes(case, heads, K.shape[1]))
    Y = out["output"].reshape(batch, rows, heads, -1).swapaxes(1, 2)
    if not case.past:
        return Y, None, None
    present = [gathered(out[n], table, keys).swapaxes(1, 2) for n in ("key_cache_out", "value_cache_out")]
    return Y, present[0], present[1]


def _row_by_row(case: OnnxAttention, mask: Array) -> Array:
    """Runs each (batch entry, head, query row) as a sequence of one token over blocks of size 1."""
    Q, K, V = (case.inputs[n] for n in "QKV")
    if case.past:
        K = np.concatenate([case.inputs["past_key"], K], axis=2)
        V = np.concatenate([case.inputs["past_value"], V], axis=2)
    batch, heads, rows, size = Q.shape
    keys, share = K.shape[2], heads // K.shape[1]
    lengths = case.inputs.get("nonpad_kv_seqlen", np.full(batch, keys)).astype(int)
    Y = np.zeros((*Q.shape[:3], V.shape[3]), Q.dtype)
    for b, h in np.ndindex(batch, heads):
        if "nonpad_kv_seqlen" in case.inputs:
            first = lengths[b] - rows
        else:
            first = case.past
        table = np.where(mask[b, h] & (np.arange(keys) < lengths[b]), np.arange(keys), -1)
        past = first + np.arange(rows) if case.attributes.get("is_causal") else np.full(rows, keys - 1)
        feeds = {
            "query": Q[b, h],
            "key": np.zeros((rows, size), Q.dtype),
            "value": np.zeros((rows, V.shape[3]), Q.dtype),
            "key_cache": K[b, h // share][:, None, None, :],
            "value_cache": V[b, h // share][:, None, None, :],
            "cumulative_sequence_length": np.arange(rows + 1, dtype=np.int32),
            "past_seqlens": past.astype(np.int32),
            "block_table": table.astype(np.int32),
            "slot_mapping": np.full(rows, -1, np.int32),
        }
        Y[b, h] = paged_attention(feeds, _attributes(case, 1, 1))["output"]
    return Y


EXPRESSIBLE = {name: case for name, raw in ATTENTION.items() if (case := OnnxAttention.of(raw)).expressible()}
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("name", sorted(EXPRESSIBLE))
def test_attention_node_test(name: str) -> None:
    case = EXPRESSIBLE[name]
    mask = case.boolean_mask()
    lengths = case.inputs.get("nonpad_kv_seqlen")
    too_long = lengths is not None and (lengths < case.inputs["Q"].shape[2]).any()
    tolerance = TOLERANCE[case.outputs["Y"].dtype.name]
    if mask is None and too_long:
        # Rows before position 0 see nothing: in PagedAttention, a table without mapped blocks.
        mask = _visible_from(case)
        case = OnnxAttention({**case.attributes, "is_causal": 0}, case.inputs, case.outputs)
    if mask is not None:
        Y = _row_by_row(case, mask)
    else:
        Y, present_key, present_value = _whole(case)
        for got, want in ((present_key, "present_key"), (present_value, "present_value")):
            if got is not None and want in case.outputs:
                np.testing.assert_array_equal(got, case.outputs[want])
    np.testing.assert_allclose(Y.astype(np.float64), case.outputs["Y"].astype(np.float64), atol=tolerance, rtol=0)


def _visible_from(case: OnnxAttention) -> Array:
    batch, heads, rows, _ = case.inputs["Q"].shape
    keys = case.inputs["K"].shape[2]
    offset = (case.inputs["nonpad_kv_seqlen"] - rows).reshape(-1, 1, 1, 1)
    sees = np.arange(keys) <= np.arange(rows)[:, None] + offset
    return np.broadcast_to(sees, (batch, heads, rows, keys))


def test_enough_node_tests_are_expressible() -> None:
    """The set is not empty by accident: it covers GQA, windows, softcap, past, ragged lengths, masks, empty rows."""
    names = " ".join(EXPRESSIBLE)
    assert len(EXPRESSIBLE) >= 50
    for word in ("gqa", "window", "softcap", "with_past", "nonpad", "bool", "fullymasked", "diff_heads", "fp16"):
        assert word in names


@pytest.mark.parametrize("name", sorted(ROTARY))
def test_rotary_node_test(name: str) -> None:
    """The rotated vectors are what the op writes into the key cache."""
    case = ROTARY[name]
    node = case.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    feeds, (expected,) = case.data_sets[0]
    X, cos, sin = feeds[:3]
    if X.ndim == 3:
        X = X.reshape(*X.shape[:2], attributes["num_heads"], -1)
        expected = expected.reshape(X.shape)
    else:
        X, expected = X.swapaxes(1, 2), expected.swapaxes(1, 2)
    tokens, heads, size = X.shape[0] * X.shape[1], X.shape[2], X.shape[3]
    positions = feeds[3].reshape(-1) if len(feeds) > 3 else np.arange(tokens)
    flat = np.ascontiguousarray(X.reshape(tokens, heads * size))
    cache = np.zeros((tokens, 1, heads, size), X.dtype)
    out = paged_attention(
        {
            "query": flat,
            "key": flat,
            "value": flat,
            "key_cache": cache,
            "value_cache": cache,
            "cumulative_sequence_length": np.arange(tokens + 1, dtype=np.int32),
            "past_seqlens": positions.astype(np.int32),
            "block_table": np.full((tokens, positions.max() + 1), -1, np.int32),
            "slot_mapping": np.arange(tokens, dtype=np.int32),
            "cos_cache": cos.reshape(-1, cos.shape[-1]),
            "sin_cache": sin.reshape(-1, sin.shape[-1]),
        },
        AttentionAttributes(
            num_heads=heads, kv_num_heads=heads, do_rotary=1, rotary_interleaved=attributes.get("interleaved", 0)
        ),
    )
    np.testing.assert_allclose(out["key_cache_out"].reshape(expected.shape), expected, atol=1e-6, rtol=0)
