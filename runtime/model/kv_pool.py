"""The cache tensors: how large they are, how many blocks a budget buys, and the memory that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from ...custom_ops.manifest import CacheLayer, Manifest, cache_name
from ...custom_ops.spec import cache_head_width
from ..engine.cache_manager import GroupShape
from ..engine.errors import CacheMemoryError, ConfigurationError
from ..engine.plan import BlockCopy
from ..engine.positions import blocks_for, window_block_bound
from .memory import format_bytes
from .runner import KVGroup

__all__ = ["CacheTensor", "KVLayout", "KVPool", "bytes_per_block", "cache_tensors", "least_memory", "size_pools"]

#: Logical cache type -> (numpy type of the same width, ONNX element type).
_STORAGE: dict[str, tuple[type[Any], int]] = {
    "float32": (np.float32, TensorProto.FLOAT),
    "float16": (np.float16, TensorProto.FLOAT16),
    "bfloat16": (np.uint16, TensorProto.BFLOAT16),
    "int8": (np.int8, TensorProto.INT8),
    "float8e4m3fn": (np.uint8, TensorProto.FLOAT8E4M3FN),
    "int4": (np.uint8, TensorProto.UINT8),
}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One cache input: `block_shape` is what one block adds; its axis 0 is the block id."""

    layer: int
    part: str
    group: int
    block_shape: tuple[int, ...]
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return prod(self.block_shape) * np.dtype(_STORAGE[self.dtype][0]).itemsize


def cache_tensors(manifest: Manifest, block_size: int) -> list[CacheTensor]:
    """Every cache tensor of a model, in the order of its layers."""
    out = []
    for index, layer in enumerate(manifest.layers):
        parts = [_tensor(index, layer, "key", layer.key_head_size, layer.key_dtype, block_size)]
        if layer.value_head_size is not None and layer.value_dtype is not None:
            parts.append(_tensor(index, layer, "value", layer.value_head_size, layer.value_dtype, block_size))
        out += parts
        if layer.quant == "PER_TOKEN":
            shape = (layer.kv_heads, block_size)
            out += [CacheTensor(index, f"{t.part}_scale", layer.group, shape, "float32") for t in parts]
    return out


def _tensor(index: int, layer: CacheLayer, part: str, head_size: int, dtype: str, block_size: int) -> CacheTensor:
    shape = (block_size, layer.kv_heads, cache_head_width(head_size, dtype))
    return CacheTensor(index, part, layer.group, shape, dtype)


def bytes_per_block(manifest: Manifest, block_size: int) -> list[int]:
    """By group, bytes that one block takes over all of the group's layers."""
    sizes = [0] * len(manifest.groups)
    for tensor in cache_tensors(manifest, block_size):
        sizes[tensor.group] += tensor.block_bytes
    return sizes


def _least_blocks(manifest: Manifest, block_size: int, max_chunk: int) -> list[int]:
    """By group, blocks without which not even a short sequence runs."""
    return [1 if g.window is None else window_block_bound(g.window, max_chunk, block_size) for g in manifest.groups]


def least_memory(manifest: Manifest, block_size: int, max_chunk: int) -> int:
    """Bytes without which no sequence runs in chunks of `max_chunk` tokens."""
    sizes = bytes_per_block(manifest, block_size)
    return sum(n * size for n, size in zip(_least_blocks(manifest, block_size, max_chunk), sizes, strict=True))


def size_pools(
    manifest: Manifest, block_size: int, budget: int, *, max_sequences: int, max_chunk: int
) -> tuple[GroupShape, ...]:
    """Blocks by group within `budget` bytes: as many in each, but no more than `max_sequences` can ever hold.

    Raises ConfigurationError when the budget does not hold one sequence.
    """
    sizes = bytes_per_block(manifest, block_size)
    needs = _least_blocks(manifest, block_size, max_chunk)
    least = least_memory(manifest, block_size, max_chunk)
    if budget < least:
        raise ConfigurationError(
            f"{format_bytes(budget)} of KV memory hold no sequence: this model needs at least {format_bytes(least)} "
            f"for one ({block_size} tokens a block); give more --kv-memory"
        )
    limits = []
    for group, need in zip(manifest.groups, needs, strict=True):
        if group.window is None:
            context = manifest.max_positions
            limits.append(max_sequences * blocks_for(context, block_size) if context else None)
        else:
            limits.append(max_sequences * need)
    counts = list(needs)
    open_groups = set(range(len(counts)))
    left = budget - least
    while open_groups:
        step = left // sum(sizes[g] for g in open_groups)
        for g in open_groups:
            limit = limits[g]
            if limit is not None:
                step = min(step, limit - counts[g])
        for g in open_groups:
            counts[g] += step
            left -= step * sizes[g]
        full = {g for g in open_groups if counts[g] == limits[g]}
        if not full:
            break
        open_groups -= full
    return tuple(GroupShape(g.window, count) for g, count in zip(manifest.groups, counts, strict=True))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the pool's memory."""

    tensor: CacheTensor
    offset: int
    shape: tuple[int, ...]


class KVLayout:
    """Where every cache tensor of a model lies in one stretch of `num_bytes` bytes."""

    def __init__(self, manifest: Manifest, groups: Sequence[KVGroup]) -> None:
        self.num_groups = len(groups)
        self.places: list[_Place] = []
        self.num_bytes = 0
        for tensor in cache_tensors(manifest, groups[0].block_size):
            blocks = groups[tensor.group].num_blocks
            self.places.append(_Place(tensor, self.num_bytes, (blocks, *tensor.block_shape)))
            self.num_bytes += _padded(tensor.block_bytes * blocks)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Offset, shape and numpy type by input name, for those who read the memory from outside."""
        return {
            cache_name(place.tensor.layer, place.tensor.part): {
                "offset": place.offset,
                "shape": list(place.shape),
                "dtype": np.dtype(_STORAGE[place.tensor.dtype][0]).str,
                "cache_dtype": place.tensor.dtype,
            }
            for place in self.places
        }


class KVPool:
    """The memory of all cache tensors; pages that no block ever used are never touched.

    `buffer` is the flat uint8 array to put them into (shared memory, for example); by default it is private.
    """

    def __init__(self, layout: KVLayout, *, buffer: NDArray[np.uint8] | None = None) -> None:
        if buffer is None:
            buffer = _aligned(layout.num_bytes)
        self.num_bytes = layout.num_bytes
        self.values: dict[str, tuple[str, onnxruntime.OrtValue]] = {}
        self._arrays: list[list[NDArray[Any]]] = [[] for _ in range(layout.num_groups)]
        for place in layout.places:
            tensor = place.tensor
            numpy_type, onnx_type = _STORAGE[tensor.dtype]
            length = prod(place.shape) * np.dtype(numpy_type).itemsize
            array = buffer[place.offset : place.offset + length].view(numpy_type).reshape(place.shape)
            self._arrays[tensor.group].append(array)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, onnx_type)
            name = cache_name(tensor.layer, tensor.part)
            self.values[name] = (cache_name(tensor.layer, tensor.part, present=True), value)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in order, in every tensor of their group."""
        for copy in copies:
            for array in self._arrays[copy.group]:
                array[copy.target] = array[copy.source]


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _aligned(length: int) -> NDArray[np.uint8]:
    try:
        raw = np.empty(length + _ALIGNMENT, np.uint8)
    except MemoryError:
        raise CacheMemoryError(
            f"{format_bytes(length)} of caches cannot be allocated: give less --kv-memory or fewer blocks"
        ) from None
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + length]
