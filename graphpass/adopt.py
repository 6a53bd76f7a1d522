"""Takes over models that another tool built around PagedAttention already: only their interface changes.

The attentions stay as they are; inputs get the names and the slot mapping of a converted model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from .errors import NotConvertible
from .evaluate import Array
from .packed import PackedModel
from .report import LayerReport
from .rewrite.builder import Builder
from .rewrite.packed_tokens import graph_input

__all__ = ["Adopted", "PagedOracle", "adopt_paged", "is_paged"]


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What a manifest and a report need of a model that was paged already."""

    groups: tuple[names.CacheGroup, ...]
    layers: tuple[names.CacheLayer, ...]
    reports: tuple[LayerReport, ...]
    vocab: int
    compute_dtype: str
    max_positions: int | None


def is_paged(model: ir.Model) -> bool:
    """True when the model has PagedAttention nodes."""
    return any(node.op_type == spec.OP_TYPE for node in model.graph)


def adopt_paged(model: ir.Model) -> Adopted:
    """Edits a paged model in place. Raises NotConvertible, before the first edit, for what it cannot take over."""
    nodes = [node for node in model.graph if node.op_type == spec.OP_TYPE]
    parts = [_Attention(node) for node in nodes]
    tokens, rows = _token_input(model.graph), _rows_input(model.graph)
    windows = sorted({p.window for p in parts}, key=lambda w: -(w if w is not None else 1 << 62))
    first = 0 if None in windows or len(windows) == 1 else 1
    groups = tuple(
        names.CacheGroup(
            window=window,
            layers=tuple(i for i, p in enumerate(parts) if p.window == window),
            block_table=names.block_table_name(first + number),
            slot_mapping=names.slot_mapping_name(first + number),
        )
        for number, window in enumerate(windows)
    )
    logits = model.graph.outputs[0]
    vocab = logits.shape[-1] if logits.shape is not None else None
    if not isinstance(vocab, int):
        raise NotConvertible(f"the width of output '{logits.name}' is not stated", kind="interface")
    _rewire(model.graph, parts, groups, tokens, rows)
    limits = [p.limit for p in parts if p.limit is not None]
    return Adopted(
        groups=groups,
        layers=tuple(
            p.layer(next(i for i, g in enumerate(groups) if index in g.layers)) for index, p in enumerate(parts)
        ),
        reports=tuple(p.report(index) for index, p in enumerate(parts)),
        vocab=vocab,
        compute_dtype=parts[0].dtype,
        max_positions=min(limits, default=None),
    )


class _Attention:
    """One PagedAttention node, read and checked."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        values = {name: _value(a) for name, a in node.attributes.items()}
        try:
            self.attributes = spec.AttentionAttributes.from_dict(values)
        except TypeError:  # one that has no default
            raise NotConvertible(
                "PagedAttention lacks num_heads or kv_num_heads", node.name or "", kind="fused"
            ) from None
        inputs = [*node.inputs, *[None] * (len(spec.INPUTS) - len(node.inputs))]
        self.inputs = dict(zip((p.name for p in spec.INPUTS), inputs, strict=True))
        self.caches = [self.inputs["key_cache"], self.inputs["value_cache"]]
        if self.attributes.latent or self.attributes.k_quant_type != "NONE":
            raise NotConvertible("a paged model with latent or quantised caches", node.name or "", kind="cache")
        for cache in self.caches:
            if cache is None or not cache.is_graph_input():
                raise NotConvertible("a paged attention does not read a cache input", node.name or "", kind="cache")

    @property
    def window(self) -> int | None:
        return None if self.attributes.local_window_size < 0 else self.attributes.local_window_size

    @property
    def dtype(self) -> str:
        return str(self._cache(0).dtype.numpy())  # type: ignore[union-attr]

    @property
    def limit(self) -> int | None:
        table = self.inputs["cos_cache"]
        return None if table is None or table.const_value is None else int(table.const_value.shape.numpy()[0])

    def _cache(self, which: int) -> ir.Value:
        value = self.caches[which]
        if value is None:
            raise NotConvertible("a paged attention does not read a cache input", self.node.name or "", kind="cache")
        return value

    def size(self, which: int) -> int:
        """Head size of the key (0) or value (1) cache."""
        shape = self._cache(which).shape
        size = shape[-1] if shape is not None and len(shape) == 4 else None
        if not isinstance(size, int):
            raise NotConvertible(f"the shape of '{self._cache(which).name}' is not stated", kind="cache")
        return size

    def layer(self, group: int) -> names.CacheLayer:
        return names.CacheLayer(
            group=group,
            kv_heads=self.attributes.kv_num_heads,
            key_head_size=self.size(0),
            value_head_size=self.size(1),
            key_dtype=self.dtype,
            value_dtype=self.dtype,
        )

    def report(self, index: int) -> LayerReport:
        a = self.attributes
        return LayerReport(
            layer=index,
            node=self.node.name or "",
            form=spec.OP_TYPE,
            heads=a.num_heads,
            kv_heads=a.kv_num_heads,
            key_head_size=self.size(0),
            value_head_size=self.size(1),
            mask="causal" if self.window is None else f"window {self.window}",
            window=self.window,
            scale=a.scale if a.scale is not None else self.size(0) ** -0.5,
            softcap=a.softcap,
            sinks=self.inputs["head_sink"] is not None,
            alibi_slopes=a.alibi_slopes,
            fused=("rotary",) if a.do_rotary else (),
            caches=tuple(c.name or "" for c in self.caches if c is not None),
            nodes_dropped=0,
        )


def _value(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.STRING:
        return attribute.as_string()
    if attribute.type == ir.AttributeType.FLOATS:
        return tuple(attribute.as_floats())
    return attribute.as_float() if attribute.type == ir.AttributeType.FLOAT else attribute.as_int()


def _token_input(graph: ir.Graph) -> ir.Value:
    found = [v for v in graph.inputs if v.dtype == ir.DataType.INT64 and len(v.shape or ()) == 1]
    named = [v for v in found if v.name == names.INPUT_IDS] or found
    if len(named) != 1:
        raise NotConvertible("a paged model without one flat token input", kind="interface")
    return named[0]


def _rows_input(graph: ir.Graph) -> ir.Value | None:
    return next((v for v in graph.inputs if v.name == names.LOGITS_INDICES), None)


def _rewire(
    graph: ir.Graph,
    parts: list[_Attention],
    groups: tuple[names.CacheGroup, ...],
    tokens: ir.Value,
    rows: ir.Value | None,
) -> None:
    lengths = {
        "cumulative_sequence_length": graph_input(names.CUMULATIVE, ir.DataType.INT32, "sequences_plus_one"),
        "past_seqlens": graph_input(names.PAST, ir.DataType.INT32, "sequences"),
    }
    positions = next((v for v in graph.inputs if v.name == names.POSITION_IDS), None)
    positions = positions or graph_input(names.POSITION_IDS, ir.DataType.INT64, "tokens")
    tables: list[ir.Value] = []
    slots: list[ir.Value] = []
    for group in groups:
        tables.append(graph_input(group.block_table, ir.DataType.INT32, "sequences", f"{group.block_table}_width"))
        slots.append(graph_input(group.slot_mapping, ir.DataType.INT32, "tokens"))
    caches: list[ir.Value] = []
    presents: list[ir.Value] = []
    for index, part in enumerate(parts):
        number = next(i for i, g in enumerate(groups) if index in g.layers)
        named = {**part.inputs, "block_table": tables[number], "slot_mapping": slots[number], **lengths}
        del named["attention_metadata"]
        ordered = spec.ordered_inputs(named)
        part.node.resize_inputs(len(ordered))
        for position, value in enumerate(ordered):
            part.node.replace_input_with(position, value)
        part.node.resize_outputs(3)
        for which, name in enumerate(("key", "value")):
            cache, present = part.caches[which], part.node.outputs[which + 1]
            if cache is not None:
                cache.name = names.cache_name(index, name)
                present.name = names.cache_name(index, name, present=True)
                present.shape, present.type = cache.shape, cache.type
                caches.append(cache)
                presents.append(present)
    for role, value in lengths.items():
        for old in {p.inputs[role] for p in parts}:
            if old is not None:
                old.replace_all_uses_with(value)
    logits = graph.outputs[0]
    if rows is None:
        rows = graph_input(names.LOGITS_INDICES, ir.DataType.INT32, "rows")
        builder = Builder(graph)
        gathered = builder.node("Gather", [logits, rows], {"axis": 0})[0]
        gathered.type, gathered.shape = logits.type, logits.shape
        logits = gathered
    logits.name = names.LOGITS
    tokens.name = names.INPUT_IDS
    kept = [tokens, positions, *lengths.values(), *tables, *slots, rows, *caches]
    for value in graph.inputs:
        if value not in kept and value.uses():
            raise NotConvertible(f"input '{value.name}' of a paged model has no role", kind="interface")
    graph.inputs[:] = kept
    graph.outputs[:] = [logits, *presents]


class PagedOracle:
    """A source that is paged already, run through our kernel one sequence at a time."""

    def __init__(self, file: Path, manifest: names.Manifest) -> None:
        self._model = PackedModel(file, replace(manifest), num_blocks=2048, block_size=4)
        self._next = 0

    def logits(self, tokens: Sequence[int]) -> Array:
        """Teacher-forced logits `[tokens, vocab]` of one sequence, as a sequence of its own."""
        self._next += 1
        return self._model.step([(self._next, tokens)])[0]
