"""The PagedAttention contract, defined once.

The graph pass builds nodes through this module, the runtime fills feeds by it, the reference validates by it, the
conformance cases are drawn from it, and the C++ header and the tables of the documentation are generated from it
(`python -m pagegraft.custom_ops.generate`).

Shape letters: T packed new tokens of a step, S sequences in it, N blocks in the pool, B block size, M block-table
width, H query heads, G key/value heads, D key head size, Dv value head size, R rotary table rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from math import isfinite
from typing import Any, Final

from .errors import ContractError

__all__ = [
    "ATTRIBUTES",
    "CACHE_DTYPES",
    "INPUTS",
    "MAX_BLOCK_SIZE",
    "MICROSOFT_DOMAIN",
    "OP_TYPE",
    "OP_VERSION",
    "OUTPUTS",
    "PAGEGRAFT_DOMAIN",
    "UNMAPPED",
    "AttentionAttributes",
    "AttributeSpec",
    "In",
    "Out",
    "ParameterSpec",
    "cache_head_width",
    "needs_pagegraft_domain",
    "ordered_inputs",
]

OP_TYPE: Final = "PagedAttention"
OP_VERSION: Final = 1
MICROSOFT_DOMAIN: Final = "com.microsoft"
PAGEGRAFT_DOMAIN: Final = "pagegraft"

#: In a block table: no block here, its positions are masked out. In a slot mapping: do not write this token.
UNMAPPED: Final = -1
#: Block sizes are powers of two up to this; a backend declares which of them it runs.
MAX_BLOCK_SIZE: Final = 512


class In(IntEnum):
    """Input indices, the same in both domains. 17 and 18 stay empty (upstream has plans for them)."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    KEY_CACHE = 3
    VALUE_CACHE = 4
    CUMULATIVE_SEQUENCE_LENGTH = 5
    PAST_SEQLENS = 6
    BLOCK_TABLE = 7
    COS_CACHE = 8
    SIN_CACHE = 9
    SLOT_MAPPING = 10
    HEAD_SINK = 11
    Q_NORM_WEIGHT = 12
    K_NORM_WEIGHT = 13
    K_SCALE = 14
    V_SCALE = 15
    ATTENTION_METADATA = 16


class Out(IntEnum):
    """Output indices. 3 stays empty; 4 and 5 exist only in our domain, for PER_TOKEN caches."""

    OUTPUT = 0
    KEY_CACHE_OUT = 1
    VALUE_CACHE_OUT = 2
    K_SCALE_OUT = 4
    V_SCALE_OUT = 5


@dataclass(frozen=True)
class ParameterSpec:
    """One input or output: its name, types per domain, shape in the module's letters, and meaning."""

    name: str
    index: int
    microsoft_types: tuple[str, ...]
    pagegraft_types: tuple[str, ...]
    shape: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class AttributeSpec:
    """One node attribute. `kind` is an ONNX attribute type name; `default` None with `required` False means derived."""

    name: str
    kind: str
    default: Any
    doc: str
    required: bool = False
    pagegraft_only: bool = False


#: Logical cache types and the ONNX element type that stores each.
CACHE_DTYPES: Final[Mapping[str, str]] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "float8e4m3fn": "float8e4m3fn",
    "int4": "uint8",
}
QUANTISED_CACHE_DTYPES: Final = ("int8", "float8e4m3fn", "int4")
QUANT_TYPES: Final = ("NONE", "PER_TENSOR", "PER_CHANNEL", "PER_TOKEN")

_T_MS = ("float16", "bfloat16")
_T = ("float16", "bfloat16", "float32")
_C_MS = ("float16", "bfloat16", "int8", "float8e4m3fn", "uint8")
_C = (*_C_MS, "float32")
_I = ("int32",)
_F = ("float32",)

INPUTS: Final[tuple[ParameterSpec, ...]] = (
    ParameterSpec(
        "query",
        In.QUERY,
        _T_MS,
        _T,
        "[T, H*D]",
        "Packed queries, or packed QKV `[T, H*D + G*D + G*Dv]` when key and value are absent.",
    ),
    ParameterSpec("key", In.KEY, _T_MS, _T, "[T, G*D]", "Packed new keys.", True),
    ParameterSpec("value", In.VALUE, _T_MS, _T, "[T, G*Dv]", "Packed new values; absent when LATENT.", True),
    ParameterSpec(
        "key_cache",
        In.KEY_CACHE,
        _C_MS,
        _C,
        "[N, B, G, W(D)]",
        "Updated in place. W(x) is x, or (x+1)/2 bytes for packed int4. When LATENT the only cache.",
    ),
    ParameterSpec(
        "value_cache",
        In.VALUE_CACHE,
        _C_MS,
        _C,
        "[N, B, G, W(Dv)]",
        "Updated in place. Dv differs from D only in domain pagegraft. Absent when LATENT.",
        True,
    ),
    ParameterSpec(
        "cumulative_sequence_length",
        In.CUMULATIVE_SEQUENCE_LENGTH,
        _I,
        _I,
        "[S+1]",
        "Starts at 0, never decreases, ends at T; sequence s owns packed rows [c[s], c[s+1]).",
    ),
    ParameterSpec("past_seqlens", In.PAST_SEQLENS, _I, _I, "[S]", "Tokens of each sequence already cached, >= 0."),
    ParameterSpec(
        "block_table",
        In.BLOCK_TABLE,
        _I,
        _I,
        "[S, M]",
        "Logical block to block id. -1 in the visible range is an unmapped block (masked out); what lies outside "
        "the visible range is ignored.",
    ),
    ParameterSpec("cos_cache", In.COS_CACHE, _T_MS, _T, "[R, rotary_dim/2]", "Needed when do_rotary=1.", True),
    ParameterSpec("sin_cache", In.SIN_CACHE, _T_MS, _T, "[R, rotary_dim/2]", "Needed when do_rotary=1.", True),
    ParameterSpec(
        "slot_mapping",
        In.SLOT_MAPPING,
        _I,
        _I,
        "[T]",
        "Where each new token's key and value are written: block_id * B + offset, or -1 for not at all. "
        "Absent: derived from past_seqlens and block_table.",
        True,
    ),
    ParameterSpec(
        "head_sink",
        In.HEAD_SINK,
        _T_MS,
        _T,
        "[H]",
        "One more logit in each head's softmax denominator; neither scaled nor capped, adds no value.",
        True,
    ),
    ParameterSpec("q_norm_weight", In.Q_NORM_WEIGHT, _T_MS, _T, "[D]", "RMSNorm gain of each query head.", True),
    ParameterSpec("k_norm_weight", In.K_NORM_WEIGHT, _T_MS, _T, "[D]", "RMSNorm gain of each key head.", True),
    ParameterSpec(
        "k_scale",
        In.K_SCALE,
        _F,
        _F,
        "[1] | [G, 1, D] | [N, G, B]",
        "PER_TENSOR, PER_CHANNEL, or PER_TOKEN (written in place, domain pagegraft only).",
        True,
    ),
    ParameterSpec(
        "v_scale",
        In.V_SCALE,
        _F,
        _F,
        "[1] | [G, 1, Dv] | [N, G, B]",
        "As k_scale, for the value cache.",
        True,
    ),
    ParameterSpec(
        "attention_metadata",
        In.ATTENTION_METADATA,
        _I,
        _I,
        "[2] | [3]",
        "Bounds on the lengths; a hint that never changes the result.",
        True,
    ),
)

OUTPUTS: Final[tuple[ParameterSpec, ...]] = (
    ParameterSpec("output", Out.OUTPUT, _T_MS, _T, "[T, H*Dv]", "Attention output of the packed tokens."),
    ParameterSpec("key_cache_out", Out.KEY_CACHE_OUT, _C_MS, _C, "as key_cache", "Aliases key_cache.", True),
    ParameterSpec("value_cache_out", Out.VALUE_CACHE_OUT, _C_MS, _C, "as value_cache", "Aliases value_cache.", True),
    ParameterSpec("k_scale_out", Out.K_SCALE_OUT, (), _F, "as k_scale", "Aliases k_scale (PER_TOKEN only).", True),
    ParameterSpec("v_scale_out", Out.V_SCALE_OUT, (), _F, "as v_scale", "Aliases v_scale (PER_TOKEN only).", True),
)

ATTRIBUTES: Final[tuple[AttributeSpec, ...]] = (
    AttributeSpec("num_heads", "INT", None, "Query heads H, at least 1.", required=True),
    AttributeSpec(
        "kv_num_heads", "INT", None, "Key/value heads G, at least 1; divides H. 1 when LATENT.", required=True
    ),
    AttributeSpec(
        "scale", "FLOAT", None, "Factor on q.k, finite; default 1/sqrt(D). Required when v_head_size is given."
    ),
    AttributeSpec("softcap", "FLOAT", 0.0, "cap * tanh(score / cap) when > 0; not negative."),
    AttributeSpec("local_window_size", "INT", -1, "W, at least 1: position p sees (p - W, p]; -1 for all."),
    AttributeSpec("is_causal", "INT", 1, "0: new tokens of a sequence see each other both ways."),
    AttributeSpec("do_rotary", "INT", 0, "1: rotate q and k by cos_cache/sin_cache at their absolute position."),
    AttributeSpec("rotary_interleaved", "INT", 0, "1: pairs (2i, 2i+1); 0: pairs (i, i + rotary_dim/2)."),
    AttributeSpec("rotary_offset", "INT", 0, "First rotated channel; a multiple of 8, not negative."),
    AttributeSpec("qk_norm_epsilon", "FLOAT", 1e-6, "Epsilon of the q/k RMSNorm; not negative."),
    AttributeSpec("k_quant_type", "STRING", "NONE", "NONE, PER_TENSOR, PER_CHANNEL; PER_TOKEN in domain pagegraft."),
    AttributeSpec("v_quant_type", "STRING", "NONE", "As k_quant_type."),
    AttributeSpec(
        "k_cache_dtype", "STRING", "", "Logical cache type; '' is the tensor's own, int4 is packed in uint8."
    ),
    AttributeSpec("v_cache_dtype", "STRING", "", "As k_cache_dtype."),
    AttributeSpec("kv_cache_layout", "STRING", "SEPARATE", "SEPARATE, or LATENT: V is the first Dv channels of K."),
    AttributeSpec("v_head_size", "INT", 0, "Dv when LATENT, at most D; 0 is D. 0 unless LATENT."),
    AttributeSpec("alibi_slopes", "FLOATS", None, "H slopes: score += slope_h * (j - p).", pagegraft_only=True),
)


@dataclass(frozen=True, kw_only=True)
class AttentionAttributes:
    """The attributes of one PagedAttention node with their defaults filled in.

    `scale` None means 1/sqrt(D); `alibi_slopes` empty means none.
    """

    num_heads: int
    kv_num_heads: int
    scale: float | None = None
    softcap: float = 0.0
    local_window_size: int = -1
    is_causal: int = 1
    do_rotary: int = 0
    rotary_interleaved: int = 0
    rotary_offset: int = 0
    qk_norm_epsilon: float = 1e-6
    k_quant_type: str = "NONE"
    v_quant_type: str = "NONE"
    k_cache_dtype: str = ""
    v_cache_dtype: str = ""
    kv_cache_layout: str = "SEPARATE"
    v_head_size: int = 0
    alibi_slopes: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        _check_attributes(self)

    @property
    def latent(self) -> bool:
        """True when the value is read from the key cache (absorbed latent attention)."""
        return self.kv_cache_layout == "LATENT"

    def to_dict(self) -> dict[str, Any]:
        """The attributes to put on a node: the required ones and those that differ from their default."""
        out: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name in ("num_heads", "kv_num_heads") or value != spec.default:
                out[spec.name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, attributes: Mapping[str, Any]) -> AttentionAttributes:
        """Reads a node's attributes. Raises ContractError for an unknown name or a value out of range."""
        known = {spec.name for spec in fields(cls)}
        for name in attributes:
            if name not in known:
                raise ContractError(f"PagedAttention has no attribute '{name}'; it has: {', '.join(sorted(known))}")
        values = dict(attributes)
        if "alibi_slopes" in values:
            values["alibi_slopes"] = tuple(float(v) for v in values["alibi_slopes"])
        return cls(**values)


def _check_attributes(a: AttentionAttributes) -> None:
    def fail(name: str, why: str) -> None:
        raise ContractError(f"attribute {name}={getattr(a, name)!r}: {why}")

    if a.num_heads < 1:
        fail("num_heads", "must be at least 1")
    if a.kv_num_heads < 1 or a.num_heads % a.kv_num_heads:
        fail("kv_num_heads", f"must be at least 1 and divide num_heads={a.num_heads}")
    if a.local_window_size < 1 and a.local_window_size != -1:
        fail("local_window_size", "must be -1 (unused) or at least 1")
    # Comparisons are turned round so that NaN fails them.
    for name in ("softcap", "qk_norm_epsilon"):
        if not getattr(a, name) >= 0:
            fail(name, "must be a number that is not negative")
    if a.scale is not None and not isfinite(a.scale):
        fail("scale", "must be a finite number")
    for name in ("is_causal", "do_rotary", "rotary_interleaved"):
        if getattr(a, name) not in (0, 1):
            fail(name, "must be 0 or 1")
    if a.rotary_offset < 0 or a.rotary_offset % 8:
        fail("rotary_offset", "must be a non-negative multiple of 8")
    for name in ("k_quant_type", "v_quant_type"):
        if getattr(a, name) not in QUANT_TYPES:
            fail(name, f"must be one of {', '.join(QUANT_TYPES)}")
    for name in ("k_cache_dtype", "v_cache_dtype"):
        if getattr(a, name) not in ("", *CACHE_DTYPES):
            fail(name, f"must be empty or one of {', '.join(CACHE_DTYPES)}")
    if a.kv_cache_layout not in ("SEPARATE", "LATENT"):
        fail("kv_cache_layout", "must be SEPARATE or LATENT")
    if a.latent and a.kv_num_heads != 1:
        fail("kv_num_heads", "must be 1 when kv_cache_layout is LATENT")
    if a.v_head_size < 0 or (a.v_head_size and not a.latent):
        fail("v_head_size", "must be 0 unless kv_cache_layout is LATENT")
    if a.latent and a.v_head_size and a.scale is None:
        fail("scale", "is required when v_head_size is given")
    if a.alibi_slopes and len(a.alibi_slopes) != a.num_heads:
        fail("alibi_slopes", f"must hold num_heads={a.num_heads} values")


def cache_head_width(head_size: int, cache_dtype: str) -> int:
    """Elements of the last cache dimension for a logical head size: (head_size+1)//2 bytes for int4, else head_size."""
    return (head_size + 1) // 2 if cache_dtype == "int4" else head_size


def needs_pagegraft_domain(
    attributes: AttentionAttributes, *, compute_dtype: str, head_size: int, value_head_size: int, cache_dtype: str = ""
) -> bool:
    """True when `com.microsoft::PagedAttention` v1 cannot say this attention. `cache_dtype` is its logical type."""
    return (
        "float32" in (compute_dtype, cache_dtype)
        or bool(attributes.alibi_slopes)
        or "PER_TOKEN" in (attributes.k_quant_type, attributes.v_quant_type)
        or (not attributes.latent and head_size != value_head_size)
    )


def ordered_inputs(named: Mapping[str, Any]) -> list[Any]:
    """Orders inputs given by contract name for a node: None where absent, trailing absences cut off.

    Raises ContractError for a name that is not an input or for a missing required one.
    """
    by_name = {p.name: p for p in INPUTS}
    for name in named:
        if name not in by_name:
            raise ContractError(f"PagedAttention has no input '{name}'; it has: {', '.join(by_name)}")
    for p in INPUTS:
        if not p.optional and named.get(p.name) is None:
            raise ContractError(f"PagedAttention needs its input '{p.name}'")
    ordered: list[Any] = [named.get(p.name) for p in INPUTS]
    return _trimmed(ordered)


def _trimmed(values: Sequence[Any]) -> list[Any]:
    end = len(values)
    while end and values[end - 1] is None:
        end -= 1
    return list(values[:end])
