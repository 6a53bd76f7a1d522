"""Group quantised: int8, fp8 and packed int4 caches with every granularity, saturation, zero rows, odd sizes."""

from __future__ import annotations

from .case import Case, case

__all__ = ["cases"]

_COMPUTE = ("float32", "float16", "bfloat16")


def cases() -> list[Case]:
    """The cases of this group."""
    out = []
    for cache in ("int8", "float8e4m3fn", "int4"):
        for quant in ("PER_TENSOR", "PER_CHANNEL"):
            for t in _COMPUTE:
                out.append(
                    case(
                        f"quantised/{cache}_{quant}_{t}",
                        cache=cache,
                        k_quant=quant,
                        compute=t,
                        new=(1, 6, 3),
                        past=(20, 0, 9),
                    )
                )
        out += [
            case(f"quantised/{cache}_mixed_granularity", cache=cache, k_quant="PER_CHANNEL", v_quant="PER_TENSOR"),
            case(
                f"quantised/{cache}_mixed_granularity_swapped", cache=cache, k_quant="PER_TENSOR", v_quant="PER_CHANNEL"
            ),
            case(f"quantised/{cache}_saturates", cache=cache, k_quant="PER_CHANNEL", scale_gain=0.2),
            case(f"quantised/{cache}_coarse", cache=cache, k_quant="PER_TENSOR", scale_gain=8.0),
            case(f"quantised/{cache}_packed_qkv", cache=cache, k_quant="PER_CHANNEL", packed=True),
            case(
                f"quantised/{cache}_window_sink",
                cache=cache,
                k_quant="PER_TENSOR",
                sink=True,
                attributes={"local_window_size": 5},
            ),
            case(f"quantised/{cache}_rotary_norm", cache=cache, k_quant="PER_CHANNEL", rotary_dim=16, norm=True),
            case(
                f"quantised/{cache}_rotary_float16", cache=cache, k_quant="PER_TENSOR", rotary_dim=16, compute="float16"
            ),
            case(f"quantised/{cache}_slots_none", cache=cache, k_quant="PER_CHANNEL", slots="none", past=(5, 3, 9)),
            case(f"quantised/{cache}_value_head", cache=cache, k_quant="PER_CHANNEL", value_head_size=24),
            case(
                f"quantised/{cache}_long",
                cache=cache,
                k_quant="PER_CHANNEL",
                new=(1, 1),
                past=(900, 65),
                head_size=64,
                block_size=16,
            ),
        ]
        for d in (1, 3, 40, 80, 128, 256):
            out.append(case(f"quantised/{cache}_head_size_{d}", cache=cache, k_quant="PER_CHANNEL", head_size=d))
        for b in (1, 16, 128, 512):
            out.append(
                case(
                    f"quantised/{cache}_block_{b}", cache=cache, k_quant="PER_TENSOR", block_size=b, past=(b + 3, 0, 9)
                )
            )
    for t in _COMPUTE:
        out.append(
            case(
                f"quantised/int8_PER_TOKEN_{t}",
                cache="int8",
                k_quant="PER_TOKEN",
                compute=t,
                new=(1, 6, 3),
                past=(20, 0, 9),
            )
        )
    out += [
        case("quantised/int8_PER_TOKEN_zero_rows", cache="int8", k_quant="PER_TOKEN", gains=(2.0, 0.0, 0.0)),
        case("quantised/int8_PER_TOKEN_dead_nan", cache="int8", k_quant="PER_TOKEN", dead="nan"),
        case("quantised/int8_PER_TOKEN_key_only", cache="int8", k_quant="PER_TOKEN", v_quant="PER_CHANNEL"),
        case("quantised/int8_PER_TOKEN_value_only", cache="int8", k_quant="PER_TENSOR", v_quant="PER_TOKEN"),
        case("quantised/int8_PER_TOKEN_slots_none", cache="int8", k_quant="PER_TOKEN", slots="none", past=(5, 3, 9)),
        case("quantised/int8_PER_TOKEN_rotary", cache="int8", k_quant="PER_TOKEN", rotary_dim=16, norm=True),
        case(
            "quantised/int8_PER_TOKEN_head_size_80", cache="int8", k_quant="PER_TOKEN", head_size=80, value_head_size=64
        ),
        case("quantised/int8_PER_TOKEN_window", cache="int8", k_quant="PER_TOKEN", attributes={"local_window_size": 4}),
        case("quantised/int8_PER_TOKEN_block_64", cache="int8", k_quant="PER_TOKEN", block_size=64, past=(130, 0, 9)),
        case(
            "quantised/int8_huge_scale_float16", cache="int8", k_quant="PER_TENSOR", scale_gain=3e4, compute="float16"
        ),
        case("quantised/int8_zero_scale", cache="int8", k_quant="PER_TENSOR", scale_gain=0.0),
        case("quantised/float8e4m3fn_dead_nan", cache="float8e4m3fn", k_quant="PER_TENSOR", dead="nan"),
        case(
            "quantised/float8e4m3fn_beyond_448",
            cache="float8e4m3fn",
            k_quant="PER_TENSOR",
            scale_gain=0.05,
            gains=(0.5, 1.0, 1.0),
        ),
        case(
            "quantised/int4_odd_head_packed",
            cache="int4",
            k_quant="PER_CHANNEL",
            head_size=5,
            value_head_size=7,
            packed=True,
        ),
        case("quantised/int4_odd_head_rotary", cache="int4", k_quant="PER_TENSOR", head_size=13, rotary_dim=12),
    ]
    return out
