"""The rotary embedding inside PagedAttention nodes, as calibration needs it: keys as they would be elsewhere.

What a channel of a rotated key can reach depends on its position: a slow pair of channels turns by less than a right
angle within a text, and by more within the model's context. Scales taken from a short text alone would clip the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from ..evaluate import Array

__all__ = ["Rotation", "rotations"]


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Angles `[R, rotary_dim / 2]` by position, and the channels of each pair."""

    angles: Array
    first: Array
    second: Array

    def move(self, x_TGD: Array, from_T: Array, to_T: Array) -> Array:
        """Keys rotated for the positions `from_T` as they are at the positions `to_T`."""
        turn_TR = self.angles[to_T] - self.angles[from_T]
        cos, sin = np.cos(turn_TR)[:, None, :], np.sin(turn_TR)[:, None, :]
        moved: Array = x_TGD.copy()
        moved[..., self.first] = x_TGD[..., self.first] * cos - x_TGD[..., self.second] * sin
        moved[..., self.second] = x_TGD[..., self.second] * cos + x_TGD[..., self.first] * sin
        return moved


def rotations(model: ir.Model, manifest: names.Manifest) -> list[Rotation | None]:
    """By layer, the rotation that its PagedAttention node applies to keys; None where there is none in the node."""
    found: list[Rotation | None] = [None] * len(manifest.layers)
    index_of = {names.cache_name(i, "key"): i for i in range(len(manifest.layers))}
    for node in model.graph:
        if node.op_type != spec.OP_TYPE:
            continue
        cache = node.inputs[spec.In.KEY_CACHE]
        index = index_of.get("" if cache is None else cache.name or "")
        attributes = spec.AttentionAttributes.from_dict({n: a.value for n, a in node.attributes.items()})
        if index is not None and attributes.do_rotary:
            found[index] = _rotation(node, attributes)
    return found


def _rotation(node: ir.Node, attributes: spec.AttentionAttributes) -> Rotation | None:
    tables = [node.inputs[i] for i in (spec.In.COS_CACHE, spec.In.SIN_CACHE)]
    arrays = [t.const_value.numpy().astype(np.float64) for t in tables if t is not None and t.const_value is not None]
    if len(arrays) != 2:
        return None
    half = arrays[0].shape[1]
    if attributes.rotary_interleaved:
        first = attributes.rotary_offset + 2 * np.arange(half)
        second = first + 1
    else:
        first = attributes.rotary_offset + np.arange(half)
        second = first + half
    return Rotation(angles=np.arctan2(arrays[1], arrays[0]), first=first, second=second)
