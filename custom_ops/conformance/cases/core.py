"""Group core: element types, head sizes, head ratios, block sizes, context lengths, scale, packing."""

from __future__ import annotations

from .case import Case, case

__all__ = ["HEAD_SIZES", "cases"]

HEAD_SIZES = (1, 3, 8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 576)
_DTYPES = ("float32", "float16", "bfloat16")
_FLOAT_PAIRS = [(t, c) for t in _DTYPES for c in _DTYPES if t != c]


def cases() -> list[Case]:
    """The cases of this group."""
    out = []
    for dtype in _DTYPES:
        out += [
            case(f"core/decode_{dtype}", compute=dtype, new=(1, 1, 1), past=(7, 30, 2)),
            case(f"core/prefill_{dtype}", compute=dtype, new=(13, 5), past=(0, 0)),
            case(f"core/mixed_{dtype}", compute=dtype, new=(1, 9, 4), past=(12, 0, 11)),
            case(f"core/packed_qkv_{dtype}", compute=dtype, packed=True),
            case(f"core/scale_{dtype}", compute=dtype, attributes={"scale": 0.6}, gains=(1.0, 1.0, 1.0)),
            case(f"core/large_values_{dtype}", compute=dtype, gains=(1.0, 1.0, 1000.0)),
        ]
    out += [case(f"core/head_size_{d}_{t}", head_size=d, compute=t) for d in HEAD_SIZES for t in _DTYPES[:2]]
    for h, g in ((1, 1), (8, 8), (8, 1), (6, 2), (7, 7), (12, 4), (71, 1), (33, 11)):
        out.append(case(f"core/heads_{h}_{g}", query_heads=h, kv_heads=g, head_size=8))
    for size in (1 << i for i in range(10)):
        out.append(case(f"core/block_size_{size}", block_size=size, past=(2 * size, 0, 9), new=(1, 5, 3)))
        out.append(case(f"core/block_size_{size}_float16", block_size=size, compute="float16", past=(19, 0, 3)))
    for context in (0, 1, 15, 16, 17, 31, 32, 33):
        out.append(case(f"core/decode_context_{context}", block_size=16, new=(1,), past=(context,)))
        out.append(
            case(f"core/decode_context_{context}_float16", block_size=16, new=(1,), past=(context,), compute="float16")
        )
        if context:
            out.append(case(f"core/prefill_context_{context}", block_size=16, new=(context,), past=(0,)))
    out.append(case("core/decode_context_4097", block_size=16, new=(1, 1), past=(4097, 1023), head_size=64))
    out.append(case("core/decode_context_3000_float16", block_size=16, new=(1,), past=(3000,), compute="float16"))
    out.append(case("core/prefill_context_300", block_size=16, new=(300,), past=(40,), head_size=32))
    out += [case(f"core/cache_{c}_compute_{t}", compute=t, cache=c) for t, c in _FLOAT_PAIRS]
    out += [
        case("core/value_head_narrower", value_head_size=8),
        case("core/value_head_wider", value_head_size=40),
        case("core/value_head_packed", value_head_size=24, packed=True),
        case("core/value_head_float16", value_head_size=24, compute="float16"),
        *(case(f"core/zero_scale_{t}", compute=t, attributes={"scale": 0.0}) for t in _DTYPES),
        case("core/negative_scale", attributes={"scale": -0.2}),
        case("core/zero_query", gains=(0.0, 1.0, 1.0)),
        case("core/one_token", new=(1,), past=(0,)),
        case("core/sharp_softmax", gains=(40.0, 1.0, 1.0)),
    ]
    out += [case(f"core/metadata_{len(m)}_{m[0]}", metadata=m) for m in ((4, 12), (0, 0), (100, 4096, 0), (4, 12, 12))]
    return out
