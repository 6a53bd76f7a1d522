"""Stored codes against onnxruntime's QuantizeLinear, and LATENT against ONNX's Attention: sources that are not ours."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from contiguous import paged
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from pagegraft.custom_ops.cache_codec import decode, encode
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import AttentionAttributes

Array = np.ndarray[Any, Any]


def _quantize_linear(x: Array, scale: float, kind: int) -> Array:
    """Codes of onnxruntime, as int8 values or fp8 bits."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)]
    zero = helper.make_tensor("zero", kind, [], b"\x00", raw=True)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], saturate=1),
        helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT),
    ]
    initial = [helper.make_tensor("scale", TensorProto.FLOAT, [], [scale]), zero]
    graph = helper.make_graph(nodes, "q", inputs, outputs, initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.037])
@pytest.mark.parametrize(("dtype", "kind"), [("int8", TensorProto.INT8), ("float8e4m3fn", TensorProto.FLOAT8E4M3FN)])
def test_codes_are_those_of_quantize_linear(dtype: str, kind: int, scale: float) -> None:
    """Ties (multiples of half a step when the scale is a power of two), saturation, both signs, subnormal fp8."""
    grid = np.arange(-300, 300) * 0.5 * scale
    x = np.concatenate([grid, grid * 0.01, grid * 40, np.random.default_rng(0).normal(size=400)]).astype(np.float32)
    want = _quantize_linear(x, scale, kind)
    got = encode(x.astype(np.float64)[None], np.float32(scale).astype(np.float64), dtype)[0].astype(np.float32)
    # x / scale is rounded to float32 there and not here: codes beside a tie may differ, and no others.
    ratio = x.astype(np.float64) / np.float32(scale)
    same = got == want
    assert same.mean() > (1.0 if scale in (1.0, 0.25) else 0.97) - 1e-9
    assert (np.abs(got[~same] - want[~same]) <= np.abs(ratio[~same]) * 0.13 + 1).all()


def test_int4_is_packed_low_nibble_first() -> None:
    """As onnx packs its INT4 tensors, with 8 added to each signed value."""
    values = np.array([-8, 7, 0, -1, 3, 5], np.float64)
    packed = onnx.numpy_helper.from_array(values.astype(ml_dtypes.int4)).raw_data
    signed = np.frombuffer(packed, np.uint8)
    assert (encode(values[None], 1.0, "int4")[0] == signed ^ 0x88).all()
    assert (decode(encode(values[None], 1.0, "int4"), 1.0, "int4", 6)[0] == values).all()


def test_float_caches_round_as_numpy_casts() -> None:
    x = np.random.default_rng(1).normal(size=(4, 64)) * 10.0 ** np.arange(-2, 2)[:, None]
    for name, kind in (("float16", np.float16), ("float32", np.float32)):
        assert (encode(x, 1.0, name) == x.astype(kind)).all()


@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (24, 24), (576, 512)])
@pytest.mark.parametrize("causal", [0, 1])
def test_latent_is_attention_with_the_keys_leading_channels_as_values(size: int, value_size: int, causal: int) -> None:
    """ONNX Attention with one KV head whose value is a slice of its key."""
    rng = np.random.default_rng(size)
    heads, past, new, scale = 4, 13, 5, 0.21
    query, latent = rng.normal(size=(1, new, heads * size)), rng.normal(size=(1, past + new, 1, size))
    keys = latent[:, :, 0].astype(np.float32)
    node = helper.make_node(
        "Attention", ["Q", "K", "V", "", "PK", "PV"], ["Y", "A", "B"],
        q_num_heads=heads, kv_num_heads=1, scale=scale, is_causal=causal,
    )  # fmt: skip
    feeds = {"Q": query.astype(np.float32), "K": keys[:, past:], "V": keys[:, past:, :value_size]}
    feeds |= {"PK": keys[:, None, :past], "PV": keys[:, None, :past, :value_size]}
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in feeds.items()]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("Y", "A", "B")]
    graph = helper.make_graph([node], "attention", infos, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    want = ReferenceEvaluator(model).run(None, feeds)[0][0]
    pool, table = paged(latent.astype(np.float32), block_size=4, seed=2)
    call = {
        "query": query[0].astype(np.float32),
        "key": keys[0, past:],
        "key_cache": pool,
        "cumulative_sequence_length": np.array([0, new], np.int32),
        "past_seqlens": np.array([past], np.int32),
        "block_table": table,
    }
    attributes = AttentionAttributes(
        num_heads=heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=0 if value_size == size else value_size,
        scale=scale,
        is_causal=causal,
    )
    np.testing.assert_allclose(paged_attention(call, attributes)["output"], want, atol=1e-5, rtol=0)
