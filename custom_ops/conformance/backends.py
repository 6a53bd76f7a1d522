"""What a backend is, what it may claim, and how one is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
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
COMPUTE_DTYPES: Final = ("float32", "float16", "bfloat16")
ALL_BLOCK_SIZES: Final = frozenset(1 << i for i in range(MAX_BLOCK_SIZE.bit_length()))


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend claims; cases outside are reported as not claimed.

    `head_size_multiple` and `max_head_size` bound key and value head sizes. `bad_ids`: a block id or slot that the
    contract forbids is an "error", or "masked" (treated as -1). `validates`: other malformed feeds raise an error.
    `bitwise`: a sequence's output does not depend, in any bit, on what else is in the batch. `max_cache_bytes`: size of
    one cache tensor that is still run. The sets may be given as any collection. Raises ContractError for values that
    the contract does not know.
    """

    compute_dtypes: frozenset[str] = frozenset(COMPUTE_DTYPES)
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
        known: Mapping[str, Iterable[Any]] = {
            "compute_dtypes": COMPUTE_DTYPES,
            "cache_dtypes": CACHE_DTYPES,
            "block_sizes": sorted(ALL_BLOCK_SIZES),
            "features": FEATURES,
        }
        for name, values in known.items():
            object.__setattr__(self, name, _claimed(name, getattr(self, name), values))
        if self.bad_ids not in ("error", "masked"):
            raise ContractError(f"capabilities: bad_ids={self.bad_ids!r}; it is 'error' or 'masked'")
        if self.head_size_multiple < 1:
            raise ContractError(f"capabilities: head_size_multiple={self.head_size_multiple}; it is at least 1")


def _claimed(name: str, values: Any, known: Iterable[Any]) -> frozenset[Any]:
    """A claim given as any collection, as a frozenset. Raises ContractError for a value that the contract lacks."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ContractError(
            f"capabilities: {name}={values!r}; give a set, such as frozenset({{{next(iter(known))!r}}})"
        )
    claimed = tuple(values)
    known = tuple(known)
    unknown = [v for v in claimed if v not in known]
    if unknown:
        listed = ", ".join(str(v) for v in known)
        raise ContractError(f"capabilities: unknown {name} {unknown}; the contract has: {listed}")
    return frozenset(claimed)


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
    factory = _factory(name)
    try:
        backend = factory()
    except TypeError as error:
        raise ContractError(f"backend '{name}' cannot be made without arguments ({error})") from error
    missing = [member for member in ("name", "capabilities", "run") if not hasattr(backend, member)]
    if missing or not isinstance(backend, Backend):
        raise ContractError(
            f"backend '{name}' is no Backend: it has no {' and no '.join(missing)}; "
            "it needs name, capabilities() and run(feeds, attributes)"
        )
    _check_capabilities(name, backend)
    return backend


def _factory(name: str) -> Any:
    """The class that a name stands for. Raises ContractError."""
    module_name, _, class_name = _OURS.get(name, name).partition(":")
    wanted = f"give package.module:Class, or one of reference, {', '.join(_OURS)}"
    if "/" in module_name or module_name.endswith(".py") or not module_name or not class_name:
        raise ContractError(f"backend '{name}' is no module and class; {wanted}")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        own = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        hint = "set PYTHONPATH=. when it lies in the working directory" if own else "install what it imports"
        raise ContractError(f"backend '{name}' cannot be loaded ({error}); {hint}; {wanted}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ContractError(f"backend '{name}' cannot be loaded ({error}); {wanted}") from error


def _check_capabilities(name: str, backend: Backend) -> None:
    try:
        claims: object = backend.capabilities()
    except (ContractError, TypeError) as error:
        raise ContractError(f"backend '{name}': {error}") from error
    if not isinstance(claims, Capabilities):
        raise ContractError(
            f"backend '{name}': capabilities() returned {claims!r:.80}; it must return Capabilities(...)"
        )


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
        # The same words for every such case, so that a summary can count them.
        return f"a cache larger than max_cache_bytes={c.max_cache_bytes}"
    return None
