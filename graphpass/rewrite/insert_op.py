"""Puts a PagedAttention node in the place of each recognised attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from ..recognise.site import AttentionSite, Operand
from .builder import Builder
from .padding import cut_heads, pad_heads, padded
from .shared import cache_owners

__all__ = ["PagedInputs", "Place", "assign_groups", "attributes_of", "insert_attention"]


@dataclass(frozen=True, kw_only=True)
class PagedInputs:
    """The graph inputs that every PagedAttention node shares; block tables and slots per cache group.

    Heads are padded to a multiple of `head_multiple` channels.
    """

    cumulative: ir.Value
    past: ir.Value
    block_tables: tuple[ir.Value, ...]
    slot_mappings: tuple[ir.Value, ...] = ()
    metadata: ir.Value | None = None
    head_multiple: int = 1

    def values(self) -> list[ir.Value]:
        """All of them, in the order of a converted model's inputs."""
        last = [] if self.metadata is None else [self.metadata]
        return [self.cumulative, self.past, *self.block_tables, *self.slot_mappings, *last]


def assign_groups(sites: Sequence[AttentionSite]) -> tuple[names.CacheGroup, ...]:
    """Cache groups by retention: the full one first, then windows from large to small. A sole group has plain names."""
    owners = cache_owners(sites)
    kept = [site for index, site in enumerate(sites) if owners[index] == index]
    windows = {site.score.window for site in kept}
    ordered = sorted(windows, key=lambda w: -(w if w is not None else 1 << 62))
    first_number = 0 if None in windows or len(windows) == 1 else 1
    return tuple(
        names.CacheGroup(
            window=window,
            layers=tuple(i for i, site in enumerate(kept) if site.score.window == window),
            block_table=names.block_table_name(first_number + number),
            slot_mapping=names.slot_mapping_name(first_number + number),
        )
        for number, window in enumerate(ordered)
    )


def attributes_of(site: AttentionSite) -> spec.AttentionAttributes:
    """The op's attributes for a site."""
    scale = site.score.scale * site.query.scale * site.key.scale
    return spec.AttentionAttributes(
        num_heads=site.heads,
        kv_num_heads=site.kv_heads,
        scale=float(np.float32(scale)),
        softcap=float(np.float32(site.score.softcap)),
        local_window_size=-1 if site.score.window is None else site.score.window,
        do_rotary=int(site.rotary is not None),
        rotary_interleaved=int(site.rotary is not None and site.rotary.interleaved),
        rotary_offset=0 if site.rotary is None else site.rotary.offset,
        qk_norm_epsilon=float(np.float32(site.norm_epsilon)),
        kv_cache_layout="LATENT" if site.latent else "SEPARATE",
        v_head_size=site.value.size if site.latent else 0,
        alibi_slopes=tuple(float(np.float32(s)) for s in site.score.slopes),
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which cache an attention reads: its number and group, and the outputs of its owner when it is another layer's."""

    layer: int
    cache: int
    group: int
    owned: tuple[ir.Value, ...] = ()


def insert_attention(
    builder: Builder, site: AttentionSite, place: Place, inputs: PagedInputs, dtype: ir.DataType
) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
    """Inserts one node and rewires its output.

    Returns what takes the place of the site's output, and the cache inputs and outputs (key, value), which are none
    for an attention that only reads another layer's.
    """
    group = place.group
    caches = list(place.owned) or [
        _cache_input(place, part, operand, dtype, inputs)
        for part, operand in (("key", site.key), ("value", site.value))
        if part == "key" or not site.latent
    ]
    kind = dtype.numpy()
    tables = {} if site.rotary is None else {"cos_cache": site.rotary.cos, "sin_cache": site.rotary.sin}
    weights = {"q_norm_weight": site.q_norm, "k_norm_weight": site.k_norm, **tables}
    if site.score.sinks:
        weights["head_sink"] = np.array(site.score.sinks)
    named: dict[str, ir.Value | None] = {
        **_operand_rows(builder, site, inputs.head_multiple),
        "key_cache": caches[0],
        "value_cache": None if site.latent else caches[1],
        "cumulative_sequence_length": inputs.cumulative,
        "past_seqlens": inputs.past,
        "block_table": inputs.block_tables[group],
        "slot_mapping": _slots(builder, place, inputs),
        "attention_metadata": inputs.metadata,
        **{
            name: builder.constant(np.asarray(array, kind), name)
            for name, array in weights.items()
            if array is not None
        },
    }
    attributes = attributes_of(site)
    own = spec.needs_pagegraft_domain(
        attributes,
        compute_dtype=str(kind),
        head_size=padded(site.key.size, inputs.head_multiple),
        value_head_size=padded(site.value.size, inputs.head_multiple),
    )
    outputs = builder.node(
        spec.OP_TYPE,
        spec.ordered_inputs(named),
        attributes.to_dict(),
        domain=spec.PAGEGRAFT_DOMAIN if own else spec.MICROSOFT_DOMAIN,
        outputs=1 if place.owned else 1 + len(caches),
        stem=f"layer_{place.layer}/{spec.OP_TYPE}",
    )
    for out, cache, part in zip(outputs[1:], caches, ("key", "value"), strict=False):
        out.name = names.cache_name(place.cache, part, present=True)
        out.shape, out.type = cache.shape, cache.type
    outputs[0].type = ir.TensorType(dtype)
    outputs[0].shape = ir.Shape(["tokens", site.heads * padded(site.value.size, inputs.head_multiple)])
    attended = cut_heads(builder, outputs[0], site.heads, site.value.size, inputs.head_multiple)
    if site.value.scale != 1.0:  # attention is linear in its values
        attended = builder.node("Mul", [attended, builder.constant(np.array(site.value.scale, kind))])[0]
    return _rewire(builder, site, attended), [] if place.owned else caches, outputs[1:]


def _slots(builder: Builder, place: Place, inputs: PagedInputs) -> ir.Value | None:
    """Where new tokens are written: nowhere for an attention that reads another layer's cache."""
    if not place.owned:
        return inputs.slot_mappings[place.group] if inputs.slot_mappings else None
    nowhere = ir.tensor(np.array([spec.UNMAPPED], np.int32))
    shape = builder.node("Shape", [inputs.slot_mappings[place.group]])[0]
    return builder.node("ConstantOfShape", [shape], {"value": nowhere}, stem="unwritten")[0]


def _operand_rows(builder: Builder, site: AttentionSite, multiple: int) -> dict[str, ir.Value | None]:
    """Query, key and value as `[T, heads * size]`, heads padded; packed ones are taken apart when they must be."""
    operands = {"query": site.query, "key": site.key, "value": site.value}
    widths = [o.heads * o.size for o in operands.values()]
    same = all(padded(o.size, multiple) == o.size for o in operands.values())
    packed = not site.key.values
    if packed and same:
        return {"query": _rows(builder, site.query, sum(widths)), "key": None, "value": None}
    if packed:
        joined = _rows(builder, site.query, sum(widths))
        sizes = builder.constant(np.array(widths, np.int64), "widths")
        parts: list[ir.Value | None] = [*builder.node("Split", [joined, sizes], {"axis": 1}, outputs=3)]
    else:
        parts = [_rows(builder, o, width) for o, width in zip(operands.values(), widths, strict=True)]
    return {
        name: None if rows is None else pad_heads(builder, rows, operand.heads, operand.size, multiple)
        for (name, operand), rows in zip(operands.items(), parts, strict=True)
    }


def _rows(builder: Builder, operand: Operand, width: int) -> ir.Value | None:
    """The operand as `[T, width]`; None for one that is packed behind the query, or read from the keys."""
    if operand.parts:
        return _joined_rows(builder, operand, width)
    if operand.value is None:
        return None
    value = operand.value if operand.perm is None else builder.transpose(operand.value, operand.perm)
    return builder.reshape(value, [-1, width])


def _joined_rows(builder: Builder, operand: Operand, width: int) -> ir.Value:
    """The parts of an operand side by side in each head, as `[T, width]`."""
    pieces: list[ir.Value] = []
    for part in operand.parts:
        rows = _rows(builder, part, part.heads * part.size)
        if rows is None or part.value is None:
            raise ValueError("a part of an operand has no value")
        if part.scale != 1.0:
            kind = (part.value.dtype or ir.DataType.FLOAT).numpy()
            rows = builder.node("Mul", [rows, builder.constant(np.array(part.scale, kind))])[0]
        repeats = operand.heads // part.heads
        if repeats > 1:
            rows = builder.reshape(rows, [-1, part.heads, 1, part.size])
            rows = builder.node("Tile", [rows, builder.constant(np.array([1, 1, repeats, 1], np.int64))])[0]
        pieces.append(builder.reshape(rows, [-1, operand.heads, part.size]))
    return builder.reshape(builder.node("Concat", pieces, {"axis": -1})[0], [-1, width])


def _rewire(builder: Builder, site: AttentionSite, attended: ir.Value) -> ir.Value:
    replaced = site.output.value
    users = list(replaced.uses())
    value = builder.reshape(attended, site.output.dims)
    if site.output.perm is not None:
        value = builder.transpose(value, site.output.perm)
    for user, position in users:
        user.replace_input_with(position, value)
    return value


def _cache_input(place: Place, part: str, operand: Operand, dtype: ir.DataType, inputs: PagedInputs) -> ir.Value:
    blocks = (inputs.block_tables[place.group].name or "").replace("block_table", "num_blocks")
    return ir.Value(
        name=names.cache_name(place.cache, part),
        shape=ir.Shape([blocks, "block_size", operand.heads, padded(operand.size, inputs.head_multiple)]),
        type=ir.TensorType(dtype),
    )
