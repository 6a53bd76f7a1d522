"""The float64 reference against onnxruntime's own CPU kernel of com.microsoft::GroupQueryAttention.

GroupQueryAttention keeps contiguous caches [S, G, P, D], right-padded; the same keys and values are paged for ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from contiguous import gathered, paged
from onnx import helper
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import AttentionAttributes

Array = np.ndarray[Any, Any]
H, G, D, B = 6, 2, 32, 4
CAPACITY = 32


@dataclass(frozen=True)
class Setting:
    """New and past tokens of each sequence, attributes common to both ops, and what else is in play."""

    new: tuple[int, ...] = (5, 5)
    past: tuple[int, ...] = (0, 0)
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    sink: bool = False
    norm: bool = False
    packed: bool = False
    rotary_dim: int = D
    slopes: tuple[float, ...] = ()
    quant: str = "NONE"
    cache_dtype: str = ""


DECODE = Setting(new=(1, 1, 1), past=(3, 17, 8))
CHUNK = Setting(new=(7,), past=(9,))
MIXED = Setting(new=(1, 6, 4), past=(12, 3, 0))
SETTINGS = {
    "prefill": Setting(),
    "decode": DECODE,
    "chunk": CHUNK,
    "mixed": MIXED,
    "fp16": replace(DECODE, dtype="float16"),
    "packed": replace(DECODE, packed=True),
    "scale": replace(MIXED, attributes={"scale": 0.4}),
    "softcap": replace(MIXED, attributes={"softcap": 1.5}),
    "window_prefill": Setting(new=(9, 9), attributes={"local_window_size": 4}),
    "window_decode": replace(DECODE, attributes={"local_window_size": 5}),
    "window_chunk": replace(CHUNK, attributes={"local_window_size": 3}),
    "window_1": replace(DECODE, attributes={"local_window_size": 1}),
    "sink": replace(MIXED, sink=True),
    "sink_softcap_window": replace(MIXED, sink=True, attributes={"softcap": 2.0, "local_window_size": 6}),
    "rotary": replace(MIXED, attributes={"do_rotary": 1}),
    "rotary_interleaved": replace(MIXED, attributes={"do_rotary": 1, "rotary_interleaved": 1}),
    "rotary_partial": replace(DECODE, attributes={"do_rotary": 1}, rotary_dim=16),
    "norm": replace(MIXED, norm=True),
    "norm_rotary": replace(MIXED, norm=True, attributes={"do_rotary": 1, "qk_norm_epsilon": 1e-3}),
    "alibi": replace(CHUNK, slopes=tuple(2.0 ** -(i + 1) for i in range(H))),
    "int8_tensor": replace(DECODE, quant="PER_TENSOR", cache_dtype="int8"),
    "int8_channel": replace(CHUNK, quant="PER_CHANNEL", cache_dtype="int8"),
    "int4_tensor": replace(DECODE, quant="PER_TENSOR", cache_dtype="int4"),
    "int4_channel": replace(CHUNK, quant="PER_CHANNEL", cache_dtype="int4"),
}


def _operands(s: Setting) -> dict[str, Array]:
    """New q/k/v padded to [S, longest, heads, D], past caches [S, CAPACITY, G, W], and the small inputs."""
    rng = np.random.default_rng(7)
    longest, sequences = max(s.new), len(s.new)
    out: dict[str, Array] = {
        "q": rng.normal(size=(sequences, longest, H, D)),
        "k": rng.normal(size=(sequences, longest, G, D)),
        "v": rng.normal(size=(sequences, longest, G, D)),
    }
    if s.cache_dtype:
        width = D // 2 if s.cache_dtype == "int4" else D
        kind = np.uint8 if s.cache_dtype == "int4" else np.int8
        for name in ("past_k", "past_v"):
            out[name] = rng.integers(0 if kind is np.uint8 else -127, 127, (sequences, CAPACITY, G, width)).astype(kind)
        shape = (1,) if s.quant == "PER_TENSOR" else (G, 1, D)
        coarse = 0.4 if s.cache_dtype == "int4" else 0.02
        out["k_scale"] = rng.uniform(coarse, 2 * coarse, shape).astype(np.float32)
        out["v_scale"] = rng.uniform(coarse, 2 * coarse, shape).astype(np.float32)
    else:
        for name in ("past_k", "past_v"):
            out[name] = rng.normal(size=(sequences, CAPACITY, G, D))
    angles = np.arange(CAPACITY)[:, None] * 10000.0 ** (-2 * np.arange(s.rotary_dim // 2) / s.rotary_dim)
    out["cos_cache"], out["sin_cache"] = np.cos(angles), np.sin(angles)
    out["head_sink"] = rng.normal(size=H)
    out["q_norm_weight"], out["k_norm_weight"] = rng.normal(size=D), rng.normal(size=D)
    return {n: x.astype(s.dtype) if x.dtype == np.float64 else x for n, x in out.items()}


def _optional(s: Setting, x: dict[str, Array]) -> dict[str, Array]:
    names = (["cos_cache", "sin_cache"] if s.attributes.get("do_rotary") else []) + (["head_sink"] if s.sink else [])
    names += ["k_scale", "v_scale"] if s.quant != "NONE" else []
    return {n: x[n] for n in names}


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """ONNX's own RMSNormalization, run by onnxruntime: its CPU GroupQueryAttention has no norm inputs."""
    node = helper.make_node("RMSNormalization", ["x", "w"], ["y"], epsilon=epsilon)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in (("x", x), ("w", weight))]
    graph = helper.make_graph([node], "norm", inputs, [helper.make_tensor_value_info("y", kind, x.shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "w": weight})[0]


def _gqa(s: Setting, x: dict[str, Array]) -> tuple[list[Array], Array, Array]:
    """Each sequence's output rows [n, H*D], and the present caches [S, P, G, W]."""
    sequences, longest = x["q"].shape[:2]
    new, past = np.array(s.new), np.array(s.past)
    if s.norm:
        epsilon = s.attributes.get("qk_norm_epsilon", 1e-6)
        x = {**x, **{n: _rms_norm(x[n], x[f"{n}_norm_weight"], epsilon) for n in "qk"}}
    flat = {n: np.ascontiguousarray(x[n].reshape(sequences, longest, -1)) for n in "qkv"}
    prompt = not past.any()
    feeds = {
        "query": np.concatenate([flat["q"], flat["k"], flat["v"]], axis=2) if s.packed else flat["q"],
        "past_key": np.ascontiguousarray(x["past_k"].swapaxes(1, 2)),
        "past_value": np.ascontiguousarray(x["past_v"].swapaxes(1, 2)),
        "seqlens_k": (past + new - 1).astype(np.int32),
        "total_sequence_length": np.array((past + new).max() if not prompt else longest, np.int32),
        **_optional(s, x),
    }
    if not s.packed:
        feeds.update(key=flat["k"], value=flat["v"])
    if len(set(s.new)) > 1:
        feeds["query_seqlens"] = new.astype(np.int32)
    if s.slopes:
        total = int((past + new).max())
        p = past[0] + np.arange(longest)
        bias = np.array(s.slopes)[:, None, None] * (np.arange(total)[None, :] - p[:, None])
        feeds["attention_bias"] = bias[None].astype(s.dtype)
    attributes = {"num_heads": H, "kv_num_heads": G, **s.attributes}
    attributes.pop("qk_norm_epsilon", None)
    if s.cache_dtype:
        bits = 4 if s.cache_dtype == "int4" else 8
        attributes.update(k_quant_type=s.quant, v_quant_type=s.quant, kv_cache_bit_width=bits)
    output, present_k, present_v = _run_gqa(feeds, attributes)
    rows = [output[i, :n] for i, n in enumerate(s.new)]
    return rows, present_k.swapaxes(1, 2), present_v.swapaxes(1, 2)


def _order() -> list[str]:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    schema = next(o for o in get_all_operator_schema() if o.name == "GroupQueryAttention")
    return [i.name for i in schema.inputs]


def _run_gqa(feeds: dict[str, Array], attributes: dict[str, Any]) -> list[Array]:
    order = _order()
    last = max(order.index(n) for n in feeds)
    names = [n if n in feeds else "" for n in order[: last + 1]]
    node = helper.make_node("GroupQueryAttention", names, ["output", "pk", "pv"], domain="com.microsoft", **attributes)

    def kind(a: Array) -> int:
        return helper.np_dtype_to_tensor_dtype(a.dtype)

    inputs = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in feeds.items()]
    outputs = [
        helper.make_tensor_value_info("output", kind(feeds["query"]), None),
        helper.make_tensor_value_info("pk", kind(feeds["past_key"]), None),
        helper.make_tensor_value_info("pv", kind(feeds["past_key"]), None),
    ]
    graph = helper.make_graph([node], "gqa", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)


def _ours(s: Setting, x: dict[str, Array]) -> tuple[list[Array], Array, Array]:
    packed = {n: np.concatenate([x[n][i, :c].reshape(c, -1) for i, c in enumerate(s.new)]) for n in "qkv"}
    key_pool, table = paged(x["past_k"], block_size=B, seed=3)
    value_pool, _ = paged(x["past_v"], block_size=B, seed=3)
    feeds = {
        "query": np.concatenate([packed["q"], packed["k"], packed["v"]], axis=1) if s.packed else packed["q"],
        "key_cache": key_pool,
        "value_cache": value_pool,
        "cumulative_sequence_length": np.concatenate([[0], np.cumsum(s.new)]).astype(np.int32),
        "past_seqlens": np.array(s.past, np.int32),
        "block_table": table,
        **_optional(s, x),
    }
    if s.norm:
        feeds.update({n: x[n] for n in ("q_norm_weight", "k_norm_weight")})
    if not s.packed:
        feeds.update(key=packed["k"], value=packed["v"])
    attributes = {"num_heads": H, "kv_num_heads": G, **s.attributes, "alibi_slopes": s.slopes}
    if s.cache_dtype:
        attributes.update(k_quant_type=s.quant, v_quant_type=s.quant)
        attributes.update(k_cache_dtype=s.cache_dtype, v_cache_dtype=s.cache_dtype)
    out = paged_attention(feeds, AttentionAttributes.from_dict(attributes))
    rows = np.split(out["output"], np.cumsum(s.new)[:-1])
    return rows, gathered(out["key_cache_out"], table, CAPACITY), gathered(out["value_cache_out"], table, CAPACITY)


@pytest.mark.parametrize("name", SETTINGS)
def test_reference_agrees_with_group_query_attention(name: str) -> None:
    s = SETTINGS[name]
    operands = _operands(s)
    theirs, ours = _gqa(s, operands), _ours(s, operands)
    tolerance = 3e-3 if s.dtype == "float16" else 1e-5
    for got, want in zip(ours[0], theirs[0], strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), atol=tolerance, rtol=0)
    for got, want in zip(ours[1:], theirs[1:], strict=True):
        for i, (past, new) in enumerate(zip(s.past, s.new, strict=True)):
            a, b = got[i, : past + new].astype(np.float64), want[i, : past + new].astype(np.float64)
            np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)
