"""How exported vectors are compared without this package: one rule an output, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np

from ..validation import Array, geometry_of
from .call import Call
from .check import output_scale
from .tolerance import UNIT_ROUNDOFF, output_tolerance, stored_steps, transformed_error

__all__ = ["comparison_rules"]


def comparison_rules(call: Call, expected: Mapping[str, Array], names: Sequence[str]) -> list[dict[str, Any]]:
    """The rule of each named output, see the README that `vectors` writes."""
    return [_output_rule(call, expected) if name == "output" else _stored_rule(call, expected, name) for name in names]


def _transformed(call: Call) -> bool:
    return "q_norm_weight" in call.feeds or bool(call.parsed().do_rotary)


def _stored_rule(call: Call, expected: Mapping[str, Array], name: str) -> dict[str, Any]:
    g = geometry_of(call.feeds, call.parsed())
    moved = name.startswith("k") and _transformed(call)
    largest = float(np.abs(np.nan_to_num(expected[name].astype(np.float64), posinf=0.0, neginf=0.0)).max(initial=0.0))
    if name.endswith("scale_out"):
        return {"absolute": 4 * UNIT_ROUNDOFF[g.compute_dtype if moved else "float32"] * largest}
    if g.cache_dtype == g.compute_dtype and not moved:
        return {"exact": True}
    if g.cache_dtype in UNIT_ROUNDOFF:
        error = 2 * UNIT_ROUNDOFF[g.cache_dtype] + (transformed_error(g.compute_dtype, g.head_size) if moved else 0.0)
        return {"absolute": error * largest}
    steps = stored_steps(g.compute_dtype, g.cache_dtype, transformed=moved)
    return {"steps": steps, "code_bits": 4 if g.cache_dtype == "int4" else 8}


def _output_rule(call: Call, expected: Mapping[str, Array]) -> dict[str, Any]:
    attributes = call.parsed()
    g = geometry_of(call.feeds, attributes)
    scale = output_scale(call, expected, attributes, g)
    transformed = _transformed(call)
    absolute = output_tolerance(g.compute_dtype, g.cache_dtype, scale, transformed=transformed)
    if g.cache_dtype in UNIT_ROUNDOFF:
        return {"absolute": absolute}
    # A code that is some steps off moves its key's score by |scale| * ||q|| * step, and its value by a step.
    steps = stored_steps(g.compute_dtype, g.cache_dtype, transformed=transformed)
    relative = {"int8": 1 / 127, "int4": 1 / 7, "float8e4m3fn": 1 / 8}[g.cache_dtype]
    score = min(1.0, steps * relative * scale.score_bound / sqrt(g.head_size))
    return {
        "absolute": absolute,
        "absolute_if_stored_differs": absolute + scale.value_max * (steps * relative + 2 * score),
    }
