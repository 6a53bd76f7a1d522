"""Verifies a model too large to be run as a whole: each attention by itself, with its projections, in both models.

A slice begins at the hidden state that query, key and value are computed from and ends at the attention output. Both
models' slices are fed the same random hidden states: the source one sequence at a time, the converted one packed, in
two steps so that the second reads the cache. Weights are loaded one layer at a time. What is not in a slice was not
touched by the rewrite, or was proven by evaluation (structure.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from .bisect import attention_rows, own_channels
from .errors import VerificationError
from .evaluate import Array, Evaluator
from .graph import GraphView
from .passes import Analysis
from .recognise.site import AttentionSite
from .verify import TOLERANCES

__all__ = ["LayerOracle", "source_slices", "verify_slices"]

_LENGTHS = (19, 1, 7, 12)
_FIRST = (11, 1, 3, 12)  # tokens of each sequence in the first step
_BLOCK = 4


@dataclass(frozen=True)
class LayerOracle:
    """What the source's slice of one layer gives for hidden states at the value named `start`."""

    node: str
    start: str
    hidden: tuple[Array, ...]
    expected: tuple[Array, ...]


def source_slices(analysis: Analysis, *, progress: Callable[[str], None] = lambda _: None) -> list[LayerOracle]:
    """Runs the source's side of every slice. Must come before the rewrite: `analysis` is of the unedited source."""
    oracles = []
    for layer, site in enumerate(analysis.sites):
        progress(f"running layer {layer + 1} of {len(analysis.sites)} of the source")
        start = _common_origin(analysis.probe.view, site)
        evaluator = Evaluator(analysis.probe.model, analysis.probe.view)  # one a layer: it keeps the weights it read
        hidden = _hidden_states(analysis, start)
        expected = tuple(_source_rows(analysis, evaluator, site, start, h) for h in hidden)
        oracles.append(LayerOracle(site.node.name or "", start.name or "", tuple(hidden), expected))
    return oracles


def verify_slices(
    oracles: Sequence[LayerOracle],
    folder: Path,
    manifest: names.Manifest,
    *,
    accuracy: str,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compares every attention. Raises VerificationError with the first one that differs; returns what was done."""
    tolerance = TOLERANCES[accuracy]
    worst = 0.0
    converted = ir.load(folder / manifest.model_file)
    nodes = [n for n in converted.graph if n.op_type == spec.OP_TYPE]
    for layer, (oracle, node) in enumerate(zip(oracles, nodes, strict=True)):
        if any(node.inputs[i] is not None and node.inputs[i].producer() is not None for i in (3, 4)):  # type: ignore[union-attr]
            continue  # reads another layer's cache: no slice of one layer shows it
        progress(f"verifying layer {layer + 1} of {len(nodes)} by itself")
        packed = _packed_rows(converted, node, oracle.start, manifest, layer, oracle.hidden)
        heads, width = node.attributes["num_heads"].as_int(), oracle.expected[0].shape[1]
        actual = [own_channels(rows, width, heads) for rows in packed]
        deviation = float(np.std(np.concatenate(oracle.expected))) or 1.0
        difference = max(float(np.max(np.abs(a - e))) for a, e in zip(actual, oracle.expected, strict=True)) / deviation
        worst = max(worst, difference)
        if not difference <= tolerance:
            raise VerificationError(
                f"the converted attention of layer {layer} ('{oracle.node}') differs from its source by "
                f"{difference:.1e} of its deviation (limit {tolerance:.0e})"
            )
    return {
        "scope": "layer slices: the model is too large to be run as a whole here",
        "difference": worst,
        "tolerance": tolerance,
        "layers": len(nodes),
        "tokens": sum(_LENGTHS),
        "sequences": len(_LENGTHS),
    }


def _common_origin(view: GraphView, site: AttentionSite) -> ir.Value:
    """The nearest value that all token data of query, key and value passes."""
    pending = set(site.operands)
    while True:
        latest = view.latest(pending)
        producer = latest.producer()
        if len(pending) == 1 and (producer is None or producer.op_type == "Gather" or not view.ends_walk(producer)):
            return latest
        if producer is None:
            raise VerificationError(f"attention '{site.node.name}' has no common origin of its operands to cut at")
        pending.discard(latest)
        pending.update(view.data_inputs(producer))


def _hidden_states(analysis: Analysis, start: ir.Value) -> list[Array]:
    rng = np.random.default_rng(2)
    probe = analysis.probe
    return [rng.standard_normal(probe.shape(start, tokens, 0)).astype(probe.dtype(start)) for tokens in _LENGTHS]


def _source_rows(
    analysis: Analysis, evaluator: Evaluator, site: AttentionSite, start: ir.Value, hidden: Array
) -> Array:
    probe = analysis.probe
    tokens = hidden.shape[_token_axis(analysis, start)]
    feeds = probe.region_feeds([site.output.value], {start: hidden}, tokens, 0)
    return attention_rows(site, evaluator.run([site.output.value], feeds)[0], tokens)


def _token_axis(analysis: Analysis, value: ir.Value) -> int:
    affine = analysis.probe.affine(value) or ()
    return next(axis for axis, (_, per_new, _) in enumerate(affine) if per_new)


def _packed_rows(
    model: ir.Model, node: ir.Node, start: str, manifest: names.Manifest, layer: int, hidden: Sequence[Array]
) -> list[Array]:
    """The op's output `[tokens, H * Dv]` per sequence, in two packed steps."""
    graph = model.graph
    begin = next((v for n in graph for v in n.outputs if v.name == start), None)
    if begin is None:
        raise VerificationError(f"'{start}' is not part of the converted model")
    view = GraphView(graph, [begin], [])
    evaluator = Evaluator(model, view, custom_ops=True)
    axis = next(i for i, d in enumerate(hidden[0].shape) if d == _LENGTHS[0])
    blocks = [-(-n // _BLOCK) for n in _LENGTHS]
    caches = _empty_caches(node, manifest, layer, sum(blocks) + 1)
    parts: list[list[Array]] = [[] for _ in _LENGTHS]
    done = [0] * len(_LENGTHS)
    for counts in (_FIRST, tuple(n - f for n, f in zip(_LENGTHS, _FIRST, strict=True))):
        pieces = [np.take(h, range(d, d + c), axis) for h, d, c in zip(hidden, done, counts, strict=True)]
        feeds: dict[ir.Value, Array] = {begin: np.concatenate(pieces, axis)}
        positions = np.concatenate([np.arange(d, d + c) for d, c in zip(done, counts, strict=True)])
        by_name = _step_feeds(manifest, layer, counts, done, blocks) | {names.POSITION_IDS: positions} | caches
        feeds.update({v: by_name[v.name or ""] for v in graph.inputs if v.name in by_name})
        output, *updated = evaluator.run(list(node.outputs[:3]), feeds)
        caches = dict(zip(caches, updated, strict=True))
        for index, part in enumerate(np.split(output, np.cumsum(counts)[:-1])):
            parts[index].append(part.astype(np.float64))
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return [np.concatenate(p) for p in parts]


def _empty_caches(node: ir.Node, manifest: names.Manifest, layer: int, num_blocks: int) -> dict[str, Array]:
    facts = manifest.layers[layer]
    caches: dict[str, Array] = {}
    for position, size in ((spec.In.KEY_CACHE, facts.key_head_size), (spec.In.VALUE_CACHE, facts.value_head_size)):
        value = node.inputs[position]
        if value is not None and size is not None:
            shape = (num_blocks, _BLOCK, facts.kv_heads, size)
            caches[value.name or ""] = np.zeros(shape, (value.dtype or ir.DataType.FLOAT).numpy())
    return caches


def _step_feeds(
    manifest: names.Manifest, layer: int, counts: Sequence[int], done: Sequence[int], blocks: Sequence[int]
) -> dict[str, Array]:
    """Lengths, table and slots: each sequence owns consecutive blocks, in reverse order of use."""
    group = manifest.groups[manifest.layers[layer].group]
    firsts = np.concatenate([[1], 1 + np.cumsum(blocks)[:-1]])
    table = np.zeros((len(counts), max(blocks)), np.int32)
    slots: list[Array] = []
    for row, (first, number) in enumerate(zip(firsts, blocks, strict=True)):
        table[row, :number] = first + np.arange(number)[::-1]
        positions = np.arange(done[row], done[row] + counts[row])
        slots.append(table[row, positions // _BLOCK] * _BLOCK + positions % _BLOCK)
    return {
        names.CUMULATIVE: np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        names.PAST: np.asarray(done, np.int32),
        group.block_table: table,
        group.slot_mapping: np.concatenate(slots).astype(np.int32),
    }
