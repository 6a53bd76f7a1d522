"""Runs the Ascend kernel on emulated vector cores: numpy arrays in, numpy arrays and counters out."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import PagegraftError
from ..spec import AttentionAttributes
from ..validation import Array, Feeds, Geometry, geometry_of
from .build import build_library

__all__ = [
    "Counters",
    "Device",
    "DeviceRuleError",
    "NotClaimedError",
    "Tiling",
    "paged_attention",
    "tiling_bytes_of",
    "tiling_of",
]

_TENSORS: Final = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale",
    "attention_metadata", "output",
)  # fmt: skip
_TYPES: Final = ("float16", "bfloat16", "float32")
#: `kAbsentScale` of op_kernel/paged_attention_tiling_data.h.
_ABSENT_SCALE: Final = 3e38
_QUANT: Final = {"NONE": 0, "PER_TENSOR": 1, "PER_CHANNEL": 2, "PER_TOKEN": 3}


class NotClaimedError(PagegraftError, ValueError):
    """The kernel's tiling refuses this problem; the message says why and what to do."""


class DeviceRuleError(PagegraftError, RuntimeError):
    """The kernel broke a rule of the device. `check` is the rule's name."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


@dataclass(frozen=True, kw_only=True)
class Device:
    """The emulated device. `min_split_tokens`: KV positions below which a context is not cut further. `cube`: run the
    mixed kernel, on one cube core for every two vector cores, instead of the vector kernel."""

    vector_cores: int = 4
    ub_bytes: int = 192 * 1024
    min_split_tokens: int = 256
    cube: bool = False


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a run moved and executed, summed over cores (bytes, 256-byte vector steps, instructions)."""

    cores: int
    gm_to_ub_bytes: int
    ub_to_gm_bytes: int
    vector_repeats: int
    vector_instructions: int
    copy_instructions: int
    scalar_gm_reads: int
    scalar_ub_accesses: int
    barriers: int
    workspace_bytes: int
    ub_used_bytes: int
    busiest_core_repeats: int
    ub_peak_bytes: int
    cube_products: int


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What the host tells the kernel, as far as tests look at it. `refusal` empty: the kernel runs the problem."""

    refusal: str
    workspace_bytes: int
    ub_used_bytes: int
    cores: int


_PROBLEM_FIELDS: Final = (
    "numTokens", "numSeqs", "numBlocks", "blockSize", "tableWidth", "numHeads", "kvHeads", "headSize", "vHeadSize",
    "packedQkv", "inputBytes", "cacheBytes", "hasSlotMapping", "hasSink", "keyQuant", "valueQuant", "isCausal",
    "windowSize", "doRotary", "hasQkNorm", "latent",
)  # fmt: skip


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _PROBLEM_FIELDS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("alibiCount", ctypes.c_int64),
        ("alibiSlopes", ctypes.POINTER(ctypes.c_float)),
    ]


class _Device(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("vectorCores", "ubBytes", "minSplitTokens")]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _Call(ctypes.Structure):
    _fields_ = [
        ("problem", _Problem),
        ("device", _Device),
        ("tensors", _Tensor * len(_TENSORS)),
        ("input_type", ctypes.c_int64),
        ("cube", ctypes.c_int64),
        ("mutant", ctypes.c_int64),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("check", ctypes.c_char * 64),
        ("text", ctypes.c_char * 640),
        *((name, ctypes.c_int64) for name in Counters.__dataclass_fields__),
    ]


@cache
def _default_library() -> Path:
    return build_library()


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.pg_tiling_bytes.restype = ctypes.c_int64
    return library


def paged_attention(
    feeds: Feeds,
    attributes: AttentionAttributes,
    device: Device | None = None,
    *,
    in_place: bool = False,
    library: Path | None = None,
    mutant: int = -1,
) -> tuple[dict[str, Array], Counters]:
    """One call of the op on emulated cores. The feeds are not modified, but for the caches when `in_place`.

    `library` replaces the default build and `mutant` picks a left-out synchronisation in an instrumented one (both for
    tests). Raises ContractError for malformed shapes, NotClaimedError, and DeviceRuleError when the kernel breaks a
    rule.
    """
    g = geometry_of(feeds, attributes)
    arrays = {name: np.ascontiguousarray(feeds[name]) for name in feeds}
    for name in ("key_cache", "value_cache"):
        if name in feeds and not in_place:
            arrays[name] = feeds[name].copy()
    arrays["output"] = np.full((g.tokens, g.query_heads * g.value_head_size), np.nan, feeds["query"].dtype)
    call = _call(arrays, attributes, g, device or Device())
    call.mutant = mutant
    for i, name in enumerate(_TENSORS):
        if name in arrays:
            call.tensors[i] = _Tensor(arrays[name].ctypes.data, arrays[name].nbytes)
    report = _Report()
    _load(library or _default_library()).pg_run(ctypes.byref(call), ctypes.byref(report))
    check = report.check.decode()
    if check == "refused":
        raise NotClaimedError(f"PagedAttention on Ascend: {report.text.decode()}")
    if check:
        raise DeviceRuleError(check, report.text.decode())
    outputs = {"output": arrays["output"]}
    outputs.update({f"{name}_out": arrays[name] for name in ("key_cache", "value_cache") if name in arrays})
    return outputs, Counters(**{name: getattr(report, name) for name in Counters.__dataclass_fields__})


def tiling_of(problem: Mapping[str, Any], device: Device | None = None) -> Tiling:
    """The tiling of a problem given by the fields of the C++ struct Problem (missing ones are 0)."""
    call = _Call(problem=_Problem(**problem), device=_device(device or Device()))
    report = _Report()
    library = _load(_default_library())
    data = ctypes.create_string_buffer(library.pg_tiling_bytes())
    library.pg_tiling(ctypes.byref(call), ctypes.byref(report), data)
    return Tiling(
        refusal=report.text.decode() if report.check else "",
        workspace_bytes=report.workspace_bytes,
        ub_used_bytes=report.ub_used_bytes,
        cores=report.cores,
    )


def tiling_bytes_of(feeds: Feeds, attributes: AttentionAttributes, device: Device | None = None) -> bytes:
    """The tiling struct of a call, byte for byte as the kernel gets it. Raises ContractError and NotClaimedError."""
    call = _call(feeds, attributes, geometry_of(feeds, attributes), device or Device())
    report = _Report()
    library = _load(_default_library())
    data = ctypes.create_string_buffer(library.pg_tiling_bytes())
    library.pg_tiling(ctypes.byref(call), ctypes.byref(report), data)
    if report.check:
        raise NotClaimedError(f"PagedAttention on Ascend: {report.text.decode()}")
    return data.raw


def _device(device: Device) -> _Device:
    return _Device(device.vector_cores, device.ub_bytes, device.min_split_tokens)


def _call(feeds: Feeds, a: AttentionAttributes, g: Geometry, device: Device) -> _Call:
    slopes = (ctypes.c_float * max(1, len(a.alibi_slopes)))(*a.alibi_slopes)
    problem = _Problem(
        numTokens=g.tokens,
        numSeqs=g.sequences,
        numBlocks=g.blocks,
        blockSize=g.block_size,
        tableWidth=g.table_width,
        numHeads=g.query_heads,
        kvHeads=g.kv_heads,
        headSize=g.head_size,
        vHeadSize=g.value_head_size,
        packedQkv="key" not in feeds,
        inputBytes=feeds["query"].itemsize,
        cacheBytes=feeds["key_cache"].itemsize if g.cache_dtype in (g.compute_dtype, "int8") else 0,
        hasSlotMapping="slot_mapping" in feeds,
        hasSink="head_sink" in feeds,
        keyQuant=_QUANT[a.k_quant_type],
        valueQuant=_QUANT[a.v_quant_type],
        isCausal=a.is_causal,
        windowSize=a.local_window_size,
        doRotary=a.do_rotary,
        hasQkNorm="q_norm_weight" in feeds,
        latent=a.latent,
        scale=_ABSENT_SCALE if a.scale is None else a.scale,
        softcap=a.softcap,
        alibiCount=len(a.alibi_slopes),
        alibiSlopes=ctypes.cast(slopes, ctypes.POINTER(ctypes.c_float)),
    )
    return _Call(
        problem=problem, device=_device(device), input_type=_TYPES.index(g.compute_dtype), cube=int(device.cube)
    )
