"""Group latent: one cache whose rows are keys and, in their leading channels, values (absorbed latent attention)."""

from __future__ import annotations

from typing import Any

from .case import Case, case

__all__ = ["cases"]


def _latent(
    id: str, *, attributes: dict[str, Any] | None = None, size: int = 24, value: int = 16, **setup: Any
) -> Case:
    merged = {"scale": 0.25, **(attributes or {})}
    return case(f"latent/{id}", kv_heads=1, head_size=size, latent_value_size=value, attributes=merged, **setup)


def cases() -> list[Case]:
    """The cases of this group."""
    out = [_latent(t, compute=t) for t in ("float32", "float16", "bfloat16")]
    out += [
        _latent("decode", new=(1, 1), past=(50, 9)),
        _latent("prefill", new=(20,), past=(0,)),
        _latent("value_as_wide_as_key", size=24, value=24),
        _latent("576_512", size=576, value=512, query_heads=8, new=(1, 2), past=(40, 3), block_size=16),
        _latent("576_512_float16", size=576, value=512, query_heads=8, compute="float16", new=(1, 2), past=(40, 3)),
        _latent("rotary_suffix", rotary_dim=8, attributes={"rotary_offset": 16}),
        _latent("rotary_suffix_interleaved", rotary_dim=8, attributes={"rotary_offset": 16, "rotary_interleaved": 1}),
        _latent("window", attributes={"local_window_size": 5}),
        _latent("softcap_sink", attributes={"softcap": 2.0}, sink=True),
        _latent("dead_nan", dead="nan"),
        _latent("slots_none", slots="none", past=(5, 3, 9)),
        _latent("unmapped", unmapped=((0, 1),), new=(1, 3), past=(30, 17)),
        _latent("bidirectional", attributes={"is_causal": 0}),
        _latent("cache_float16", cache="float16"),
        _latent("int8_PER_TENSOR", cache="int8", k_quant="PER_TENSOR"),
        _latent("int8_PER_CHANNEL_float16", cache="int8", k_quant="PER_CHANNEL", compute="float16"),
        _latent("int8_PER_TOKEN", cache="int8", k_quant="PER_TOKEN"),
        _latent("float8e4m3fn", cache="float8e4m3fn", k_quant="PER_TENSOR"),
        _latent("int4", cache="int4", k_quant="PER_CHANNEL"),
        _latent("norm", norm=True),
        _latent("one_head", query_heads=1),
    ]
    return out
