"""Compares a backend's outputs with expected ones: shapes, stored values, untouched slots, non-finite values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, NoReturn

import numpy as np

from ..cache_codec import decode
from ..errors import PagegraftError
from ..spec import UNMAPPED, AttentionAttributes
from ..validation import Array, Feeds, Geometry, element_type, geometry_of, visible_range
from .call import Call
from .tolerance import (
    MOST_DIFFERING_CODES,
    UNIT_ROUNDOFF,
    OutputScale,
    output_tolerance,
    stored_steps,
    transformed_error,
)

__all__ = ["MismatchError", "Oracle", "check_outputs", "output_scale", "written_slots"]

#: Computes the expected outputs of a valid call, caches included.
Oracle = Callable[[Feeds, AttentionAttributes], Mapping[str, Array]]


class MismatchError(PagegraftError):
    """A backend's result is wrong; the message says which output, where, and by how much."""


@dataclass(frozen=True)
class _Side:
    """One of the two caches: its letter, names, and what of it is written."""

    letter: str
    cache: str
    size: int


def check_outputs(call: Call, outputs: Mapping[str, Array], oracle: Oracle) -> float:
    """Raises MismatchError unless `outputs` is right; returns output's largest error as a fraction of its tolerance."""
    attributes = call.parsed()
    g = geometry_of(call.feeds, attributes)
    expected = oracle(call.feeds, attributes)
    transformed = "q_norm_weight" in call.feeds or bool(attributes.do_rotary)
    _check_form(expected, outputs)
    slots = written_slots(call, g)
    as_expected = True
    for side in _sides(call.feeds, g):
        as_expected &= _check_cache(side, call, expected, outputs, g, slots, transformed=transformed)
    want = expected["output"]
    if not as_expected:
        want = oracle(_as_stored(call, outputs, slots, g), attributes)["output"]
    scale = output_scale(call, outputs, attributes, g)
    tolerance = output_tolerance(g.compute_dtype, g.cache_dtype, scale, transformed=transformed)
    return _check_close("output", outputs["output"], want, tolerance)


def written_slots(call: Call, g: Geometry) -> Array:
    """Slots that the call writes, int64, without the -1s."""
    feeds = call.feeds
    if "slot_mapping" in feeds:
        slots = feeds["slot_mapping"].astype(np.int64)
        return np.asarray(slots[slots != UNMAPPED])
    found: list[int] = []
    for s, new in enumerate(np.diff(feeds["cumulative_sequence_length"])):
        for p in range(int(feeds["past_seqlens"][s]), int(feeds["past_seqlens"][s]) + int(new)):
            block = int(feeds["block_table"][s, p // g.block_size])
            if block != UNMAPPED:
                found.append(block * g.block_size + p % g.block_size)
    return np.array(found, np.int64)


def _sides(feeds: Feeds, g: Geometry) -> list[_Side]:
    sides = [_Side("k", "key_cache", g.head_size)]
    return sides + ([_Side("v", "value_cache", g.value_head_size)] if "value_cache" in feeds else [])


def _fail(text: str) -> NoReturn:
    raise MismatchError(text)


def _check_form(expected: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    for name, want in expected.items():
        if name not in outputs:
            _fail(f"{name}: missing from the outputs")
        got = outputs[name]
        if not isinstance(got, np.ndarray):
            _fail(f"{name}: expected a numpy array, got a {type(got).__name__}")
        if got.shape != want.shape or got.dtype != want.dtype:
            _fail(f"{name}: expected {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}")


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _check_untouched(name: str, before: Array, after: Array, written: Array) -> None:
    """`written` marks blocks' slots [N, B]; arrays are [N, B, ...]."""
    changed = (_bits(before) != _bits(after)).reshape(*written.shape, -1).any(axis=-1) & ~written
    if changed.any():
        block, offset = np.argwhere(changed)[0]
        _fail(f"{name}: {changed.sum()} slots that nothing addresses were changed, first block {block} offset {offset}")


def _check_cache(
    side: _Side, call: Call, expected: Mapping[str, Array], outputs: Mapping[str, Array], g: Geometry, slots: Array,
    *, transformed: bool,
) -> bool:  # fmt: skip
    """Checks one cache and its scales; True when what was stored is exactly what was expected."""
    name = f"{side.cache}_out"
    written = np.zeros((g.blocks, g.block_size), bool)
    written[slots // g.block_size, slots % g.block_size] = True
    _check_untouched(name, call.feeds[side.cache], outputs[name], written)
    got, want = outputs[name][written], expected[name][written]
    moved = transformed and side.letter == "k"
    per_token = f"{side.letter}_scale_out" in expected
    scale_exact = True
    if per_token:
        scale_name = f"{side.letter}_scale_out"
        before, after = (x.swapaxes(1, 2) for x in (call.feeds[f"{side.letter}_scale"], outputs[scale_name]))
        _check_untouched(scale_name, before, after, written)
        exact = 4 * UNIT_ROUNDOFF["float32"]
        relative = transformed_error(g.compute_dtype, g.head_size) if moved else exact
        wanted = expected[scale_name].swapaxes(1, 2)[written]
        _check_close(scale_name, after[written], wanted, relative * np.abs(wanted.astype(np.float64)))
        scale_exact = bool((after[written] == wanted).all())
    if g.cache_dtype == g.compute_dtype and not moved:
        if not _same(got, want):
            _fail(f"{name}: a copied value is not bit-identical")
        return True
    if g.cache_dtype in UNIT_ROUNDOFF:
        _check_float_stored(name, got, want, g, moved=moved)
    else:
        _check_codes(name, got, want, g, side.size, moved=moved)
    return scale_exact and _same(got, want)


def _same(got: Array, want: Array) -> bool:
    nan = np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64))
    return bool(((_bits(got) == _bits(want)) | nan).all())


def _check_float_stored(name: str, got: Array, want: Array, g: Geometry, *, moved: bool) -> None:
    wide = want.astype(np.float64)
    step = 2 * UNIT_ROUNDOFF[g.cache_dtype] * np.abs(wide) + float(np.finfo(np.float32).tiny)
    if element_type(got) == "float16":
        step = np.maximum(step, 2.0**-24)  # subnormals
    if moved:
        step = step + transformed_error(g.compute_dtype, g.head_size) * np.abs(wide).max(
            axis=-1, keepdims=True, initial=0.0
        )
    _check_close(name, got, want, step)


def _check_codes(name: str, got: Array, want: Array, g: Geometry, size: int, *, moved: bool) -> None:
    steps = stored_steps(g.compute_dtype, g.cache_dtype, transformed=moved)

    def order(stored: Array) -> Array:  # codes as integers whose difference is a number of steps
        if g.cache_dtype == "float8e4m3fn":
            bits = stored.view(np.uint8).astype(np.int64)
            return np.where(bits >= 128, 128 - bits, bits)
        return decode(stored, 1.0, g.cache_dtype, size).astype(np.int64)

    if g.cache_dtype == "float8e4m3fn":  # NaN's code is next to the largest number's
        nan = np.isnan(got.astype(np.float32)) != np.isnan(want.astype(np.float32))
        if nan.any():
            _fail(f"{name}: {nan.sum()} codes are NaN in one of expected and got")
    difference = np.abs(order(got) - order(want))
    if difference.size and difference.max() > steps:
        where = tuple(int(i) for i in np.argwhere(difference > steps)[0])
        _fail(f"{name}: code off by {difference.max()} steps, {steps} allowed, first at (token, head, channel) {where}")
    differing = int((difference > 0).sum())
    if not moved and differing > MOST_DIFFERING_CODES * difference.size + 2:
        _fail(f"{name}: {differing} of {difference.size} codes are one step off: not ties, another rounding")


def _check_close(name: str, got: Array, want: Array, tolerance: Any) -> float:
    """Compares in float64; NaN equals NaN and an infinity equals itself, anything else non-finite is a mismatch."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    odd = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if odd.any():
        at = tuple(int(i) for i in np.argwhere(odd)[0])
        _fail(f"{name}: {odd.sum()} of {a.size} values, first at {at}: expected {b[at]}, got {a[at]}")
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(a - b), 0.0)
    allowed = np.broadcast_to(tolerance, error.shape)
    wrong = error > allowed
    if wrong.any():
        at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(wrong, error, 0)), error.shape))
        _fail(
            f"{name}: {wrong.sum()} of {a.size} values beyond tolerance, worst at {at}: expected {b[at]:.7g}, "
            f"got {a[at]:.7g}, off by {error[at]:.3g}, allowed {allowed[at]:.3g}"
        )
    positive = allowed > 0
    return float((error[positive] / allowed[positive]).max(initial=0.0))


def _as_stored(call: Call, outputs: Mapping[str, Array], slots: Array, g: Geometry) -> dict[str, Array]:
    """The call with its new keys and values already in the caches, as the backend stored them."""
    feeds = dict(call.feeds)
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        if f"{name}_out" in outputs and name in feeds:
            feeds[name] = outputs[f"{name}_out"]
    feeds["slot_mapping"] = np.full(g.tokens, UNMAPPED, np.int32)
    return feeds


def output_scale(call: Call, outputs: Mapping[str, Array], a: AttentionAttributes, g: Geometry) -> OutputScale:
    """Magnitudes over everything the call can read. Values that are not finite are left out: they compare exactly."""
    read: dict[str, list[Array]] = {"k": [], "v": []}
    keys = 0
    table = call.feeds["block_table"].astype(np.int64)
    for s, new in enumerate(np.diff(call.feeds["cumulative_sequence_length"])):
        position = np.arange(*visible_range(int(call.feeds["past_seqlens"][s]), int(new), a))
        block = table[s, position // g.block_size] if len(position) else position
        position, block = position[block != UNMAPPED], block[block != UNMAPPED]
        keys = max(keys, len(position))
        for side in _sides(call.feeds, g):
            read[side.letter].append(_read(side, call, outputs, a, g, block, position % g.block_size))
    key = np.concatenate([*read["k"], np.zeros((1, g.kv_heads, g.head_size))])
    value = (
        key[..., : g.value_head_size]
        if a.latent
        else np.concatenate([*read["v"], np.zeros((1, *key.shape[1:2], g.value_head_size))])
    )
    query = call.feeds["query"].astype(np.float64)[:, : g.query_heads * g.head_size]
    if "q_norm_weight" in call.feeds:
        query_norm = sqrt(g.head_size) * float(np.abs(call.feeds["q_norm_weight"].astype(np.float64)).max())
    else:
        query_norm = float(_norms(query.reshape(-1, g.head_size)).max(initial=0.0))
    factor = 1 / sqrt(g.head_size) if a.scale is None else abs(a.scale)
    finite = np.where(np.isfinite(value), value, 0.0)
    return OutputScale(
        value_max=float(np.abs(finite).max()),
        value_rms=float(np.sqrt(np.mean(finite**2))),
        score_bound=factor * query_norm * float(_norms(key).max()),
        bias_bound=max(map(abs, a.alibi_slopes), default=0.0) * keys,
        head_size=g.head_size,
        keys=keys,
    )


def _norms(x: Array) -> Array:
    return np.asarray(np.sqrt(np.sum(np.where(np.isfinite(x), x, 0.0) ** 2, axis=-1)))


def _read(
    side: _Side,
    call: Call,
    outputs: Mapping[str, Array],
    a: AttentionAttributes,
    g: Geometry,
    block: Array,
    offset: Array,
) -> Array:
    scale: Any = 1.0
    quant = getattr(a, f"{side.letter}_quant_type")
    if quant == "PER_TOKEN":
        scale = outputs[f"{side.letter}_scale_out"][block, :, offset].astype(np.float64)[..., None]
    elif quant != "NONE":
        scale = (
            call.feeds[f"{side.letter}_scale"]
            .astype(np.float64)
            .reshape(1 if quant == "PER_TENSOR" else (g.kv_heads, side.size))
        )
    return decode(outputs[f"{side.cache}_out"][block, offset], scale, g.cache_dtype, side.size)
