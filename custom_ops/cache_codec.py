"""How a cache stores values: plain floats, int8, fp8 e4m3fn, or int4 packed two a byte.

Element 2i of a packed int4 vector lies in the low nibble of byte i, as q + 8; an odd head size leaves the last high
nibble without meaning.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from .validation import Array

__all__ = ["decode", "encode"]

FP8_MAX: Final = 448.0


def encode(x: Array, scale: Any, cache_dtype: str) -> Array:
    """Float64 values [..., D] as a cache stores them [..., W(D)]. A zero scale stores zero codes."""
    with np.errstate(all="ignore"):
        if cache_dtype in ("float32", "float16", "bfloat16"):
            return x.astype(ml_dtypes.bfloat16 if cache_dtype == "bfloat16" else cache_dtype)
        codes = np.where(np.broadcast_to(scale, x.shape) == 0, 0.0, x / scale)
        if cache_dtype == "float8e4m3fn":
            return np.clip(codes, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
        if cache_dtype == "int8":
            return np.clip(np.rint(codes), -128, 127).astype(np.int8)
    nibbles = np.clip(np.rint(codes), -8, 7).astype(np.int64) + 8
    padding = [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)]
    nibbles = np.pad(nibbles, padding, constant_values=8)
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).astype(np.uint8)


def decode(stored: Array, scale: Any, cache_dtype: str, head_size: int) -> Array:
    """Float64 values [..., D] of stored cache entries [..., W(D)]."""
    if cache_dtype != "int4":
        codes = stored.astype(np.float64)
    else:
        nibbles = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])
        codes = nibbles[..., :head_size].astype(np.float64) - 8.0
    values: Array = codes * scale
    return values
