"""Malformed variants of a valid call: nasty numbers, other lengths, ranks and element types, one to three at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..validation import Array
from .call import Call

__all__ = ["malformed"]

_NASTY = (
    -1,
    -2,
    0,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    65,
    127,
    1 << 15,
    1 << 16,
    1 << 20,
    1 << 30,
    2**31 - 1,
    -(2**31),
    -(2**31) + 1,
)
_NASTY_FLOATS = (0.0, -0.0, 1e-30, -1.0, 65504.0, 1e30, np.inf, -np.inf, np.nan)


def malformed(valid: Call, rng: np.random.Generator) -> Call:
    """A copy of `valid` with one to three changes drawn from `rng`; arrays that are not changed are shared."""
    feeds = dict(valid.feeds)
    for _ in range(rng.integers(1, 4)):
        change = _CHANGES[rng.integers(len(_CHANGES))]
        name = list(feeds)[rng.integers(len(feeds))]
        change(feeds, name, rng)
    return Call(feeds, valid.attributes)


def _nasty_integer(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    names = [n for n in feeds if feeds[n].dtype == np.int32 and feeds[n].size]
    if names:
        chosen = names[rng.integers(len(names))]
        feeds[chosen] = feeds[chosen].copy()
        feeds[chosen].reshape(-1)[rng.integers(feeds[chosen].size)] = _NASTY[rng.integers(len(_NASTY))]


def _small_integer(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    names = [n for n in feeds if feeds[n].dtype == np.int32 and feeds[n].size]
    if names:
        chosen = names[rng.integers(len(names))]
        feeds[chosen] = feeds[chosen].copy()
        moved = int(feeds[chosen].reshape(-1)[at := rng.integers(feeds[chosen].size)]) + int(rng.integers(-2, 3))
        feeds[chosen].reshape(-1)[at] = np.clip(moved, -(2**31), 2**31 - 1)


def _nasty_float(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    array = feeds[name]
    if array.size and array.dtype.name in ("float32", "float16", "bfloat16"):
        feeds[name] = array.copy()
        with np.errstate(over="ignore"):
            feeds[name].reshape(-1)[rng.integers(array.size)] = _NASTY_FLOATS[rng.integers(len(_NASTY_FLOATS))]


def _resize(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    """Another length along one axis: shorter, longer, or nothing."""
    array = feeds[name]
    if array.ndim:
        axis = rng.integers(array.ndim)
        length = max(0, array.shape[axis] + int(rng.choice((-3, -1, 1, 2, -array.shape[axis]))))
        if array.shape[axis]:
            feeds[name] = np.ascontiguousarray(
                np.resize(array, (*array.shape[:axis], length, *array.shape[axis + 1 :]))
            )


def _resize_both_caches(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    axis, length = int(rng.integers(2)), int(rng.choice((0, 1, 2, 3, 6, 8, 9)))
    for cache in ("key_cache", "value_cache"):
        if cache in feeds and feeds[cache].ndim == 4 and feeds[cache].size:
            shape = list(feeds[cache].shape)
            shape[axis] = length
            feeds[cache] = np.resize(feeds[cache], shape)


def _reshape(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    """The same elements in another shape, or another rank."""
    array = feeds[name]
    shapes = [array.shape[::-1], (array.size,), (1, *array.shape), (array.size, *(1,) * (array.ndim - 1))]
    feeds[name] = array.reshape(shapes[rng.integers(len(shapes))])


def _other_type(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    if rng.integers(8) == 0:
        feeds[name] = np.zeros(feeds[name].shape, (np.float32, np.int8, np.int32, np.float16)[rng.integers(4)])


def _fewer_sequences(feeds: dict[str, Array], name: str, rng: np.random.Generator) -> None:
    """One sequence less in all inputs that count them; the tokens stay."""
    for key in ("past_seqlens", "block_table"):
        feeds[key] = feeds[key][:-1]
    if feeds["cumulative_sequence_length"].ndim == 1 and feeds["cumulative_sequence_length"].size > 1:
        feeds["cumulative_sequence_length"] = np.delete(feeds["cumulative_sequence_length"], -2)


_CHANGES: tuple[Callable[[dict[str, Array], str, np.random.Generator], None], ...] = (
    _nasty_integer,
    _nasty_integer,
    _small_integer,
    _small_integer,
    _nasty_float,
    _resize,
    _resize_both_caches,
    _reshape,
    _other_type,
    _fewer_sequences,
)
