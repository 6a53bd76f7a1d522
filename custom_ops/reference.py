"""PagedAttention in float64 numpy: the whole contract, written to be read.

Every step computes in float64. Values are rounded in two places only, both part of the contract: when keys and values
are stored in a cache, and when the output is returned in the compute type. Shape letters as in `spec`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cache_codec import decode, encode
from .spec import UNMAPPED, AttentionAttributes
from .validation import Array, Feeds, Geometry, check_values, geometry_of, visible_range

__all__ = ["paged_attention"]


def paged_attention(feeds: Feeds, attributes: AttentionAttributes, *, in_place: bool = False) -> dict[str, Array]:
    """One call of the op.

    `feeds` maps contract input names to arrays; absent optional inputs are left out. Returns the outputs by contract
    name: `output` and the updated caches (and PER_TOKEN scales), which are copies unless `in_place`; otherwise the
    feeds are not modified. Raises ContractError for feeds that the contract does not allow.
    """
    g = geometry_of(feeds, attributes)
    check_values(feeds, attributes, g)
    query_THD, key_TGD, value_TGD = _split(feeds, g)
    if "q_norm_weight" in feeds:
        query_THD = _rms_norm(query_THD, feeds["q_norm_weight"], attributes.qk_norm_epsilon)
        key_TGD = _rms_norm(key_TGD, feeds["k_norm_weight"], attributes.qk_norm_epsilon)
    if attributes.do_rotary:
        position_T = _positions(feeds)
        query_THD = _rotate(query_THD, position_T, feeds, attributes)
        key_TGD = _rotate(key_TGD, position_T, feeds, attributes)

    updated = [name for name in ("key_cache", "value_cache") if name in feeds]
    updated += [f"{x}_scale" for x in "kv" if getattr(attributes, f"{x}_quant_type") == "PER_TOKEN"]
    outputs = {f"{name}_out": feeds[name] if in_place else feeds[name].copy() for name in updated}
    slot_T = _slots(feeds, g)
    _write("key", key_TGD, slot_T, feeds, attributes, g, outputs)
    if value_TGD is not None:
        _write("value", value_TGD, slot_T, feeds, attributes, g, outputs)

    output_THD = np.zeros((g.tokens, g.query_heads, g.value_head_size))
    cumulative, past = feeds["cumulative_sequence_length"], feeds["past_seqlens"]
    for s in range(g.sequences):
        rows = slice(int(cumulative[s]), int(cumulative[s + 1]))
        output_THD[rows] = _attend(
            query_THD[rows], int(past[s]), feeds["block_table"][s], feeds, attributes, g, outputs
        )
    with np.errstate(over="ignore"):
        outputs["output"] = output_THD.reshape(g.tokens, g.query_heads * g.value_head_size).astype(feeds["query"].dtype)
    return outputs


def _split(feeds: Feeds, g: Geometry) -> tuple[Array, Array, Array | None]:
    """Query [T, H, D], key [T, G, D] and value [T, G, Dv] (None when LATENT) as float64."""
    query, key, value = feeds["query"], feeds.get("key"), feeds.get("value")
    if key is None:
        ends = np.cumsum([g.query_heads * g.head_size, g.kv_heads * g.head_size])
        query, key, value = np.split(query, ends, axis=1)

    def heads(x: Array, size: int) -> Array:
        return x.astype(np.float64).reshape(g.tokens, x.shape[1] // size, size)

    values = None if value is None else heads(value, g.value_head_size)
    return heads(query, g.head_size), heads(key, g.head_size), values


def _rms_norm(x_TnD: Array, weight_D: Array, epsilon: float) -> Array:
    normed: Array = x_TnD / np.sqrt(np.mean(x_TnD**2, axis=-1, keepdims=True) + epsilon)
    return normed * weight_D.astype(np.float64)


def _positions(feeds: Feeds) -> Array:
    """Absolute position of each packed token."""
    cumulative = feeds["cumulative_sequence_length"].astype(np.int64)
    new_S = np.diff(cumulative)
    within_T = np.arange(cumulative[-1]) - np.repeat(cumulative[:-1], new_S)
    position_T: Array = np.repeat(feeds["past_seqlens"].astype(np.int64), new_S) + within_T
    return position_T


def _rotate(x_TnD: Array, position_T: Array, feeds: Feeds, a: AttentionAttributes) -> Array:
    cos = feeds["cos_cache"].astype(np.float64)[position_T][:, None, :]
    sin = feeds["sin_cache"].astype(np.float64)[position_T][:, None, :]
    half = cos.shape[-1]
    if a.rotary_interleaved:
        first = a.rotary_offset + 2 * np.arange(half)
        second = first + 1
    else:
        first = a.rotary_offset + np.arange(half)
        second = first + half
    out = x_TnD.copy()
    out[..., first] = x_TnD[..., first] * cos - x_TnD[..., second] * sin
    out[..., second] = x_TnD[..., second] * cos + x_TnD[..., first] * sin
    return out


def _slots(feeds: Feeds, g: Geometry) -> Array:
    """Slot of each packed token, -1 for one that is not written."""
    if "slot_mapping" in feeds:
        return feeds["slot_mapping"].astype(np.int64)
    sequence_T = np.repeat(np.arange(g.sequences), np.diff(feeds["cumulative_sequence_length"]))
    position_T = _positions(feeds)
    block_T = feeds["block_table"].astype(np.int64)[sequence_T, position_T // g.block_size]
    return np.where(block_T == UNMAPPED, UNMAPPED, block_T * g.block_size + position_T % g.block_size)


def _write(
    which: str,
    x_TGD: Array,
    slot_T: Array,
    feeds: Feeds,
    a: AttentionAttributes,
    g: Geometry,
    outputs: dict[str, Array],
) -> None:
    """Stores the new keys or values at their slots in `outputs`."""
    written = slot_T != UNMAPPED
    x_TGD, block, offset = x_TGD[written], slot_T[written] // g.block_size, slot_T[written] % g.block_size
    letter = which[0]
    scale = _channel_scale(letter, feeds, a)
    if getattr(a, f"{letter}_quant_type") == "PER_TOKEN":
        scale_TG = (np.abs(x_TGD).max(axis=-1) / 127.0).astype(np.float32)
        outputs[f"{letter}_scale_out"][block, :, offset] = scale_TG
        scale = scale_TG.astype(np.float64)[..., None]
    outputs[f"{which}_cache_out"][block, offset] = encode(x_TGD, scale, g.cache_dtype)


def _channel_scale(letter: str, feeds: Feeds, a: AttentionAttributes) -> Any:
    """What x is divided by when stored and multiplied with when read, shaped to go with [..., G, D]."""
    quant = getattr(a, f"{letter}_quant_type")
    if quant == "PER_TENSOR":
        return feeds[f"{letter}_scale"].astype(np.float64)
    if quant == "PER_CHANNEL":
        return feeds[f"{letter}_scale"].astype(np.float64)[:, 0, :]
    return 1.0


def _attend(
    query_nHD: Array, past: int, table_M: Array, feeds: Feeds, a: AttentionAttributes, g: Geometry, caches: Feeds
) -> Array:
    """Attention of one sequence's new tokens over what is in the caches after the writes: [n, H, Dv]."""
    start, end = visible_range(past, len(query_nHD), a)
    position_P = np.arange(start, end)
    block_P = table_M.astype(np.int64)[position_P // g.block_size]
    mapped = block_P != UNMAPPED
    position_P, block_P = position_P[mapped], block_P[mapped]

    def read(which: str, head_size: int) -> Array:  # [P, H, head_size]: each query head reads its group's KV head
        scale = _channel_scale(which[0], feeds, a)
        if getattr(a, f"{which[0]}_quant_type") == "PER_TOKEN":
            scale = caches[f"{which[0]}_scale_out"][block_P, :, position_P % g.block_size].astype(np.float64)[..., None]
        stored = caches[f"{which}_cache_out"][block_P, position_P % g.block_size]
        return np.repeat(decode(stored, scale, g.cache_dtype, head_size), g.query_heads // g.kv_heads, axis=1)

    key_PHD = read("key", g.head_size)
    value_PHD = key_PHD[..., : g.value_head_size] if a.latent else read("value", g.value_head_size)
    scale = 1.0 / np.sqrt(g.head_size) if a.scale is None else a.scale
    slope_H = np.array(a.alibi_slopes or [0.0] * g.query_heads)
    sink_H = feeds["head_sink"].astype(np.float64) if "head_sink" in feeds else np.full(g.query_heads, -np.inf)

    output_nHD = np.zeros((len(query_nHD), g.query_heads, g.value_head_size))
    for i, query_HD in enumerate(query_nHD):
        p = past + i
        sees_P = np.ones(len(position_P), bool)
        if a.is_causal:
            sees_P &= position_P <= p
        if a.local_window_size > 0:
            sees_P &= position_P > p - a.local_window_size
        if not sees_P.any():
            continue  # a row without a visible key is zeros
        score_HP = scale * np.einsum("hd,phd->hp", query_HD, key_PHD[sees_P])
        score_HP += slope_H[:, None] * (position_P[sees_P] - p)
        if a.softcap > 0:
            score_HP = a.softcap * np.tanh(score_HP / a.softcap)
        top_H = np.maximum(score_HP.max(axis=1), sink_H)
        weight_HP = np.exp(score_HP - top_H[:, None])
        total_H = weight_HP.sum(axis=1) + np.exp(sink_H - top_H)
        output_nHD[i] = np.einsum("hp,phd->hd", weight_HP, value_PHD[sees_P]) / total_H[:, None]
    return output_nHD
