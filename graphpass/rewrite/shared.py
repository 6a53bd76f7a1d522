"""Finds attentions that read the cache of an earlier layer: they get no cache of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..recognise.site import AttentionSite, Operand

__all__ = ["cache_numbers", "cache_owners"]


def cache_owners(sites: Sequence[AttentionSite]) -> list[int]:
    """Per site the index of the site whose cache it reads: its own, or that of an earlier one with the same content.

    Sharing needs the same past inputs, the same keys and values as they are stored, and the same retention.
    """
    owners: list[int] = []
    for index, site in enumerate(sites):
        same = (i for i in range(index) if owners[i] == i and _same_cache(sites[i], site))
        owners.append(next(same, index))
    return owners


def cache_numbers(sites: Sequence[AttentionSite]) -> list[int]:
    """Per site the number of the cache that it reads; owners are numbered in order."""
    owners = cache_owners(sites)
    numbers = {owner: number for number, owner in enumerate(i for i, o in enumerate(owners) if i == o)}
    return [numbers[owner] for owner in owners]


def _same_cache(first: AttentionSite, second: AttentionSite) -> bool:
    pasts = [[link.past for link in (*s.key_cache, *s.value_cache)] for s in (first, second)]
    return (
        bool(pasts[0])
        and pasts[0] == pasts[1]
        and first.score.window == second.score.window
        and _same_operand(first.key, second.key)
        and (_same_latent(first, second) if first.latent else _same_operand(first.value, second.value))
        and _same_rotary(first, second)
        and _same_array(first.k_norm, second.k_norm)
    )


def _same_latent(first: AttentionSite, second: AttentionSite) -> bool:
    return second.latent and first.value.size == second.value.size


def _same_operand(first: Operand, second: Operand) -> bool:
    if first.parts or second.parts:
        pairs = zip(first.parts, second.parts, strict=False)
        return len(first.parts) == len(second.parts) and all(_same_operand(one, other) for one, other in pairs)
    return first.value is not None and first.value is second.value and first.perm == second.perm


def _same_rotary(first: AttentionSite, second: AttentionSite) -> bool:
    one, other = first.rotary, second.rotary
    if one is None or other is None:
        return one is other
    return (
        (one.interleaved, one.offset) == (other.interleaved, other.offset)
        and _same_array(one.cos, other.cos)
        and _same_array(one.sin, other.sin)
    )


def _same_array(first: np.ndarray[Any, Any] | None, second: np.ndarray[Any, Any] | None) -> bool:
    if first is None or second is None:
        return first is second
    return bool(np.array_equal(first, second))
