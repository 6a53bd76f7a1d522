"""Group negative: every rule of the contract broken once. The call must fail, say where, and change no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..call import NUMPY_TYPES, Call, Setup
from .case import Case

__all__ = ["cases"]

Spoil = Callable[[Call], None]


def cases() -> list[Case]:
    """The cases of this group."""
    return [*_attribute_cases(), *_shape_cases(), *_presence_cases(), *_type_cases(), *_length_cases(), *_id_cases()]


def _case(name: str, spoil: Spoil, *names: str, bad_id: bool = False, **setup: Any) -> Case:
    return Case(
        id=f"negative/{name}",
        group="negative",
        kind="error",
        setup=Setup(**setup),
        spoil=spoil,
        names=names,
        bad_id=bad_id,
    )


def _set(**attributes: Any) -> Spoil:
    return lambda call: call.attributes.update(attributes)


def _drop(name: str) -> Spoil:
    return lambda call: call.feeds.__delitem__(name)


def _put(name: str, index: Any, value: int) -> Spoil:
    def spoil(call: Call) -> None:
        call.feeds[name][index] = value

    return spoil


def _reshape(name: str, change: Callable[[Any], Any]) -> Spoil:
    def spoil(call: Call) -> None:
        call.feeds[name] = np.ascontiguousarray(change(call.feeds[name]))

    return spoil


def _add(name: str, dtype: str, *shape: int) -> Spoil:
    def spoil(call: Call) -> None:
        call.feeds[name] = np.ones(shape, NUMPY_TYPES[dtype])

    return spoil


def _cut(axis: int) -> Callable[[Any], Any]:
    return lambda x: np.take(x, range(x.shape[axis] - 1), axis=axis)


_ROTARY: dict[str, Any] = {"rotary_dim": 16}
_INT8: dict[str, Any] = {"cache": "int8", "k_quant": "PER_CHANNEL"}
_LATENT: dict[str, Any] = {"kv_heads": 1, "head_size": 24, "latent_value_size": 16, "attributes": {"scale": 0.25}}
_FP8: dict[str, Any] = {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR"}
_LATENT_INT8: dict[str, Any] = {**_LATENT, "cache": "int8", "k_quant": "PER_TENSOR"}


def _attribute_cases() -> list[Case]:
    def one(name: str, label: str, **values: Any) -> Case:
        return _case(f"attribute_{label}", _set(**{name: values.pop("value")}), name, **values)

    return [
        one("num_heads", "num_heads_zero", value=0),
        one("kv_num_heads", "kv_num_heads_zero", value=0),
        one("kv_num_heads", "kv_num_heads_no_divisor", value=3),
        one("local_window_size", "window_zero", value=0),
        one("local_window_size", "window_minus_2", value=-2),
        one("softcap", "softcap_negative", value=-1.0),
        one("qk_norm_epsilon", "qk_norm_epsilon_negative", value=-1.0, norm=True),
        one("is_causal", "is_causal_2", value=2),
        one("do_rotary", "do_rotary_2", value=2),
        one("rotary_interleaved", "rotary_interleaved_2", value=2, **_ROTARY),
        one("rotary_offset", "rotary_offset_4", value=4, rotary_dim=8),
        one("rotary_offset", "rotary_offset_negative", value=-8, rotary_dim=8),
        one("k_quant_type", "k_quant_type_unknown", value="PER_ROW", **_INT8),
        one("v_quant_type", "v_quant_type_unknown", value="per_channel", **_INT8),
        one("k_cache_dtype", "k_cache_dtype_unknown", value="uint4"),
        one("v_cache_dtype", "v_cache_dtype_disagrees", value="float16"),
        one("kv_cache_layout", "layout_unknown", value="PAGED"),
        one("v_head_size", "v_head_size_without_latent", value=8),
        one("v_head_size", "v_head_size_negative", value=-1, **_LATENT),
        one("v_head_size", "v_head_size_beyond_head_size", value=32, **_LATENT),
        one("alibi_slopes", "alibi_slopes_too_few", value=(0.5, 0.25), attributes={"alibi_slopes": (1.0,) * 4}),
        _case("attribute_latent_without_scale", lambda call: call.attributes.pop("scale"), "scale", **_LATENT),
        _case("attribute_latent_two_kv_heads", _set(kv_num_heads=2), "kv_num_heads", **_LATENT),
        one("k_quant_type", "quant_type_for_float_cache", value="PER_TENSOR"),
        one("k_quant_type", "no_quant_type_for_int8", value="NONE", **_INT8),
        _case("attribute_quant_type_and_scale_for_float_cache", _quantise, *_QUANTISED),
        _case("attribute_int8_without_quantisation", _unquantise, *_QUANTISED, **_INT8),
        _case("attribute_fp8_without_quantisation", _unquantise, *_QUANTISED, **_FP8),
        one("k_quant_type", "per_token_fp8", value="PER_TOKEN", cache="float8e4m3fn", k_quant="PER_TENSOR"),
        one("k_cache_dtype", "no_cache_dtype_for_uint8", value="", cache="int4", k_quant="PER_TENSOR"),
    ]  # fmt: skip


_QUANTISED = ("k_quant_type", "v_quant_type", "k_scale", "v_scale")


def _quantise(call: Call) -> None:
    """Granularities with their scales: consistent, but the cache is not quantised."""
    for letter in "kv":
        call.attributes[f"{letter}_quant_type"] = "PER_TENSOR"
        call.feeds[f"{letter}_scale"] = np.ones(1, np.float32)


def _unquantise(call: Call) -> None:
    """No granularities and no scales: consistent, but the cache is quantised."""
    for letter in "kv":
        del call.attributes[f"{letter}_quant_type"], call.feeds[f"{letter}_scale"]


def _shape_cases() -> list[Case]:
    def one(name: str, label: str, change: Callable[[Any], Any], *names: str, **setup: Any) -> Case:
        return _case(f"shape_{label}", _reshape(name, change), name, *names, **setup)

    return [
        one("query", "query_3d", lambda x: x[None]),
        one("query", "query_width", _cut(1), "key"),
        one("query", "packed_width", _cut(1), packed=True),
        one("key", "key_width", _cut(1), "query"),
        one("key", "key_rows", _cut(0), "query"),
        one("value", "value_width", _cut(1)),
        one("value", "value_rows", _cut(0), "query"),
        one("key_cache", "key_cache_3d", lambda x: x[0], "value_cache"),
        one("key_cache", "key_cache_heads", _cut(2)),
        one("key_cache", "key_cache_width", _cut(3)),
        one("value_cache", "value_cache_blocks", _cut(0), "key_cache"),
        one("value_cache", "value_cache_block_size", lambda x: x[:, :4], "key_cache"),
        one("value_cache", "value_cache_width", _cut(3)),
        one("key_cache", "key_cache_int4_width", _cut(3), cache="int4", k_quant="PER_TENSOR"),
        one("cumulative_sequence_length", "cumulative_longer", lambda x: np.append(x, x[-1]), "past_seqlens"),
        one("cumulative_sequence_length", "cumulative_empty", lambda x: x[:0]),
        one("cumulative_sequence_length", "cumulative_2d", lambda x: x[None]),
        one("past_seqlens", "past_shorter", _cut(0), "cumulative_sequence_length", "block_table"),
        one("block_table", "table_rows", _cut(0), "past_seqlens", "cumulative_sequence_length"),
        one("block_table", "table_1d", lambda x: x[0]),
        one("slot_mapping", "slots_shorter", _cut(0), slots="explicit"),
        one("head_sink", "sink_shorter", _cut(0), sink=True),
        one("q_norm_weight", "q_norm_shorter", _cut(0), norm=True),
        one("k_norm_weight", "k_norm_shorter", _cut(0), norm=True),
        one("cos_cache", "cos_too_wide", lambda x: np.pad(x, ((0, 0), (0, 1))), "sin_cache", **_ROTARY),
        one("sin_cache", "sin_differs", _cut(1), "cos_cache", **_ROTARY),
        one("cos_cache", "cos_empty", lambda x: x[:, :0], "sin_cache", **_ROTARY),
        one("k_scale", "scale_channel_shape", _cut(2), **_INT8),
        one("v_scale", "scale_tensor_shape", lambda x: np.append(x, x), cache="int8", k_quant="PER_TENSOR"),
        one("k_scale", "scale_token_shape", lambda x: x.swapaxes(1, 2), cache="int8", k_quant="PER_TOKEN"),
        _case("shape_metadata_1", _add("attention_metadata", "int32", 1), "attention_metadata"),
        _case("shape_rotary_beyond_head", _set(rotary_offset=8), "rotary_offset", "cos_cache", **_ROTARY),
        _case("shape_block_size_not_power_of_two", _narrow_blocks, "key_cache", "block size", "block_size"),
        _case("shape_block_size_1024", _double_blocks, "key_cache", "block size", "block_size", block_size=512),
    ]  # fmt: skip


def _narrow_blocks(call: Call) -> None:
    for name in ("key_cache", "value_cache"):
        call.feeds[name] = np.ascontiguousarray(call.feeds[name][:, :6])


def _double_blocks(call: Call) -> None:
    for name in ("key_cache", "value_cache"):
        call.feeds[name] = np.concatenate([call.feeds[name]] * 2, axis=1)


def _presence_cases() -> list[Case]:
    return [
        _case("missing_value", _drop("value"), "value"),
        _case("missing_key", _drop("key"), "key", "query"),
        _case("missing_value_cache", _drop("value_cache"), "value_cache"),
        _case("missing_cos", _drop("cos_cache"), "cos_cache", **_ROTARY),
        _case("missing_sin", _drop("sin_cache"), "sin_cache", **_ROTARY),
        _case("missing_q_norm", _drop("q_norm_weight"), "q_norm_weight", "k_norm_weight", norm=True),
        _case("missing_k_norm", _drop("k_norm_weight"), "k_norm_weight", "q_norm_weight", norm=True),
        _case("missing_k_scale", _drop("k_scale"), "k_scale", **_INT8),
        _case("missing_v_scale", _drop("v_scale"), "v_scale", **_INT8),
        _case("surplus_k_scale", _add("k_scale", "float32", 1), "k_scale"),
        _case("latent_with_value", _add("value", "float32", 8, 24), "value", **_LATENT),
        _case("latent_with_value_cache", _add("value_cache", "float32", 9, 8, 1, 24), "value_cache", **_LATENT),
        _case("latent_with_v_quant_type", _set(v_quant_type="PER_TENSOR"), "v_quant_type", **_LATENT),
        _case(
            "latent_int8_with_v_quant_type", _set(v_quant_type="PER_CHANNEL"), "v_quant_type", "v_scale", **_LATENT_INT8
        ),
        _case("latent_with_v_cache_dtype", _set(v_cache_dtype="float32"), "v_cache_dtype", **_LATENT),
        _case("latent_int8_with_v_scale", _add("v_scale", "float32", 1), "v_scale", "v_quant_type", **_LATENT_INT8),
        _case("latent_without_key", _drop("key"), "key", **_LATENT),
    ]


def _type_cases() -> list[Case]:
    # An ONNX runtime checks type variables before the kernel sees anything; its message speaks of types only.
    def retype(name: str, dtype: str) -> Spoil:
        def spoil(call: Call) -> None:
            call.feeds[name] = call.feeds[name].astype(NUMPY_TYPES[dtype])

        return spoil

    return [
        _case("type_key_differs", retype("key", "float16"), "type", "key", "query"),
        _case("type_value_differs", retype("value", "bfloat16"), "type", "value", "query"),
        _case("type_value_cache_differs", retype("value_cache", "float16"), "type", "value_cache", "key_cache"),
        _case("type_cos_differs", retype("cos_cache", "float16"), "type", "cos_cache", "query", **_ROTARY),
        _case("type_sink_differs", retype("head_sink", "float16"), "type", "head_sink", "query", sink=True),
        _case("type_scale_float16", retype("k_scale", "float16"), "type", "k_scale", **_INT8),
        _case("type_cache_int32", retype("key_cache", "int32"), "type", "key_cache"),
    ]


def _length_cases() -> list[Case]:
    cumulative, past = "cumulative_sequence_length", "past_seqlens"
    return [
        _case("cumulative_starts_at_1", _put(cumulative, 0, 1), cumulative),
        _case("cumulative_negative", _put(cumulative, 0, -1), cumulative),
        _case("cumulative_decreases", _put(cumulative, 1, 6), cumulative),
        _case("cumulative_ends_early", _put(cumulative, -1, 7), cumulative),
        _case("cumulative_ends_late", _put(cumulative, -1, 9), cumulative),
        _case("past_negative", _put(past, 1, -1), past),
        _case("past_very_negative", _put(past, 0, -(2**31)), past),
        _case("past_beyond_table", _put(past, 0, 4000), "block_table", past),
        _case("past_overflows_int32", _put(past, 0, 2**31 - 1), "block_table", past),
        _case("past_of_empty_sequence_negative", _put(past, 0, -5), past, new=(0, 2), past=(3, 4)),
        _case("rotary_table_too_short", _reshape("cos_cache", lambda x: x[:5]), "cos_cache", "sin_cache", **_ROTARY),
        _case("rotary_tables_too_short", _short_rotary, "cos_cache", "sin_cache", **_ROTARY),
    ]


def _short_rotary(call: Call) -> None:
    for name in ("cos_cache", "sin_cache"):
        call.feeds[name] = np.ascontiguousarray(call.feeds[name][:11])  # the longest sequence has 12 positions


def _id_cases() -> list[Case]:
    def id_case(name: str, index: tuple[int, int], value: int | str, **setup: Any) -> Case:
        def spoil(call: Call) -> None:
            blocks = call.feeds["key_cache"].shape[0]
            call.feeds["block_table"][index] = blocks if value == "N" else value

        merged = {"new": (1, 3), "past": (30, 17), **setup}
        return _case(f"block_id_{name}", spoil, "block_table", bad_id=True, **merged)

    def slot_case(name: str, index: int, value: int | str) -> Case:
        def spoil(call: Call) -> None:
            slots = call.feeds["key_cache"].shape[0] * call.feeds["key_cache"].shape[1]
            call.feeds["slot_mapping"][index] = slots if value == "N*B" else value

        return _case(f"slot_{name}", spoil, "slot_mapping", bad_id=True, slots="explicit")

    return [
        id_case("n", (0, 1), "N"),
        id_case("n_in_last_block", (0, 3), "N"),
        id_case("minus_2", (1, 0), -2),
        id_case("int32_max", (0, 0), 2**31 - 1),
        id_case("int32_min", (1, 1), -(2**31)),
        id_case("n_slots_given", (0, 1), "N", slots="explicit"),
        id_case("minus_2_slots_none", (1, 0), -2, slots="none"),
        id_case("n_float16", (0, 1), "N", compute="float16"),
        id_case("n_in_window", (0, 3), "N", attributes={"local_window_size": 4}),
        slot_case("n_times_b", 2, "N*B"),
        slot_case("minus_2", 0, -2),
        slot_case("int32_max", 5, 2**31 - 1),
        slot_case("int32_min", 7, -(2**31)),
    ]
