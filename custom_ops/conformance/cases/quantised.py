"""Group quantised: int8, fp8 and packed int4 caches with every granularity, saturation, zero rows, odd sizes."""

from __future__ import annotations

from typing import Any

from .case import Case, case

__all__ = ["cases"]

_COMPUTE = ("float32", "float16", "bfloat16")
_RAGGED: dict[str, Any] = {"new": (1, 6, 3), "past": (20, 0, 9)}


def cases() -> list[Case]:
    """The cases of this group."""
    static = [c for cache in ("int8", "float8e4m3fn", "int4") for c in _static_scales(cache)]
    return [*static, *_token_scales(), *_single_types()]


def _static_scales(cache: str) -> list[Case]:
    """What every quantised type has: scales of the whole cache or of each head and channel."""

    def of(name: str, quant: str, **setup: Any) -> Case:
        return case(f"quantised/{cache}_{name}", cache=cache, k_quant=quant, **setup)

    tensor, channel = "PER_TENSOR", "PER_CHANNEL"
    return [
        *(of(f"{quant}_{t}", quant, compute=t, **_RAGGED) for quant in (tensor, channel) for t in _COMPUTE),
        of("mixed_granularity", channel, v_quant=tensor),
        of("mixed_granularity_swapped", tensor, v_quant=channel),
        of("saturates", channel, scale_gain=0.2),
        of("coarse", tensor, scale_gain=8.0),
        of("packed_qkv", channel, packed=True),
        of("window_sink", tensor, sink=True, attributes={"local_window_size": 5}),
        of("rotary_norm", channel, rotary_dim=16, norm=True),
        of("rotary_float16", tensor, rotary_dim=16, compute="float16"),
        of("slots_none", channel, slots="none", past=(5, 3, 9)),
        of("value_head", channel, value_head_size=24),
        of("long", channel, new=(1, 1), past=(900, 65), head_size=64, block_size=16),
        *(of(f"head_size_{d}", channel, head_size=d) for d in (1, 3, 40, 80, 128, 256)),
        *(of(f"block_{b}", tensor, block_size=b, past=(b + 3, 0, 9)) for b in (1, 16, 128, 512)),
    ]


def _token_scales() -> list[Case]:
    """int8 with a scale for each token and head, which the op computes as it writes."""

    def of(name: str, **setup: Any) -> Case:
        return case(f"quantised/int8_PER_TOKEN_{name}", cache="int8", **{"k_quant": "PER_TOKEN", **setup})

    return [
        *(of(t, compute=t, **_RAGGED) for t in _COMPUTE),
        of("zero_rows", gains=(2.0, 0.0, 0.0)),
        of("dead_nan", dead="nan"),
        of("key_only", v_quant="PER_CHANNEL"),
        of("value_only", k_quant="PER_TENSOR", v_quant="PER_TOKEN"),
        of("slots_none", slots="none", past=(5, 3, 9)),
        of("rotary", rotary_dim=16, norm=True),
        of("head_size_80", head_size=80, value_head_size=64),
        of("window", attributes={"local_window_size": 4}),
        of("block_64", block_size=64, past=(130, 0, 9)),
    ]


def _single_types() -> list[Case]:
    """What only one type can get wrong: extreme scales, NaN codes, nibbles of an odd head size."""
    int8: dict[str, Any] = {"cache": "int8", "k_quant": "PER_TENSOR"}
    float8: dict[str, Any] = {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR"}
    int4: dict[str, Any] = {"cache": "int4"}
    odd_heads: dict[str, Any] = {"head_size": 5, "value_head_size": 7, "packed": True}
    return [
        case("quantised/int8_huge_scale_float16", **int8, scale_gain=3e4, compute="float16"),
        case("quantised/int8_zero_scale", **int8, scale_gain=0.0),
        case("quantised/float8e4m3fn_dead_nan", **float8, dead="nan"),
        case("quantised/float8e4m3fn_beyond_448", **float8, scale_gain=0.05, gains=(0.5, 1.0, 1.0)),
        case("quantised/int4_odd_head_packed", **int4, k_quant="PER_CHANNEL", **odd_heads),
        case("quantised/int4_odd_head_rotary", **int4, k_quant="PER_TENSOR", head_size=13, rotary_dim=12),
    ]
