"""The conformance cases, one module a group."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from . import core, latent, layout, masks, negative, quantised, rotary, stress
from .case import GROUPS, Case, Kind

__all__ = ["GROUPS", "Case", "Kind", "all_cases"]


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case, by group and in a fixed order. Ids are unique."""
    modules = (core, masks, layout, quantised, rotary, latent, negative, stress)
    own = [case for module in modules for case in module.cases()]
    portable = [variant for case in own if (variant := _portable(case))]
    return tuple(sorted(own + portable, key=lambda case: GROUPS.index(case.group)))


def _portable(case: Case) -> Case | None:
    """The case in float16 with blocks of 16, which is as small as many device kernels go; None where it makes no sense.

    Lengths are doubled along with the block size, single tokens stay single.
    """
    s = case.setup
    if (s.compute, s.block_size) != ("float32", 8) or case.kind not in ("compare", "error"):
        return None
    if (case.kind == "error" and not case.bad_id) or s.cache in ("float16", "float32") or len(s.new) > 8:
        return None
    new = tuple(n if n < 2 else 2 * n for n in s.new)
    setup = replace(s, compute="float16", block_size=16, new=new, past=tuple(2 * p for p in s.past))
    if s.metadata:
        setup = replace(setup, metadata=tuple(2 * m for m in s.metadata))
    return replace(case, id=f"{case.id}_f16_b16", setup=setup)
