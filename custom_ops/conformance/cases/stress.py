"""Group stress: overflow traps, large batches, invariance under chunking and batching, far block ids."""

from __future__ import annotations

from typing import Any

from .case import Case, case

__all__ = ["cases"]

_SOFTCAP_ALIBI: dict[str, Any] = {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625), "softcap": 2.0}
_FAR: dict[str, Any] = {"kind": "far", "block_size": 512, "new": (1, 3), "past": (513, 0)}


def cases() -> list[Case]:
    """The cases of this group."""
    out = [*_overflow_traps(), *_large_batches()]
    chunked: dict[str, dict[str, Any]] = {
        "plain": {}, "float16": {"compute": "float16"}, "window": {"attributes": {"local_window_size": 5}},
        "rotary_norm": {"rotary_dim": 16, "norm": True}, "int8_per_token": {"cache": "int8", "k_quant": "PER_TOKEN"},
        "alibi_softcap_sink": {"attributes": _SOFTCAP_ALIBI, "sink": True},
    }  # fmt: skip
    for name, setup in chunked.items():
        out.append(case(f"stress/chunks_{name}", kind="chunks", new=(21,), past=(0,), block_size=4, **setup))
        out.append(case(f"stress/chunks_on_past_{name}", kind="chunks", new=(9,), past=(13,), block_size=4, **setup))
    batched: dict[str, dict[str, Any]] = {
        "float32": {}, "float16": {"compute": "float16"}, "bfloat16": {"compute": "bfloat16"},
        "int8": {"cache": "int8", "k_quant": "PER_CHANNEL"}, "window": {"attributes": {"local_window_size": 6}},
        "everything": {"rotary_dim": 16, "norm": True, "sink": True, "attributes": _SOFTCAP_ALIBI},
    }  # fmt: skip
    for name, setup in batched.items():
        out.append(case(f"stress/batch_{name}", kind="batch", new=(1, 17, 1, 6), past=(300, 0, 9, 40), **setup))
    out.append(
        case(
            "stress/batch_long_context",
            kind="batch",
            new=(1, 1, 33),
            past=(2100, 700, 512),
            block_size=16,
            head_size=64,
        )
    )
    return [*out, *_far_ids()]


def _overflow_traps() -> list[Case]:
    f16: dict[str, Any] = {"compute": "float16"}
    flat: dict[str, Any] = {"gains": (0.0, 1.0, 1.0), "block_size": 64}
    steep: dict[str, Any] = {"new": (1, 3), "past": (700, 300), "gains": (0.5, 1.0, 1.0)}
    slopes = (1.0, 0.5, 0.1, 2.0)
    return [
        # q.k far beyond 65504 before scaling; the scaled score is small.
        case("stress/float16_score_overflow", head_size=256, gains=(60, 60, 1), attributes={"scale": 3e-5}, **f16),
        case("stress/float16_score_overflow_512", head_size=512, gains=(40, 40, 1), attributes={"scale": 5e-5}, **f16),
        # A sum of unnormalised values overflows 65504, their mean does not.
        case("stress/float16_value_overflow", new=(1,), past=(200,), gains=(0.1, 1.0, 1.2e4), **f16),
        # A denominator beyond 2048 cannot count in steps of 1 in float16.
        case("stress/float16_long_flat_softmax", new=(1,), past=(5000,), **flat, **f16),
        case("stress/bfloat16_long_flat_softmax", new=(1,), past=(3000,), compute="bfloat16", **flat),
        case("stress/float16_norm_overflow", norm=True, gains=(300, 300, 1), **f16),
        # Scores fall or rise steadily along the keys: each tile needs its own rescaling.
        case("stress/rising_maximum", attributes={"alibi_slopes": slopes}, **steep),
        case("stress/falling_maximum", attributes={"alibi_slopes": tuple(-x for x in slopes)}, **steep),
        case("stress/extreme_scores", gains=(3e3, 1e2, 1.0), new=(1, 5), past=(60, 7)),
    ]


def _large_batches() -> list[Case]:
    many: dict[str, Any] = {"new": (1,) * 257, "past": tuple((7 * i) % 40 for i in range(257)), "head_size": 8}
    ragged: dict[str, Any] = {
        "new": tuple((i * i) % 7 for i in range(64)),
        "past": tuple((11 * i) % 50 for i in range(64)),
    }
    return [
        case("stress/257_sequences", **many),
        case("stress/257_sequences_float16", compute="float16", **many),
        case("stress/64_ragged_sequences", head_size=8, **ragged),
        case("stress/one_long_among_short", new=(1,) * 6, past=(3, 2500, 0, 17, 1, 90), head_size=32, block_size=16),
        case("stress/wide_model", query_heads=32, kv_heads=8, head_size=128, new=(1, 4), past=(130, 60), block_size=32),
    ]


def _far_ids() -> list[Case]:
    # A block of 512 slots, 8 heads and 128 channels has 2^19 elements: ids from 4096 pass 2^31 elements, and 2^32 bytes
    # of float16; ids from 2048 pass 2^31 bytes of float16, 2^32 of float32; ids from 8192 pass 2^32 bytes of int8.
    heads: dict[str, Any] = {"query_heads": 8, "kv_heads": 8, "head_size": 128}
    latent: dict[str, Any] = {"kv_heads": 1, "head_size": 576, "latent_value_size": 512, "attributes": {"scale": 0.05}}
    return [
        case("stress/far_float16", compute="float16", id_offset=4095, **heads, **_FAR),
        case("stress/far_float16_bytes", compute="float16", id_offset=2046, **heads, **_FAR),
        case("stress/far_float32", id_offset=2047, **heads, **_FAR),
        case("stress/far_int8", cache="int8", k_quant="PER_TENSOR", id_offset=8190, **heads, **_FAR),
        case("stress/far_latent", compute="float16", id_offset=7281, **latent, **_FAR),
    ]
