"""At which (new, past) sizes a structural region is evaluated: ordinary ones, and around every constant it reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from ..graph import node_inputs
from .probe import Probe, Size

__all__ = ["LARGEST_LENGTH", "base_sizes", "probe_sizes", "reachable_integers"]

_BASE_WITH_PAST: tuple[Size, ...] = ((30, 0), (1, 30), (4, 26), (2, 7))
_BASE_SINGLE: tuple[Size, ...] = ((1, 0), (1, 1), (1, 7), (1, 30), (1, 61))
_BASE_WITHOUT: tuple[Size, ...] = ((30, 0), (7, 0), (2, 0))
#: Constants above this are no lengths but sentinels.
LARGEST_LENGTH = 1 << 20
#: Longest context probed without a past, where scores are a square.
_LONGEST_SQUARE = 1200


def probe_sizes(probe: Probe, outputs: Sequence[ir.Value], stops: set[ir.Value], longest: int) -> list[Size]:
    """Sizes at which a structural region may change its mind: around each integer constant that it reaches."""
    base = base_sizes(probe)
    sizes = dict.fromkeys(base)
    lengths = sorted(c for c in reachable_integers(outputs, stops) if 2 <= c <= min(longest + 1, LARGEST_LENGTH))
    for c in lengths:
        if probe.has_past:
            near: Iterable[Size] = ((1, c - 2), (1, c - 1), (1, c), (1, c + 1))
            near = near if probe.single_token else (*near, (3, c - 2))
        else:
            near = ((c - 1, 0), (c, 0), (c + 1, 0)) if c < _LONGEST_SQUARE else ()
        sizes.update(dict.fromkeys((n, p) for n, p in near if p >= 0 and n + p <= longest and n >= 1))
    sizes[(1, longest - 1) if probe.has_past else (min(longest, _LONGEST_SQUARE), 0)] = None
    return list(sizes)


def base_sizes(probe: Probe) -> tuple[Size, ...]:
    if not probe.has_past:
        return _BASE_WITHOUT
    return _BASE_SINGLE if probe.single_token else _BASE_WITH_PAST


def reachable_integers(outputs: Sequence[ir.Value], stops: set[ir.Value]) -> set[int]:
    """Integer values of small constants, and dimensions of large ones, that the values are computed from."""
    found: set[int] = set()
    seen: set[ir.Value] = set()
    stack = list(outputs)
    while stack:
        value = stack.pop()
        if value in seen or value in stops:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None:
            stack.extend(node_inputs(producer))
        tensor = value.const_value
        if tensor is None or not value.is_initializer():
            continue
        if tensor.size > 16:
            found.update(int(d) for d in tensor.shape.numpy())
        elif tensor.dtype.is_integer() or tensor.dtype.is_floating_point():
            numbers = tensor.numpy().astype(np.float64).reshape(-1)
            found.update(int(abs(x)) for x in numbers if np.isfinite(x) and abs(x) < LARGEST_LENGTH and x == int(x))
    return found
