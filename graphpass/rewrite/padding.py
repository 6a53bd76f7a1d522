"""Heads padded to a size that a target's kernel takes.

Zero channels behind those of queries and keys add nothing to their products (the scale is given, not derived from the
size), zero channels of values give zero channels of the output, which are cut off again.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .builder import Builder

__all__ = ["cut_heads", "pad_heads", "padded"]


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def pad_heads(builder: Builder, rows: ir.Value, heads: int, size: int, multiple: int) -> ir.Value:
    """`[T, heads * size]` as `[T, heads * padded(size)]`."""
    wider = padded(size, multiple)
    if wider == size:
        return rows
    pads = builder.constant(np.array([0, 0, 0, 0, 0, wider - size], np.int64), "pads")
    out = builder.node("Pad", [builder.reshape(rows, [-1, heads, size]), pads], stem="padded_heads")[0]
    return builder.reshape(out, [-1, heads * wider])


def cut_heads(builder: Builder, rows: ir.Value, heads: int, size: int, multiple: int) -> ir.Value:
    """The inverse: `[T, heads * padded(size)]` as `[T, heads * size]`."""
    wider = padded(size, multiple)
    if wider == size:
        return rows
    bounds = [builder.constant(np.array([n], np.int64), "bound") for n in (0, size, 2)]
    out = builder.node("Slice", [builder.reshape(rows, [-1, heads, wider]), *bounds], stem="cut_heads")[0]
    return builder.reshape(out, [-1, heads * size])
