"""Proves that what is read from a pool is the context of a sequence: its rows in order, whatever pages they lie in.

New rows are numbered and written in two steps through shuffled tables; the context must hold each position's row where
it should be, and the rest of the pool must stay as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import NotConvertible
from ..evaluate import Array
from .interface import LENGTH_ROLES
from .pools import Read, Write, sources_of
from .probe import PageProbe, Roles

__all__ = ["Context", "prove"]

#: What an input that tells where to write can mean, beside lengths.
_SLOT_ROLES = ("slots", "slot page", "slot offset")
#: The most inputs, beside a table, of which every combination of meanings is tried.
_MOST_ADDRESSING = 2
_BASE = 256  # digits that float16 holds exactly


@dataclass(frozen=True)
class Context:
    """A proven context: it holds a sequence's rows in order along `axis`, its other `axes` are constant.

    `page` tokens an entry of the table; the pool has `positions` slots for each unit of its open dimension.
    `update_shape` are the axes of the new rows, None at their tokens.
    """

    value: ir.Value
    axis: int
    axes: tuple[int | None, ...]
    page: int
    pool_shape: tuple[int | None, ...]
    positions: int
    dtype: np.dtype[Any]
    update_shape: tuple[int | None, ...]
    roles: Roles = field(default_factory=dict)


@dataclass(frozen=True)
class _Trial:
    """A value that may be the context of a pool, under one meaning of the inputs.

    `update_shape` are the new rows' axes, None at their tokens; the pool has `pages` of `page` tokens.
    """

    write: Write
    present: ir.Value
    value: ir.Value
    roles: Roles
    update_shape: tuple[int | None, ...]
    page: int
    pages: int

    @property
    def features(self) -> int:
        """Elements of one token's row."""
        return int(np.prod([d for d in self.update_shape if d is not None]))

    @property
    def whole(self) -> bool:
        """True when there is no table: the pool is one sequence's buffer."""
        return "table" not in self.roles.values()


def prove(probe: PageProbe, write: Write, read: Read, likely: Roles | None = None) -> Context | None:
    """The context that a read proves to be, under the first meaning of the inputs for which it is one; `likely` is
    tried first."""
    present = probe.present(write)
    if present is None:
        return None
    meanings = [likely] if likely else []
    meanings += _meanings(probe, write, read)
    for shape in probe.shape_guesses(write.pool):
        probe.shapes[write.pool] = shape
        for roles in meanings:
            for value in read.candidates:
                found = _prove(probe, write, read, (present, value), roles)
                if found is not None:
                    return found
    return None


def _meanings(probe: PageProbe, write: Write, read: Read) -> Iterator[dict[ir.Value, str]]:
    """Possible roles of the integer inputs that address a pool: one is the table, the others tell where to write."""
    writing = [v for v in sources_of([write.indices]) if v in probe.integers]
    addressing = list(dict.fromkeys((*read.tables, *writing)))
    if len(addressing) - bool(read.tables) > _MOST_ADDRESSING:
        raise NotConvertible(
            f"{len(addressing)} inputs address the pool '{write.pool.name}': "
            f"{', '.join(v.name or '' for v in addressing)}",
            write.node.name or "",
            f"beside a table of pages, up to {_MOST_ADDRESSING} inputs may say where rows are written",
            kind="pages",
        )
    for table in read.tables or (None,):
        others = [v for v in addressing if v is not table]
        for chosen in itertools.product((*_SLOT_ROLES, *LENGTH_ROLES), repeat=len(others)):
            roles = dict(zip(others, chosen, strict=True))
            yield roles if table is None else {table: "table", **roles}


def _prove(
    probe: PageProbe, write: Write, read: Read, values: tuple[ir.Value, ir.Value], roles: Roles
) -> Context | None:
    present, value = values
    entries = 7  # of a table; how many tokens each stands for shows in what they bring
    table = np.arange(entries)
    try:
        (short,) = probe.run([write.updates], probe.feeds((3, 0), table, 1, roles))
        updates, context = probe.run([write.updates, value], probe.feeds((5, 0), table, 1, roles))
    except NotConvertible:
        return None
    axes = [a for a, (one, other) in enumerate(zip(short.shape, updates.shape, strict=True)) if one != other]
    if len(axes) != 1 or updates.shape[axes[0]] != 5:
        return None
    features = updates.size // 5
    rows, rest = divmod(context.size, features)
    page, more = divmod(rows, entries) if read.tables else (1, 0)
    if rest or more or not page:
        return None
    pool = probe.shapes[write.pool]
    slots = probe.pool_array(write.pool).size // features
    shape = tuple(None if a == axes[0] else d for a, d in enumerate(updates.shape))
    trial = _Trial(write, present, value, roles, shape, page, slots // page)
    axis = _context_axis(probe, trial)
    if axis is None:
        return None
    return Context(
        value=value,
        axis=axis,
        axes=tuple(None if a == axis else d for a, d in enumerate(context.shape)),
        page=page,
        pool_shape=pool,
        positions=slots // probe.count(write.pool) if None in pool else slots,
        dtype=context.dtype,
        update_shape=shape,
        roles=roles,
    )


def _context_axis(probe: PageProbe, trial: _Trial) -> int | None:
    """The axis along which the value holds a sequence's rows in order: in two steps, for several tables."""
    rng = np.random.default_rng(23)
    found: set[int | None] = set()
    for entries, new in ((3, 2), (5, 1), (4, 3 * trial.page)):
        entries = max(entries, -(-7 // trial.page))
        total = entries * trial.page - (1 if trial.page > 1 else 0)
        table = np.arange(entries) if trial.whole else rng.permutation(trial.pages)[:entries]
        if len(table) < entries:
            return None
        found.add(_rows_axis(probe, trial, (total, min(new, total - 1)), table))
    return found.pop() if len(found) == 1 else None


def _rows_axis(probe: PageProbe, trial: _Trial, lengths: tuple[int, int], table: Array) -> int | None:
    total, new = lengths
    write = trial.write
    index: Array | None = None
    place = 1
    while place == 1 or place < total * trial.features:
        pool = context = probe.pool_array(write.pool)
        for size in ((total - new, 0), (new, total - new)):
            feeds = {**probe.feeds(size, table, trial.page, trial.roles), write.pool: pool}
            feeds[write.updates] = _numbered(trial, size, place).astype(pool.dtype)
            try:
                updated, context = probe.run([trial.present, trial.value], feeds)
            except NotConvertible:
                return None
            if updated.shape != pool.shape:
                return None
            pool = updated
        if int((pool >= 0).sum()) != total * trial.features:
            return None
        digits = context.astype(np.float64)
        index = digits if index is None else np.where(index < 0, index, index + digits * place)
        place *= _BASE
    return None if index is None else _token_axis(index, total, trial.features, exact=not trial.whole)


def _numbered(trial: _Trial, size: tuple[int, int], place: int) -> Array:
    """New rows whose elements carry one digit of token * features + feature."""
    new, past = size
    rest = [d for d in trial.update_shape if d is not None]
    token = np.arange(past, past + new)[:, None]
    number = (token * trial.features + np.arange(trial.features)).reshape(new, *rest)
    return np.moveaxis(number // place % _BASE, 0, trial.update_shape.index(None))


def _token_axis(index: Array, total: int, features: int, *, exact: bool) -> int | None:
    """The axis along which `index` counts tokens, each with its features in order; what is behind is unwritten."""
    wanted = (np.arange(total)[:, None] * features + np.arange(features)).astype(np.float64)
    for axis, length in enumerate(index.shape):
        if length < total or length * features != index.size:
            continue
        rows = np.moveaxis(index, axis, 0).reshape(length, features)
        if np.array_equal(rows[:total], wanted) and (not exact or np.all(rows[total:] < 0)):
            return axis
    return None
