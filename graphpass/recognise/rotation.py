"""What a region does to the vector of one head - rotation by position, norm, gain: read off matrices, and applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array
from .site import Operand

__all__ = ["HeadForm", "Place", "apply_form", "norms_agree", "pair_gain", "pairs", "rotated_channels"]


@dataclass(frozen=True)
class Place:
    """A candidate value: `[T, heads, size]` in its flat order, or `[1, heads, T, size]` when `perm` is given."""

    value: ir.Value
    perm: tuple[int, ...] | None


@dataclass(frozen=True)
class HeadForm:
    """What the region from `value` to an operand does to the vector of one head."""

    value: ir.Value
    perm: tuple[int, ...] | None
    interleaved: bool
    offset: int
    width: int
    gain: float
    weight: np.ndarray[Any, Any] | None
    epsilon: float

    @property
    def place(self) -> Place:
        """Where the form starts."""
        return Place(self.value, self.perm)

    @property
    def shape(self) -> tuple[bool, int, int]:
        return self.interleaved, self.offset, self.width


def pair_gain(form: HeadForm, operand: Operand, first: Array, second: Array) -> Any:
    """What the sine of each pair is multiplied by: the gain of the channel it came from."""
    if form.weight is None:
        return form.gain
    return form.weight[first] / np.sqrt(len(first) / operand.size + form.epsilon)


def pairs(interleaved: bool, offset: int, width: int) -> tuple[Array, Array]:
    """Channels that form the first and second member of each rotated pair."""
    half = width // 2
    if interleaved:
        first = offset + 2 * np.arange(half)
        return first, first + 1
    first = offset + np.arange(half)
    return first, first + half


def rotated_channels(matrix: Array) -> tuple[bool, int, int] | None:
    """(interleaved, offset, width) of the rotation that a matrix is; width 0 for the identity; None for none."""
    size = matrix.shape[0]
    off = np.abs(matrix - np.diag(np.diag(matrix))) > 1e-4
    if not off.any():
        return (False, 0, 0) if np.allclose(np.diag(matrix), 1.0, atol=1e-3) else None
    partners = off.sum(axis=1)
    channels = np.flatnonzero(partners)
    if partners.max() > 1:
        return None
    partner = {int(c): int(np.flatnonzero(off[c])[0]) for c in channels}
    lowest = min(partner)
    interleaved = partner[lowest] == lowest + 1 and len(partner) > 2
    if interleaved:
        return _checked(True, lowest - lowest % 2, 2 * (max(partner) // 2 - lowest // 2 + 1), partner)
    half = partner[lowest] - lowest
    return _checked(False, lowest, 2 * half, partner) if lowest + 2 * half <= size else None


def _checked(interleaved: bool, offset: int, width: int, partner: dict[int, int]) -> tuple[bool, int, int] | None:
    first, second = pairs(interleaved, offset, width)
    expected = dict(zip(first.tolist(), second.tolist(), strict=True))
    expected.update({b: a for a, b in expected.items()})
    if any(expected.get(c) != p for c, p in partner.items()) or offset % 8:
        return None
    return interleaved, offset, width


def apply_form(form: HeadForm, x_THD: Array, cos: Array, sin: Array, past: int) -> Array:
    """What the op computes, in float64."""
    y = x_THD
    if form.weight is not None:
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + form.epsilon) * form.weight
    y = y * form.gain
    if form.width == 0:
        return np.asarray(y)
    first, second = pairs(form.interleaved, form.offset, form.width)
    rows = slice(past, past + len(y))
    c, s = cos[rows, None], sin[rows, None]
    out = y.copy()
    out[..., first] = y[..., first] * c - y[..., second] * s
    out[..., second] = y[..., second] * c + y[..., first] * s
    return out


def norms_agree(query: HeadForm, key: HeadForm) -> bool:
    if (query.weight is None) != (key.weight is None):
        return False
    return query.weight is None or abs(query.epsilon - key.epsilon) <= 1e-3 * key.epsilon
