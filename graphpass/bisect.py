"""Finds the first attention whose output differs between a source and its conversion, by exposing both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from .evaluate import Array
from .packed import PackedModel
from .passes import Analysis
from .recognise.site import AttentionSite

__all__ = ["Difference", "attention_rows", "first_difference", "own_channels"]


@dataclass(frozen=True)
class Difference:
    """The first attention that differs: its layer, the source's node, and by how much of its output's deviation."""

    layer: int
    node: str
    size: float

    def sentence(self) -> str:
        """For an error message."""
        return f"the first attention whose output differs is layer {self.layer}, '{self.node}', by {self.size:.1e}"


def first_difference(
    analysis: Analysis, folder: Path, manifest: names.Manifest, tokens: Sequence[int], *, tolerance: float
) -> Difference | None:
    """Compares attention outputs of one sequence, layer by layer.

    `analysis` is of the unedited source. The sequence is computed in two chunks, so that the second reads the cache.
    None means that all attentions agree: the difference comes from elsewhere (positions behind them, or the logits).
    """
    expected = _source_outputs(analysis, tokens)
    actual = _converted_outputs(folder, manifest, tokens)
    for layer, (site, right, found) in enumerate(zip(analysis.sites, expected, actual, strict=True)):
        deviation = float(np.std(right)) or 1.0
        size = float(np.max(np.abs(own_channels(found, right.shape[1], site.heads) - right))) / deviation
        if not size <= tolerance:
            return Difference(layer, site.node.name or "", size)
    return None


def _source_outputs(analysis: Analysis, tokens: Sequence[int]) -> list[Array]:
    probe = analysis.probe
    feeds = {**probe.graph_feeds(len(tokens), 0), **probe.cache_feeds(0)}
    given = probe.interface.tokens
    feeds[given] = np.asarray([tokens], feeds[given].dtype)
    values = probe.evaluator.run([site.output.value for site in analysis.sites], feeds)
    return [attention_rows(site, v, len(tokens)) for site, v in zip(analysis.sites, values, strict=True)]


def attention_rows(site: AttentionSite, value: Array, tokens: int) -> Array:
    """A value at the site's output as `[T, H * Dv]`."""
    if site.output.perm is not None:
        value = value.transpose([int(a) for a in np.argsort(site.output.perm)])
    return value.reshape(tokens, -1).astype(np.float64)


def own_channels(rows: Array, width: int, heads: int) -> Array:
    """The op's output `[T, H * padded size]` as `[T, width]` in float64: heads may be padded for a target."""
    return rows.reshape(len(rows), heads, -1)[:, :, : width // heads].reshape(len(rows), width).astype(np.float64)


def _converted_outputs(folder: Path, manifest: names.Manifest, tokens: Sequence[int]) -> list[Array]:
    """The op outputs per layer; external data stays where it is, so the exposing graph lies beside the model."""
    proto = onnx.load(folder / manifest.model_file, load_external_data=False)
    exposed = [n.output[0] for n in proto.graph.node if n.op_type == spec.OP_TYPE]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in exposed)
    path = folder / ".exposed.onnx"
    try:
        path.write_bytes(proto.SerializeToString())
        model = PackedModel(path, manifest, num_blocks=4 + len(tokens), block_size=4, exposed=exposed)
        half = len(tokens) // 2
        parts = []
        for piece in (tokens[:half], tokens[half:]):
            model.step([(0, piece)])
            parts.append([model.last_exposed[name] for name in exposed])
        return [np.concatenate(pair) for pair in zip(*parts, strict=True)]
    finally:
        path.unlink(missing_ok=True)
