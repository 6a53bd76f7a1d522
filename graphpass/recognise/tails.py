"""What lies between a cache and the operand taken from it: in the source it sees all tokens, when packed the new ones.

Whether that makes a difference is found by evaluation: the operand of ragged sequences packed together must be what the
last rows of each sequence's own operand are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..evaluate import Array, Unevaluable
from ..graph import is_constant, node_inputs
from .positions import packed_feeds
from .probe import Probe, Size
from .site import AttentionSite, CacheLink

__all__ = ["Tail", "find_tails"]

#: Sequences are evaluated up to this many elements of the operand.
_LARGEST_OPERAND = 1 << 22


@dataclass(frozen=True)
class Tail:
    """The nodes from the joined caches of `links` to `operand`, in graph order."""

    operand: ir.Value
    links: tuple[CacheLink, ...]
    nodes: tuple[ir.Node, ...]

    def structural(self, probe: Probe) -> list[ir.Value]:
        """The structural values that its nodes read."""
        values = (v for node in self.nodes for v in node_inputs(node))
        return list(dict.fromkeys(v for v in values if not probe.view.taint(v) and not is_constant(v)))

    def agrees(self, probe: Probe, positions: Mapping[ir.Value, int], batches: Sequence[tuple[Size, Size]]) -> bool:
        """True when packing pairs of sequences of (new, past) tokens gives what each of them gives alone."""
        axes = [a for a, dim in enumerate(probe.affine(self.operand) or ()) if dim == (0, 1, 1)]
        if len(axes) != 1:
            return False
        most = max(64, _LARGEST_OPERAND // int(np.prod(probe.shape(self.operand, 1, 0))))
        try:
            return all(
                self._agrees(probe, positions, pair, axes[0]) for pair in batches if all(n + p <= most for n, p in pair)
            )
        except Unevaluable:
            return False

    def _agrees(self, probe: Probe, positions: Mapping[ir.Value, int], pair: tuple[Size, Size], axis: int) -> bool:
        rng = np.random.default_rng(13)
        alone: list[Array] = []
        new_entries: dict[ir.Value, list[Array]] = {link.joined: [] for link in self.links}
        for new, past in pair:
            given: dict[ir.Value, Array] = {}
            for link in self.links:
                shape = probe.shape(link.joined, new, past)
                given[link.joined] = rng.standard_normal(shape).astype(probe.dtype(link.joined))
                along = link.node.attributes["axis"].as_int() % len(shape)
                new_entries[link.joined].append(_last(given[link.joined], new, along))
            alone.append(_last(probe.region([self.operand], given, new, past)[0], new, axis))
        packed = np.concatenate([np.arange(p, p + n) for n, p in pair])
        feeds = packed_feeds(probe, self.structural(probe), positions, packed)
        for link in self.links:
            along = link.node.attributes["axis"].as_int() % new_entries[link.joined][0].ndim
            feeds[link.joined] = np.concatenate(new_entries[link.joined], along)
        actual = probe.evaluator.run([self.operand], feeds)[0]
        expected = np.concatenate(alone, axis)
        tolerance = 1e-2 if expected.dtype == np.float16 else 1e-4
        return actual.shape == expected.shape and np.allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _last(array: Array, count: int, axis: int) -> Array:
    return array.take(range(array.shape[axis] - count, array.shape[axis]), axis)


def find_tails(probe: Probe, sites: Sequence[AttentionSite]) -> list[Tail]:
    """The tails of all operands that are taken from behind their cache."""
    tails: list[Tail] = []
    for site in sites:
        keys = [(part, site.key_cache) for part in site.key.parts or (site.key,)]
        for operand, links in (*keys, (site.value, site.value_cache)):
            appended = tuple(link for link in links if link.new is not None)
            if not appended or operand.value is None:
                continue
            reached = {link.joined for link in appended}
            nodes: list[ir.Node] = []
            for node in probe.view.between(list(reached), operand.value):
                if any(v in reached for v in node_inputs(node)):
                    reached.update(node.outputs)
                    nodes.append(node)
            if nodes and operand.value in reached:
                tails.append(Tail(operand.value, appended, tuple(nodes)))
    return tails
