"""Where heads and tokens lie in the rows of a product: `[..., H, T, D]`, `[..., T, H, D]`, or `[..., T * H, D]`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..evaluate import Array
from .probe import Probe

__all__ = ["from_heads_first", "heads_first"]


def _tokens_lead(probe: Probe, value: ir.Value) -> bool | None:
    """True when the heads of a token are neighbours, False when the tokens of a head are, None for neither."""
    dims = (probe.affine(value) or ())[:-1]
    tokens = [axis for axis, (_, per_new, _) in enumerate(dims) if per_new]
    if len(tokens) != 1 or dims[tokens[0]][0] or dims[tokens[0]][2]:
        return None
    behind = len(dims) - 1 - tokens[0]
    if behind == 0:
        return dims[-1][1] > 1
    return True if behind == 1 and dims[tokens[0]][1] == 1 else None


def heads_first(probe: Probe, value: ir.Value, array: Array, new: int) -> Array | None:
    """An array in the value's layout at `new` tokens as `[H, T, last axis]`; None when the layout is none of these."""
    lead = _tokens_lead(probe, value)
    if lead is None:
        return None
    width = array.shape[-1]
    if not lead:
        return array.reshape(-1, new, width)
    # Leading axes are of length one: a batch of one sequence.
    return array.reshape(new, -1, width).swapaxes(0, 1)


def from_heads_first(probe: Probe, value: ir.Value, array_HTK: Array, past: int) -> Array:
    """The inverse: an array in the value's own layout."""
    new = array_HTK.shape[1]
    ordered = array_HTK.swapaxes(0, 1) if _tokens_lead(probe, value) else array_HTK
    return np.ascontiguousarray(ordered).reshape(probe.shape(value, new, past))
