"""numpy arrays for the caches of a converted model: element types, sizes, and poison to start with."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from .evaluate import Array

__all__ = ["poisoned_caches", "storage_type"]


def storage_type(cache_dtype: str) -> np.dtype[np.generic]:
    """The numpy type that stores a logical cache type of the contract (packed int4 in uint8)."""
    return np.dtype(spec.CACHE_DTYPES[cache_dtype].replace("float8", "float8_"))


def poisoned_caches(manifest: names.Manifest, num_blocks: int, block_size: int) -> dict[str, Array]:
    """Every cache input by name, full of what must never be read: NaN, or the largest code under a NaN scale."""
    arrays: dict[str, Array] = {}
    for index, layer in enumerate(manifest.layers):
        parts = [("key", layer.key_head_size, layer.key_dtype), ("value", layer.value_head_size, layer.value_dtype)]
        for part, size, dtype in parts:
            if size is None or dtype is None:
                continue
            shape = (num_blocks, block_size, layer.kv_heads, spec.cache_head_width(size, dtype))
            arrays[names.cache_name(index, part)] = _poison(shape, dtype)
            if layer.quant == "PER_TOKEN":
                scales = np.full((num_blocks, layer.kv_heads, block_size), np.nan, np.float32)
                arrays[names.cache_name(index, f"{part}_scale")] = scales
    return arrays


def _poison(shape: tuple[int, ...], dtype: str) -> Array:
    stored = storage_type(dtype)
    fill = {"int8": -128, "int4": 0xFF}.get(dtype, np.nan)
    return np.full(shape, fill, stored)
