"""Checks the feeds of a PagedAttention call against the contract and works out their geometry.

Shape letters as in `spec`. The order of the checks is names, element types, shapes, values; the first violation is
raised as a ContractError that names the input or attribute, what the contract expects and what was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np

from .errors import ContractError
from .spec import (
    CACHE_DTYPES,
    INPUTS,
    MAX_BLOCK_SIZE,
    QUANTISED_CACHE_DTYPES,
    UNMAPPED,
    AttentionAttributes,
    cache_head_width,
)

__all__ = ["Feeds", "Geometry", "check_values", "element_type", "geometry_of", "visible_range"]

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]

_FLOAT_LIKE_QUERY = ("key", "value", "cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one call, in the module's letters, and the logical type of its caches (a key of CACHE_DTYPES)."""

    tokens: int
    sequences: int
    blocks: int
    block_size: int
    table_width: int
    query_heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    compute_dtype: str
    cache_dtype: str


def element_type(array: Array) -> str:
    """ONNX name of an array's element type: float16, bfloat16, float8e4m3fn, int32, ..."""
    return _type_name(array.dtype)


@cache
def _type_name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name).replace("float8_", "float8")


def visible_range(past: int, new: int, attributes: AttentionAttributes) -> tuple[int, int]:
    """Half-open range of logical positions that at least one of a sequence's `new` tokens can see."""
    if new == 0:
        return 0, 0
    window = attributes.local_window_size
    return (max(0, past + 1 - window) if window > 0 else 0), past + new


def geometry_of(feeds: Feeds, attributes: AttentionAttributes) -> Geometry:
    """Checks names, element types and shapes, and returns the sizes they imply. Raises ContractError."""
    _check_names_and_types(feeds)
    cache_dtype = _check_cache_type("k", feeds["key_cache"], attributes)
    if "value_cache" in feeds:
        _check_cache_type("v", feeds["value_cache"], attributes)
    _check_presence(feeds, attributes)
    _check_ranks(feeds)
    blocks, block_size = feeds["key_cache"].shape[:2]
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        _fail("key_cache", f"a block size that is a power of two up to {MAX_BLOCK_SIZE}", block_size)
    head_size, value_head_size = _head_sizes(feeds, attributes, cache_dtype)
    g = Geometry(
        tokens=feeds["query"].shape[0],
        sequences=feeds["past_seqlens"].shape[0],
        blocks=blocks,
        block_size=block_size,
        table_width=feeds["block_table"].shape[1],
        query_heads=attributes.num_heads,
        kv_heads=attributes.kv_num_heads,
        head_size=head_size,
        value_head_size=value_head_size,
        compute_dtype=element_type(feeds["query"]),
        cache_dtype=cache_dtype,
    )
    _check_shapes(feeds, attributes, g)
    return g


def check_values(feeds: Feeds, attributes: AttentionAttributes, g: Geometry) -> None:
    """Checks lengths, positions, block ids in the visible range, and slots. Raises ContractError."""
    cumulative = feeds["cumulative_sequence_length"].astype(np.int64)
    past = feeds["past_seqlens"].astype(np.int64)
    if cumulative[0] != 0 or cumulative[-1] != g.tokens or (np.diff(cumulative) < 0).any():
        _fail("cumulative_sequence_length", f"values that start at 0, never decrease, end at {g.tokens}", cumulative)
    if (past < 0).any():
        _fail("past_seqlens", "values >= 0", past)
    for s, new in enumerate(np.diff(cumulative)):
        start, end = visible_range(int(past[s]), int(new), attributes)
        if end > g.table_width * g.block_size:
            _fail("block_table", f"room for the {end} positions of sequence {s}", feeds["block_table"].shape)
        seen = feeds["block_table"][s, start // g.block_size : -(-end // g.block_size)]
        if ((seen < UNMAPPED) | (seen >= g.blocks)).any():
            _fail("block_table", f"ids of -1 or below {g.blocks} in the visible range of sequence {s}", seen)
        if attributes.do_rotary and end > feeds["cos_cache"].shape[0]:
            _fail("cos_cache", f"a row for each of the {end} positions of sequence {s}", feeds["cos_cache"].shape)
    slots = feeds.get("slot_mapping")
    if slots is not None and ((slots < UNMAPPED) | (slots >= g.blocks * g.block_size)).any():
        _fail("slot_mapping", f"slots of -1 or below {g.blocks * g.block_size}", slots)


def _fail(name: str, expected: object, got: object) -> NoReturn:
    text = np.array2string(got, threshold=16) if isinstance(got, np.ndarray) else str(got)
    raise ContractError(f"PagedAttention {name}: expected {expected}, got {text}")


def _check_names_and_types(feeds: Feeds) -> None:
    specs = {p.name: p for p in INPUTS}
    for name, array in feeds.items():
        if name not in specs:
            _fail(name, f"one of the inputs {', '.join(specs)}", "an unknown name")
        if element_type(array) not in specs[name].pagegraft_types:
            _fail(name, f"element type {' | '.join(specs[name].pagegraft_types)}", element_type(array))
        if name in _FLOAT_LIKE_QUERY and "query" in feeds and array.dtype != feeds["query"].dtype:
            _fail(name, f"the element type of query, {element_type(feeds['query'])}", element_type(array))
    for p in INPUTS:
        if not p.optional and p.name not in feeds:
            _fail(p.name, "this required input", "nothing")


def _check_cache_type(letter: str, cache: Array, attributes: AttentionAttributes) -> str:
    """The logical type of a cache; checks it against `*_cache_dtype` and `*_quant_type`."""
    stored, named = element_type(cache), getattr(attributes, f"{letter}_cache_dtype")
    logical = str(named or stored)
    if CACHE_DTYPES.get(logical) != stored:
        _fail(f"{letter}_cache_dtype", f"a logical type that a {stored} cache can hold", repr(named))
    quant = getattr(attributes, f"{letter}_quant_type")
    if (quant == "NONE") == (logical in QUANTISED_CACHE_DTYPES):
        _fail(f"{letter}_quant_type", f"{'a granularity' if quant == 'NONE' else 'NONE'} for {logical} caches", quant)
    if quant == "PER_TOKEN" and logical != "int8":
        _fail(f"{letter}_quant_type", "PER_TOKEN with int8 caches only", f"{quant} with {logical}")
    return logical


def _check_presence(feeds: Feeds, attributes: AttentionAttributes) -> None:
    def present(name: str, *, wanted: bool, why: str) -> None:
        if (name in feeds) != wanted:
            _fail(name, f"{'an' if wanted else 'no'} input {why}", "one" if name in feeds else "none")

    if attributes.latent:
        present("key", wanted=True, why="when kv_cache_layout is LATENT")
        present("value", wanted=False, why="when kv_cache_layout is LATENT")
        present("value_cache", wanted=False, why="when kv_cache_layout is LATENT")
        if attributes.v_quant_type != "NONE":
            _fail("v_quant_type", "NONE when kv_cache_layout is LATENT", attributes.v_quant_type)
        if attributes.v_cache_dtype:
            _fail("v_cache_dtype", "'' when kv_cache_layout is LATENT", repr(attributes.v_cache_dtype))
    else:
        present("value", wanted="key" in feeds, why="exactly when key is given")
        present("value_cache", wanted=True, why="when kv_cache_layout is SEPARATE")
        if feeds["value_cache"].dtype != feeds["key_cache"].dtype:
            _fail("value_cache", "the element type of key_cache", element_type(feeds["value_cache"]))
    present("k_norm_weight", wanted="q_norm_weight" in feeds, why="exactly when q_norm_weight is given")
    if attributes.do_rotary:
        present("cos_cache", wanted=True, why="when do_rotary is 1")
        present("sin_cache", wanted=True, why="when do_rotary is 1")
    for letter in "kv":
        quant = getattr(attributes, f"{letter}_quant_type")
        present(f"{letter}_scale", wanted=quant != "NONE", why=f"exactly when {letter}_quant_type is not NONE")


_RANKS = {
    "query": 2, "key": 2, "value": 2, "key_cache": 4, "value_cache": 4, "cumulative_sequence_length": 1,
    "past_seqlens": 1, "block_table": 2, "cos_cache": 2, "sin_cache": 2, "slot_mapping": 1, "head_sink": 1,
    "q_norm_weight": 1, "k_norm_weight": 1, "attention_metadata": 1,
}  # fmt: skip


def _check_ranks(feeds: Feeds) -> None:
    for name, rank in _RANKS.items():
        if name in feeds and feeds[name].ndim != rank:
            _fail(name, f"{rank} dimensions", f"shape {feeds[name].shape}")


def _head_sizes(feeds: Feeds, a: AttentionAttributes, cache_dtype: str) -> tuple[int, int]:
    """Key and value head size, from the packed widths; the cache's width decides where they leave a choice."""
    width, H, G = feeds["query"].shape[1], a.num_heads, a.kv_num_heads
    if "key" in feeds:
        if width % H or width == 0:
            _fail("query", f"a width that is a positive multiple of num_heads={H}", width)
        head_size = width // H
        if a.latent:
            return head_size, a.v_head_size or head_size
        if feeds["value"].shape[1] % G or feeds["value"].shape[1] == 0:
            _fail("value", f"a width that is a positive multiple of kv_num_heads={G}", feeds["value"].shape[1])
        return head_size, feeds["value"].shape[1] // G
    for d in _sizes_of_width(feeds["key_cache"].shape[3], cache_dtype):
        for dv in _sizes_of_width(feeds["value_cache"].shape[3], cache_dtype):
            if d > 0 and dv > 0 and H * d + G * (d + dv) == width:
                return d, dv
    caches = (feeds["key_cache"].shape[3], feeds["value_cache"].shape[3])
    _fail("query", f"packed width H*D + G*D + G*Dv for H={H}, G={G} and cache widths {caches}", width)


def _sizes_of_width(width: int, cache_dtype: str) -> tuple[int, ...]:
    return (2 * width, 2 * width - 1) if cache_dtype == "int4" else (width,)


def _check_shapes(feeds: Feeds, a: AttentionAttributes, g: Geometry) -> None:
    D, Dv = g.head_size, g.value_head_size
    if Dv > D and a.latent:
        _fail("v_head_size", f"at most the head size {D}", Dv)
    kw, vw = cache_head_width(D, g.cache_dtype), cache_head_width(Dv, g.cache_dtype)
    expected: dict[str, tuple[int, ...]] = {
        "key": (g.tokens, g.kv_heads * D),
        "value": (g.tokens, g.kv_heads * Dv),
        "key_cache": (g.blocks, g.block_size, g.kv_heads, kw),
        "value_cache": (g.blocks, g.block_size, g.kv_heads, vw),
        "cumulative_sequence_length": (g.sequences + 1,),
        "block_table": (g.sequences, g.table_width),
        "slot_mapping": (g.tokens,),
        "head_sink": (g.query_heads,),
        "q_norm_weight": (D,),
        "k_norm_weight": (D,),
    }
    for letter, size in (("k", D), ("v", Dv)):
        scales = {"PER_TENSOR": (1,), "PER_CHANNEL": (g.kv_heads, 1, size)}
        scales["PER_TOKEN"] = (g.blocks, g.kv_heads, g.block_size)
        expected[f"{letter}_scale"] = scales.get(getattr(a, f"{letter}_quant_type"), ())
    for name, shape in expected.items():
        if name in feeds and feeds[name].shape != shape:
            _fail(name, f"shape {list(shape)}", list(feeds[name].shape))
    if "attention_metadata" in feeds and feeds["attention_metadata"].shape not in ((2,), (3,)):
        _fail("attention_metadata", "shape [2] or [3]", list(feeds["attention_metadata"].shape))
    if a.do_rotary:
        half = feeds["cos_cache"].shape[1]
        if half < 1 or a.rotary_offset + 2 * half > D:
            _fail("cos_cache", f"a width with 1 <= width and rotary_offset + 2*width <= {D}", half)
        if feeds["sin_cache"].shape != feeds["cos_cache"].shape:
            _fail("sin_cache", f"the shape of cos_cache, {list(feeds['cos_cache'].shape)}", feeds["sin_cache"].shape)
