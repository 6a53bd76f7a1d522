"""What a conformance case is made of: a call of the op, and the declarative setup that calls are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np

from ..cache_codec import encode
from ..spec import AttentionAttributes
from ..validation import Array, visible_range

__all__ = ["NUMPY_TYPES", "Call", "Setup", "build"]

#: numpy's type for each ONNX element type of the contract.
NUMPY_TYPES: Final[Mapping[str, Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "float8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass
class Call:
    """Inputs by contract name and the node's attributes (defaults left out) of one call of the op."""

    feeds: dict[str, Array]
    attributes: dict[str, Any]

    def parsed(self) -> AttentionAttributes:
        """The attributes with their defaults. Raises ContractError for values out of range."""
        return AttentionAttributes.from_dict(self.attributes)

    def copy(self) -> Call:
        """A call whose arrays and attributes can be changed without touching this one's."""
        return Call({name: array.copy() for name, array in self.feeds.items()}, dict(self.attributes))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that determines a valid call; `build` draws the data.

    `new`/`past`: tokens of each sequence. `table`: how block ids are dealt ("shuffled", "contiguous", "shared": common
    past blocks of all sequences are the same blocks, "repeated": past blocks of a sequence are one block).
    `unmapped`: (sequence, logical block) pairs set to -1. `slots`: "derived" (no slot_mapping), "explicit", "none"
    (all -1), "elsewhere" (written to spare blocks, so not read). `skipped`: packed tokens whose explicit slot is -1.
    `dead`: what slots hold that no token of the call can see: "noise", "nan" or "inf". `gains` multiply the drawn
    query, key and value. `id_offset` is added to every block id by leaving that many blocks unused in front.
    """

    new: tuple[int, ...] = (1, 4, 3)
    past: tuple[int, ...] = (5, 0, 9)
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    value_head_size: int | None = None
    block_size: int = 8
    compute: str = "float32"
    cache: str = ""
    k_quant: str = "NONE"
    v_quant: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    latent_value_size: int | None = None
    sink: bool = False
    norm: bool = False
    rotary_dim: int = 0
    metadata: tuple[int, ...] = ()
    table: Literal["shuffled", "contiguous", "shared", "repeated"] = "shuffled"
    unmapped: tuple[tuple[int, int], ...] = ()
    slots: Literal["derived", "explicit", "none", "elsewhere"] = "derived"
    skipped: tuple[int, ...] = ()
    dead: Literal["noise", "nan", "inf"] = "noise"
    gains: tuple[float, float, float] = (2.0, 1.0, 1.0)
    scale_gain: float = 1.0
    id_offset: int = 0

    @property
    def cache_dtype(self) -> str:
        """Logical cache type; by default the compute type."""
        return self.cache or self.compute

    @property
    def latent(self) -> bool:
        """True for kv_cache_layout LATENT."""
        return self.latent_value_size is not None

    @property
    def value_size(self) -> int:
        """Width of the value heads (and of the output heads)."""
        return self.latent_value_size or self.value_head_size or self.head_size

    @property
    def quant(self) -> tuple[str, str]:
        """k_quant_type and v_quant_type."""
        return self.k_quant, "NONE" if self.latent else (self.v_quant or self.k_quant)


def build(setup: Setup, seed: int) -> Call:
    """Draws a valid call. The same setup and seed always give the same call."""
    return _Builder(setup, seed).call()


def _as_on_a_node(value: Any) -> Any:
    """Attributes of a node are float32: a backend and the reference have to see the same number."""
    if isinstance(value, float):
        return float(np.float32(value))
    return tuple(_as_on_a_node(v) for v in value) if isinstance(value, tuple) else value


class _Builder:
    def __init__(self, setup: Setup, seed: int) -> None:
        self.s = setup
        self.rng = np.random.default_rng(seed)
        self.compute = NUMPY_TYPES[setup.compute]
        self.total = tuple(p + n for p, n in zip(setup.past, setup.new, strict=True))
        self.attributes = self._attributes()
        self.parsed = AttentionAttributes.from_dict(self.attributes)

    def call(self) -> Call:
        s, feeds = self.s, {}
        tokens = sum(s.new)
        query = self._normal(s.gains[0], tokens, s.query_heads * s.head_size)
        key = self._normal(s.gains[1], tokens, s.kv_heads * s.head_size)
        value = self._normal(s.gains[2], tokens, s.kv_heads * s.value_size)
        if s.packed:
            feeds["query"] = np.concatenate([query, key, value], axis=1)
        else:
            feeds.update({"query": query, "key": key} if s.latent else {"query": query, "key": key, "value": value})
        table, blocks = self._table()
        slots = self._slots(table, blocks)
        self._caches(feeds, blocks)
        if s.dead != "noise":
            self._poison(feeds, table, slots)
        feeds["cumulative_sequence_length"] = np.concatenate([[0], np.cumsum(s.new)]).astype(np.int32)
        feeds["past_seqlens"] = np.array(s.past, np.int32)
        feeds["block_table"] = self._with_garbage(table, blocks).astype(np.int32)
        if s.slots != "derived":
            feeds["slot_mapping"] = slots.astype(np.int32)
        self._optional(feeds)
        return Call(feeds, self.attributes)

    def _attributes(self) -> dict[str, Any]:
        s = self.s
        out: dict[str, Any] = {"num_heads": s.query_heads, "kv_num_heads": s.kv_heads}
        out |= {name: _as_on_a_node(value) for name, value in s.attributes.items()}
        for letter, quant in zip("kv", s.quant, strict=True):
            if quant != "NONE":
                out[f"{letter}_quant_type"] = quant
            if s.cache_dtype == "int4" and not (s.latent and letter == "v"):
                out[f"{letter}_cache_dtype"] = "int4"
        if s.latent:
            out.update(kv_cache_layout="LATENT")
            if s.latent_value_size != s.head_size:
                out.update(v_head_size=s.latent_value_size)
        if s.rotary_dim:
            out.update(do_rotary=1)
        return out

    def _normal(self, gain: float, *shape: int) -> Array:
        return (gain * self.rng.standard_normal(shape)).astype(self.compute)

    def _table(self) -> tuple[Array, int]:
        """Block ids of every position (-2 where a sequence has none), and the number of blocks in the pool."""
        s = self.s
        widths = [-(-t // s.block_size) for t in self.total]
        used = sum(widths)
        ids = np.arange(used) if s.table == "contiguous" else self.rng.permutation(used + 3)
        table = np.full((len(s.new), max(widths, default=0)), -2, np.int64)
        at = 0
        for row, width in enumerate(widths):
            table[row, :width] = ids[at : at + width]
            at += width
        if s.table == "shared":
            common = min(s.past) // s.block_size
            table[:, :common] = table[0, :common]
        if s.table == "repeated":
            for row, past in enumerate(s.past):
                table[row, : past // s.block_size] = table[row, :1]
        for row, logical in s.unmapped:
            table[row, logical] = -1
        return np.where(table >= 0, table + s.id_offset, table), used + 3 + s.id_offset

    def _slots(self, table: Array, blocks: int) -> Array:
        """Slot of each packed token as the setup wants it (also what is derived without a slot_mapping)."""
        s, slots = self.s, []
        for row, (past, new) in enumerate(zip(s.past, s.new, strict=True)):
            position = past + np.arange(new)
            block = table[row, position // s.block_size] if new else position
            slots.append(np.where(block < 0, -1, block * s.block_size + position % s.block_size))
        flat = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        if s.slots == "none":
            flat[:] = -1
        if s.slots == "elsewhere":
            spare = np.setdiff1d(np.arange(s.id_offset, blocks), table)
            flat = (spare[:, None] * s.block_size + np.arange(s.block_size)).reshape(-1)[: len(flat)]
        flat[list(s.skipped)] = -1
        return flat

    def _with_garbage(self, table: Array, blocks: int) -> Array:
        """Fills what no token can see with ids that must be ignored, and widens the table by two columns."""
        s = self.s
        garbage = np.array([-1, -9, blocks, blocks + 1000, 2**31 - 1, -(2**31), 0])
        out = self.rng.choice(garbage, (table.shape[0], table.shape[1] + 2))
        for row, (past, new) in enumerate(zip(s.past, s.new, strict=True)):
            start, end = visible_range(past, new, self.parsed)
            seen = slice(start // s.block_size, -(-end // s.block_size))
            out[row, seen] = table[row, seen]
        return out

    def _caches(self, feeds: dict[str, Array], blocks: int) -> None:
        s = self.s
        parts = [("k", "key", s.head_size)] + ([] if s.latent else [("v", "value", s.value_size)])
        for (letter, name, size), quant in zip(parts, s.quant, strict=False):
            gain = s.gains[1] if letter == "k" else s.gains[2]
            content = gain * self.rng.standard_normal((blocks, s.block_size, s.kv_heads, size))
            coarse = {"int8": 3.0 / 127, "int4": 3.0 / 7, "float8e4m3fn": 0.02}.get(s.cache_dtype, 1.0)
            coarse *= s.scale_gain * gain
            scale: Any = 1.0
            if quant == "PER_TOKEN":
                top = np.abs(content).max(axis=-1) / 127
                feeds[f"{letter}_scale"] = np.ascontiguousarray(top.swapaxes(1, 2)).astype(np.float32)
                scale = top.astype(np.float32).astype(np.float64)[..., None]
            elif quant != "NONE":
                shape = (1,) if quant == "PER_TENSOR" else (s.kv_heads, 1, size)
                feeds[f"{letter}_scale"] = (coarse * self.rng.uniform(0.7, 1.3, shape)).astype(np.float32)
                scale = feeds[f"{letter}_scale"].astype(np.float64).reshape(1 if shape == (1,) else (s.kv_heads, size))
            feeds[f"{name}_cache"] = encode(content, scale, s.cache_dtype)

    def _poison(self, feeds: dict[str, Array], table: Array, slots: Array) -> None:
        """Puts NaN or Inf into every slot that no token of the call sees and none writes."""
        s = self.s
        blocks = feeds["key_cache"].shape[0]
        live = np.zeros(blocks * s.block_size, bool)
        live[slots[slots >= 0]] = True
        for row, (past, new) in enumerate(zip(s.past, s.new, strict=True)):
            position = np.arange(*visible_range(past, new, self.parsed))
            block = table[row, position // s.block_size]
            live[(block * s.block_size + position % s.block_size)[block >= 0]] = True
        dead = ~live.reshape(blocks, s.block_size)
        bad = np.nan if s.dead == "nan" else np.inf
        for name in ("key_cache", "value_cache"):
            if name in feeds and s.cache_dtype in ("float32", "float16", "bfloat16"):
                feeds[name][dead] = bad
            elif name in feeds and s.cache_dtype == "float8e4m3fn":
                feeds[name].view(np.uint8)[dead] = 0x7F  # this type has NaN but no Inf
        for letter, quant in zip("kv", s.quant, strict=True):
            if quant == "PER_TOKEN":
                feeds[f"{letter}_scale"].swapaxes(1, 2)[dead] = bad

    def _optional(self, feeds: dict[str, Array]) -> None:
        s = self.s
        if s.rotary_dim:
            rows = max(self.total, default=0) + 3
            half = s.rotary_dim // 2
            angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half) / half)
            feeds["cos_cache"], feeds["sin_cache"] = (
                np.cos(angles).astype(self.compute),
                np.sin(angles).astype(self.compute),
            )
        if s.sink:
            feeds["head_sink"] = self._normal(1.5, s.query_heads)
        if s.norm:
            feeds["q_norm_weight"] = (1 + self._normal(0.3, s.head_size)).astype(self.compute)
            feeds["k_norm_weight"] = (1 + self._normal(0.3, s.head_size)).astype(self.compute)
        if s.metadata:
            feeds["attention_metadata"] = np.array(s.metadata, np.int32)
