"""Group rotary: both pairings, partial and offset rotation, norms of query and key, positions from past lengths."""

from __future__ import annotations

from .case import Case, case

__all__ = ["cases"]

_INTERLEAVED = {"rotary_interleaved": 1}


def cases() -> list[Case]:
    """The cases of this group."""
    out = []
    for t in ("float32", "float16", "bfloat16"):
        out += [
            case(f"rotary/halves_{t}", rotary_dim=16, compute=t),
            case(f"rotary/interleaved_{t}", rotary_dim=16, compute=t, attributes=_INTERLEAVED),
            case(f"rotary/norm_{t}", norm=True, compute=t),
            case(f"rotary/norm_then_rotary_{t}", norm=True, rotary_dim=16, compute=t),
        ]
    for dim in (2, 6, 8, 12):
        out.append(case(f"rotary/partial_{dim}", rotary_dim=dim))
        out.append(case(f"rotary/partial_{dim}_interleaved", rotary_dim=dim, attributes=_INTERLEAVED))
    for offset, dim, size in ((8, 8, 16), (8, 8, 32), (16, 64, 80), (64, 32, 96), (8, 6, 24)):
        attributes = {"rotary_offset": offset}
        out.append(case(f"rotary/offset_{offset}_{dim}_{size}", rotary_dim=dim, head_size=size, attributes=attributes))
    out += [
        case("rotary/offset_interleaved", rotary_dim=8, head_size=32, attributes={"rotary_offset": 16, **_INTERLEAVED}),
        case("rotary/packed_qkv", rotary_dim=16, packed=True),
        case("rotary/packed_qkv_norm_float16", rotary_dim=16, packed=True, norm=True, compute="float16"),
        case("rotary/far_positions", rotary_dim=16, new=(1, 3), past=(2000, 1023), block_size=64),
        case("rotary/norm_epsilon", norm=True, attributes={"qk_norm_epsilon": 0.5}),
        case("rotary/norm_small_values", norm=True, gains=(1e-4, 1e-4, 1.0), attributes={"qk_norm_epsilon": 1e-6}),
        case("rotary/slots_none", rotary_dim=16, slots="none", past=(5, 3, 9)),
        case("rotary/cache_float16", rotary_dim=16, cache="float16"),
        case("rotary/head_size_80_partial_32", rotary_dim=32, head_size=80),
        case("rotary/value_head", rotary_dim=16, value_head_size=24),
        case("rotary/empty_sequences", rotary_dim=16, new=(0, 3, 0, 1), past=(7, 2, 0, 9)),
    ]
    return out
