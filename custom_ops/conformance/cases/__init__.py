"""The conformance cases, one module a group."""

from __future__ import annotations

from functools import cache

from . import core, latent, layout, masks, negative, quantised, rotary, stress
from .case import GROUPS, Case, Kind

__all__ = ["GROUPS", "Case", "Kind", "all_cases"]


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case, by group and in a fixed order. Ids are unique."""
    modules = (core, masks, layout, quantised, rotary, latent, negative, stress)
    return tuple(case for module in modules for case in module.cases())
