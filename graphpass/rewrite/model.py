"""Edits an analysed model in place: the one place where all parts of the rewrite come together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from ..analysis import Analysis
from ..options import Target
from ..recognise.site import AttentionSite
from .builder import Builder
from .fold import clean_up, detach_caches, drop_identical_expands, fold
from .insert_op import PagedInputs, Place, insert_attention
from .logits_rows import gather_logits
from .packed_tokens import graph_input, pack_tokens
from .padding import padded
from .shared import cache_numbers, cache_owners
from .targets import check_target, head_multiple, positions_from_lengths
from .tidy import divide_instead_of_reciprocal

__all__ = ["rewrite"]


@dataclass(frozen=True)
class _Attentions:
    """What inserting all attentions made: cache inputs and outputs, geometry, and what replaced each output."""

    inputs: list[ir.Value]
    outputs: list[ir.Value]
    layers: tuple[names.CacheLayer, ...]
    replaced: dict[ir.Value, ir.Value]


def rewrite(model: ir.Model, analysis: Analysis, target: Target = "cpu") -> tuple[names.CacheLayer, ...]:
    """Edits an analysed model in place. Returns the cache geometry per layer.

    Raises NotConvertible, before the first edit, when the target's limits do not allow the model.
    """
    check_target(analysis, target)
    graph, probe = model.graph, analysis.probe
    builder = Builder(graph)
    joined = {
        link.joined: link.new
        for site in analysis.sites
        for link in (*site.key_cache, *site.value_cache)
        if link.new is not None
    }
    empty = {
        cache: np.zeros([0 if d is None else d for d in probe.cache_shape(cache)], probe.dtype(cache))
        for cache in analysis.interface.caches
    }
    shared = _shared_inputs(analysis, target)
    tokens = graph_input(names.INPUT_IDS, ir.DataType.INT64, "tokens")
    positions = graph_input(names.POSITION_IDS, ir.DataType.INT64, "tokens")
    computed = positions_from_lengths(builder, tokens, shared) if target == "ort-cuda" else None
    pack_tokens(builder, probe, analysis.structure, tokens, positions if computed is None else computed)
    rows = graph_input(names.LOGITS_INDICES, ir.DataType.INT32, "rows")
    made = _insert_all(builder, analysis, shared)
    drop_identical_expands(builder, probe)
    place = replace(analysis.logits, value=made.replaced.get(analysis.logits.value, analysis.logits.value))
    logits = gather_logits(builder, place, analysis.interface.logits, rows)
    graph.outputs[:] = [logits, *made.outputs]
    detach_caches(builder, joined, empty)
    fold(builder, probe, analysis.structure)
    divide_instead_of_reciprocal(builder)
    others = [positions] if computed is None else []
    graph.inputs[:] = [tokens, *others, *shared.values(), rows, *made.inputs]
    clean_up(model)
    if any(node.domain == spec.PAGEGRAFT_DOMAIN for node in graph):
        model.opset_imports.setdefault(spec.PAGEGRAFT_DOMAIN, 1)
    # onnxruntime's own fusions put nodes of this domain into the graph and need its version from the model.
    model.opset_imports.setdefault(spec.MICROSOFT_DOMAIN, 1)
    return made.layers


def _shared_inputs(analysis: Analysis, target: Target) -> PagedInputs:
    tables = tuple(
        graph_input(g.block_table, ir.DataType.INT32, "sequences", f"{g.block_table}_width") for g in analysis.groups
    )
    slots = tuple(graph_input(g.slot_mapping, ir.DataType.INT32, "tokens") for g in analysis.groups)
    stock = target == "ort-cuda"
    return PagedInputs(
        cumulative=graph_input(names.CUMULATIVE, ir.DataType.INT32, "sequences_plus_one"),
        past=graph_input(names.PAST, ir.DataType.INT32, "sequences"),
        block_tables=tables,
        slot_mappings=() if stock else slots,
        metadata=graph_input("attention_metadata", ir.DataType.INT32, 3) if stock else None,
        head_multiple=head_multiple(target),
    )


def _insert_all(builder: Builder, analysis: Analysis, shared: PagedInputs) -> _Attentions:
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []
    layers: list[names.CacheLayer] = []
    replaced: dict[ir.Value, ir.Value] = {}
    owners, numbers = cache_owners(analysis.sites), cache_numbers(analysis.sites)
    owned: dict[int, tuple[ir.Value, ...]] = {}
    for layer, site in enumerate(analysis.sites):
        group = next(i for i, g in enumerate(analysis.groups) if numbers[layer] in g.layers)
        place = Place(layer=layer, cache=numbers[layer], group=group, owned=owned.get(owners[layer], ()))
        replaced[site.output.value], ins, outs = insert_attention(builder, site, place, shared, analysis.compute_dtype)
        inputs += ins
        outputs += outs
        if owners[layer] == layer:
            owned[layer] = tuple(outs)
            layers.append(_layer(site, group, analysis.compute_dtype, shared.head_multiple))
    return _Attentions(inputs, outputs, tuple(layers), replaced)


def _layer(site: AttentionSite, group: int, dtype: ir.DataType, multiple: int) -> names.CacheLayer:
    kind = str(dtype.numpy())
    return names.CacheLayer(
        group=group,
        kv_heads=site.kv_heads,
        key_head_size=padded(site.key.size, multiple),
        value_head_size=None if site.latent else padded(site.value.size, multiple),
        key_dtype=kind,
        value_dtype=None if site.latent else kind,
    )
