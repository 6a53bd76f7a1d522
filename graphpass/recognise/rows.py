"""Where heads and tokens lie in the rows of a product: `[..., H, T, D]`, `[..., T, H, D]`, `[..., T * H, D]`,
`[..., H * T, D]`, or heads on both sides of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..evaluate import Array
from .probe import Probe

__all__ = ["from_heads_first", "has_joined_rows", "heads_first"]


@dataclass(frozen=True)
class _Rows:
    """Rows are `[outer, T, inner]`; head number is `outer index * inner + inner index`."""

    outer: int
    inner: int


def _rows(probe: Probe, value: ir.Value) -> _Rows | None:
    dims = (probe.affine(value) or ())[:-1]
    tokens = [axis for axis, (_, per_new, _) in enumerate(dims) if per_new]
    if len(tokens) != 1 or dims[tokens[0]][0] or dims[tokens[0]][2] or any(past for _, _, past in dims):
        return None
    at = tokens[0]
    joined = dims[at][1]  # heads that share the axis of tokens
    outer = int(np.prod([c for c, _, _ in dims[:at]]))
    inner = int(np.prod([c for c, _, _ in dims[at + 1 :]]))
    if joined == 1:
        return _Rows(outer, inner)
    if inner != 1:
        return None
    return _Rows(outer * joined, 1) if value in probe.tokens_innermost else _Rows(outer, joined)


def has_joined_rows(probe: Probe, value: ir.Value) -> bool:
    """True when heads and tokens share an axis, so that a shape does not tell which of them is the inner one."""
    return any(per_new > 1 for _, per_new, _ in (probe.affine(value) or ())[:-1])


def heads_first(probe: Probe, value: ir.Value, array: Array, new: int) -> Array | None:
    """An array in the value's layout at `new` tokens as `[H, T, last axis]`; None when the layout is none of these."""
    rows = _rows(probe, value)
    if rows is None:
        return None
    width = array.shape[-1]
    ordered = array.reshape(rows.outer, new, rows.inner, width).transpose(0, 2, 1, 3)
    return ordered.reshape(rows.outer * rows.inner, new, width)


def from_heads_first(probe: Probe, value: ir.Value, array_HTK: Array, past: int) -> Array:
    """The inverse: an array in the value's own layout."""
    new = array_HTK.shape[1]
    rows = _rows(probe, value)
    inner = 1 if rows is None else rows.inner
    ordered = array_HTK.reshape(-1, inner, new, array_HTK.shape[-1]).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(ordered).reshape(probe.shape(value, new, past))
