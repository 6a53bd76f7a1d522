"""How a source addresses pages by inputs of its own: what each input means, and what it is fed for one sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array

__all__ = ["LENGTH_ROLES", "META_KEY", "PagedInterface", "Pool", "feed", "paged_interface", "shaped", "slots_of"]

#: Key of a graph's metadata under which the interface that its pages had is kept.
META_KEY = "pagegraft.pages"

#: What an integer that is no table and no slot can mean, likeliest first. "total" counts past and new tokens.
LENGTH_ROLES = ("total", "past", "new", "positions", "last", "cumulative")


@dataclass(frozen=True)
class Pool:
    """A pool of pages: the source's input and output for it; `shape` has None at the axis that counts pages or slots,
    and holds `positions` tokens for each of them. `axes` are those of one sequence's context, None at its tokens."""

    source: str
    present: str
    shape: tuple[int | None, ...]
    positions: int
    dtype: np.dtype[Any]
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class PagedInterface:
    """Inputs by which a source finds its pages. `page` is the number of tokens of one table entry.

    `roles` maps input names to "table", "slots", "slot page", "slot offset", or one of LENGTH_ROLES; `undecided` are
    inputs whose role shows only in the mask.
    """

    page: int
    pools: tuple[Pool, ...]
    roles: Mapping[str, str] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()

    @property
    def capacity(self) -> int | None:
        """The most tokens that the pools hold, None when their size is open."""
        stated = [pool.positions for pool in self.pools if None not in pool.shape]
        return min(stated, default=None)

    def readings(self) -> Iterator[PagedInterface]:
        """The interface with every possible role of the undecided inputs, likeliest first."""
        for chosen in itertools.product(LENGTH_ROLES, repeat=len(self.undecided)):
            roles = {**self.roles, **dict(zip(self.undecided, chosen, strict=True))}
            yield replace(self, roles=roles, undecided=())


def paged_interface(graph: ir.Graph) -> PagedInterface | None:
    """The interface that the graph's pages had before they were spelled as contiguous caches; None if it had none."""
    found = graph.meta.get(META_KEY)
    return found if isinstance(found, PagedInterface) else None


def slots_of(table: Sequence[int] | Array, positions: Array, page: int) -> Array:
    """The slot of each position: `table[p // page] * page + p % page`."""
    return np.asarray(np.asarray(table)[positions // page] * page + positions % page)


def feed(role: str, size: tuple[int, int], table: Array, page: int) -> Array:
    """What an input of a role is fed for one sequence of (new, past) tokens, as a vector."""
    new, past = size
    positions = np.arange(past, past + new)
    numbers: dict[str, Any] = {
        "table": table,
        "slots": slots_of(table, positions, page),
        "slot page": np.asarray(table)[positions // page],
        "slot offset": positions % page,
        "positions": positions,
        "total": [past + new],
        "past": [past],
        "new": [new],
        "last": [past + new - 1],
        "cumulative": [0, new],
    }
    return np.asarray(numbers[role], np.int64)


def shaped(vector: Array, rank: int, dtype: np.dtype[Any]) -> Array:
    """A vector in the rank and type of an input; axes before the last are a batch of one."""
    if rank == 0:
        return np.asarray(vector.reshape(-1)[0], dtype)
    return vector.astype(dtype).reshape((1,) * (rank - 1) + (-1,))
