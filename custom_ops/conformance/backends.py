"""What a backend is, what it may claim, and how one is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

from ..errors import ContractError
from ..reference import paged_attention
from ..spec import CACHE_DTYPES, MAX_BLOCK_SIZE, AttentionAttributes
from ..validation import Array, Feeds, Geometry, geometry_of
from .call import Call

__all__ = ["ALL_BLOCK_SIZES", "FEATURES", "Backend", "Capabilities", "ReferenceBackend", "load_backend", "unclaimed"]

#: Parts of the contract that a backend may leave out.
FEATURES: Final[Mapping[str, str]] = {
    "packed_qkv": "query, key and value packed in one input",
    "slot_mapping": "the slot_mapping input, with -1 for tokens that are not written",
    "unmapped_blocks": "-1 in the visible range of a block table",
    "noncausal": "is_causal = 0",
    "window": "local_window_size",
    "softcap": "softcap",
    "sink": "head_sink",
    "qk_norm": "q_norm_weight and k_norm_weight",
    "rotary": "do_rotary",
    "metadata": "attention_metadata",
    "mixed_dtypes": "a float cache of another type than the query",
    "latent": "kv_cache_layout LATENT",
    "split_head_sizes": "key and value heads of different size (domain pagegraft)",
    "alibi": "alibi_slopes (domain pagegraft)",
    "per_token": "PER_TOKEN scales (domain pagegraft)",
}
ALL_BLOCK_SIZES: Final = frozenset(1 << i for i in range(MAX_BLOCK_SIZE.bit_length()))


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend claims; cases outside are reported as not claimed.

    `head_size_multiple` and `max_head_size` bound key and value head sizes. `bad_ids`: a block id or slot that the
    contract forbids is an "error", or "masked" (treated as -1). `validates`: other malformed feeds raise an error.
    `bitwise`: a sequence's output does not depend, in any bit, on what else is in the batch. `max_cache_bytes`: size of
    one cache tensor that is still run.
    """

    compute_dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"})
    cache_dtypes: frozenset[str] = frozenset(CACHE_DTYPES)
    block_sizes: frozenset[int] = ALL_BLOCK_SIZES
    features: frozenset[str] = frozenset(FEATURES)
    head_size_multiple: int = 1
    max_head_size: int = 1 << 16
    bad_ids: Literal["error", "masked"] = "error"
    validates: bool = True
    bitwise: bool = False
    max_cache_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        unknown = self.features - set(FEATURES)
        if unknown:
            raise ContractError(f"unknown features {sorted(unknown)}; the contract has: {', '.join(FEATURES)}")


@runtime_checkable
class Backend(Protocol):
    """An implementation of the op under test."""

    name: str

    def capabilities(self) -> Capabilities:
        """What it claims."""

    def run(self, feeds: dict[str, Array], attributes: dict[str, Any]) -> Mapping[str, Array]:
        """One call: inputs by contract name to outputs by contract name, caches and PER_TOKEN scales included.

        The feeds belong to this call: caches may be updated in place and returned. `attributes` holds what a node
        would (defaults left out). Malformed feeds raise a ValueError (a ContractError is one) that names the input
        or attribute.
        """


class ReferenceBackend:
    """The float64 reference as a backend; the suite judges it by the oracle in `oracle`, written independently."""

    name = "reference"

    def capabilities(self) -> Capabilities:
        """Everything; no sum runs over more than one sequence, so results are bitwise independent of the batch."""
        return Capabilities(bitwise=True, max_cache_bytes=1 << 34)

    def run(self, feeds: dict[str, Array], attributes: dict[str, Any]) -> Mapping[str, Array]:
        """Runs `reference.paged_attention`."""
        return paged_attention(feeds, AttentionAttributes.from_dict(attributes), in_place=True)


_OURS: Final[Mapping[str, str]] = {
    "cpu": "pagegraft.custom_ops.conformance.cpu_backend:CpuBackend",
    "ascend-emulator": "pagegraft.custom_ops.ascend.backend:AscendEmulatorBackend",
}


def load_backend(name: str) -> Backend:
    """A name of ours or `package.module:Class` (made without arguments). Raises ContractError."""
    if name == "reference":
        return ReferenceBackend()
    name = _OURS.get(name, name)
    module_name, _, class_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ContractError(
            f"backend '{name}' cannot be loaded ({error}); give reference, {', '.join(_OURS)}, or package.module:Class"
        ) from error
    backend = factory()
    if not isinstance(backend, Backend):
        raise ContractError(f"backend '{name}' is no Backend; it needs name, capabilities() and run(feeds, attributes)")
    return backend


def used_features(feeds: Feeds, attributes: AttentionAttributes, g: Geometry) -> set[str]:
    """Names of FEATURES that a valid call needs."""
    a = attributes
    tests = {
        "packed_qkv": "key" not in feeds,
        "slot_mapping": "slot_mapping" in feeds,
        "noncausal": not a.is_causal,
        "window": a.local_window_size > 0,
        "softcap": a.softcap > 0,
        "sink": "head_sink" in feeds,
        "qk_norm": "q_norm_weight" in feeds,
        "rotary": bool(a.do_rotary),
        "metadata": "attention_metadata" in feeds,
        "mixed_dtypes": g.cache_dtype in ("float32", "float16", "bfloat16") and g.cache_dtype != g.compute_dtype,
        "latent": a.latent,
        "split_head_sizes": not a.latent and g.head_size != g.value_head_size,
        "alibi": bool(a.alibi_slopes),
        "per_token": "PER_TOKEN" in (a.k_quant_type, a.v_quant_type),
    }
    return {name for name, used in tests.items() if used}


def unclaimed(c: Capabilities, call: Call, extra_features: frozenset[str] = frozenset()) -> str | None:
    """Why a valid call lies outside the capabilities, or None when they cover it."""
    attributes = call.parsed()
    g = geometry_of(call.feeds, attributes)
    missing = (used_features(call.feeds, attributes, g) | extra_features) - c.features
    if missing:
        return ", ".join(sorted(missing))
    if g.compute_dtype not in c.compute_dtypes:
        return f"{g.compute_dtype} compute"
    if g.cache_dtype not in c.cache_dtypes:
        return f"{g.cache_dtype} cache"
    if g.block_size not in c.block_sizes:
        return f"block size {g.block_size}"
    for size in (g.head_size, g.value_head_size):
        if size > c.max_head_size or size % c.head_size_multiple:
            return f"head size {size}"
    if call.feeds["key_cache"].nbytes > c.max_cache_bytes:
        return f"a cache of {call.feeds['key_cache'].nbytes} bytes"
    return None
