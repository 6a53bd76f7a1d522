"""Hypothesis strategies over the whole capability space of the contract, as setups of conformance cases."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st
from pagegraft.custom_ops.conformance.call import Setup

FLOATS = ("float32", "float16", "bfloat16")


def as_case(setup: Setup) -> str:
    """Source of a case with this setup, to be added to the suite."""
    changed = {f.name: getattr(setup, f.name) for f in fields(Setup)}
    defaults = {f.name: getattr(Setup(), f.name) for f in fields(Setup)}
    arguments = ", ".join(f"{n}={v!r}" for n, v in changed.items() if v != defaults[n])
    return f'case("group/name", {arguments})'


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any valid setup of moderate size."""
    block_size = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    lengths = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=4))
    new, past = tuple(n for n, _ in lengths), tuple(p for _, p in lengths)
    shape = draw(_shapes())
    attributes = {**draw(_masks(shape["query_heads"])), **shape.pop("attributes")}
    rotary = draw(_rotary(shape["head_size"]))
    attributes |= rotary.pop("attributes")
    extra: dict[str, Any] = {
        "sink": draw(st.booleans()),
        "norm": draw(st.booleans()),
        "packed": "latent_value_size" not in shape and draw(st.booleans()),
        "metadata": draw(st.sampled_from(((), (0, 0), (20, 100), (20, 100, 0)))),
        "table": draw(st.sampled_from(("shuffled", "contiguous", "shared", "repeated"))),
        "dead": draw(st.sampled_from(("noise", "nan", "inf"))),
        "gains": draw(st.sampled_from(((2.0, 1.0, 1.0), (0.0, 1.0, 1.0), (20.0, 1.0, 1.0), (1.0, 0.01, 50.0)))),
    }
    return Setup(
        new=new,
        past=past,
        block_size=block_size,
        compute=draw(st.sampled_from(FLOATS)),
        attributes=attributes,
        **draw(_caches("latent_value_size" in shape)),
        **draw(_placement(new, past, block_size)),
        **shape,
        **rotary,
        **extra,
    )


@st.composite
def _shapes(draw: st.DrawFn) -> dict[str, Any]:
    head_size = draw(st.one_of(st.integers(1, 40), st.sampled_from((64, 80, 96, 128))))
    if draw(st.integers(0, 4)) == 0:
        value = draw(st.integers(1, head_size))
        heads = {"query_heads": draw(st.integers(1, 8)), "kv_heads": 1}
        return {**heads, "head_size": head_size, "latent_value_size": value, "attributes": {"scale": 0.3}}
    kv_heads = draw(st.integers(1, 4))
    shape = {"query_heads": kv_heads * draw(st.integers(1, 4)), "kv_heads": kv_heads, "head_size": head_size}
    if draw(st.integers(0, 3)) == 0:
        shape["value_head_size"] = draw(st.integers(1, 48))
    return {**shape, "attributes": draw(st.sampled_from(({}, {}, {"scale": 0.4}, {"scale": -0.1})))}


@st.composite
def _masks(draw: st.DrawFn, query_heads: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if draw(st.booleans()):
        out["local_window_size"] = draw(st.integers(1, 60))
    if draw(st.integers(0, 3)) == 0:
        out["is_causal"] = 0
    if draw(st.integers(0, 2)) == 0:
        out["softcap"] = draw(st.sampled_from((0.5, 3.0, 30.0)))
    if draw(st.integers(0, 3)) == 0:
        slopes = st.sampled_from((0.0, 0.125, 0.5, 1.0, -0.25))
        out["alibi_slopes"] = tuple(draw(st.lists(slopes, min_size=query_heads, max_size=query_heads)))
    return out


@st.composite
def _rotary(draw: st.DrawFn, head_size: int) -> dict[str, Any]:
    if head_size < 2 or draw(st.booleans()):
        return {"attributes": {}}
    offset = 8 * draw(st.integers(0, (head_size - 2) // 8))
    dim = 2 * draw(st.integers(1, (head_size - offset) // 2))
    attributes = {"rotary_offset": offset} if offset else {}
    if draw(st.booleans()):
        attributes["rotary_interleaved"] = 1
    return {"rotary_dim": dim, "attributes": attributes}


@st.composite
def _caches(draw: st.DrawFn, latent: bool) -> dict[str, Any]:
    kind = draw(st.sampled_from(("", *FLOATS, "int8", "float8e4m3fn", "int4")))
    if kind in ("", *FLOATS):
        return {"cache": kind}
    granularities = ("PER_TENSOR", "PER_CHANNEL") + (("PER_TOKEN",) if kind == "int8" else ())
    out = {"cache": kind, "k_quant": draw(st.sampled_from(granularities))}
    if not latent:
        out["v_quant"] = draw(st.sampled_from(granularities))
    return {**out, "scale_gain": draw(st.sampled_from((0.3, 1.0, 4.0)))}


@st.composite
def _placement(draw: st.DrawFn, new: tuple[int, ...], past: tuple[int, ...], block_size: int) -> dict[str, Any]:
    tokens = sum(new)
    kinds = ["derived", "explicit", "none"] + (["elsewhere"] if tokens <= 3 * block_size else [])
    out: dict[str, Any] = {"slots": draw(st.sampled_from(kinds))}
    if out["slots"] == "explicit" and tokens:
        out["skipped"] = tuple(sorted(draw(st.sets(st.integers(0, tokens - 1), max_size=5))))
    places = [(s, b) for s, (n, p) in enumerate(zip(new, past, strict=True)) for b in range(-(-(n + p) // block_size))]
    if places and draw(st.integers(0, 2)) == 0:
        out["unmapped"] = tuple(sorted(draw(st.sets(st.sampled_from(places), max_size=4))))
    return out
