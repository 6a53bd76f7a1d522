"""Wrong kernels, each made from the reference by changing a line or two: the suite must turn every one of them red.

A mutant is a text replacement in the source of `reference` (or of `cache_codec`, which it uses). The text must occur
exactly once, so a mutant cannot silently stop being wrong when the reference is edited.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from ..errors import ContractError
from ..spec import AttentionAttributes
from ..validation import Array
from .backends import Capabilities
from .cases import Case
from .run import Result, run_case

__all__ = ["MUTANTS", "Mutant", "MutantBackend", "hunt"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A wrong kernel. `edits`: (text, replacement) pairs in `module`. `group`: where it is expected to be caught."""

    name: str
    edits: tuple[tuple[str, str], ...]
    group: str
    module: str = "reference"


def _one(name: str, group: str, text: str, replacement: str, module: str = "reference") -> Mutant:
    return Mutant(name=name, group=group, edits=((text, replacement),), module=module)


class MutantBackend:
    """Runs a mutant; claims everything."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.name
        self._run = _compiled(mutant)

    def capabilities(self) -> Capabilities:
        """The whole contract, as a wrong kernel does."""
        return Capabilities(bitwise=True, max_cache_bytes=1 << 34)

    def run(self, feeds: dict[str, Array], attributes: dict[str, Any]) -> Mapping[str, Array]:
        """One call of the wrong kernel."""
        with np.errstate(all="ignore"):
            return self._run(feeds, AttentionAttributes.from_dict(attributes), in_place=True)


def hunt(mutant: Mutant, cases: Sequence[Case]) -> Result | None:
    """The first case that turns the mutant red, its expected group first; None when it survives all of them."""
    backend = MutantBackend(mutant)
    for case in sorted(cases, key=lambda c: c.group != mutant.group):
        result = run_case(backend, case)
        if result.status == "failed":
            return result
    return None


def _compiled(mutant: Mutant) -> Callable[..., Mapping[str, Array]]:
    package = __package__.rpartition(".")[0]
    codec = _module(package, "cache_codec", mutant.edits if mutant.module == "cache_codec" else ())
    reference = _module(package, "reference", mutant.edits if mutant.module == "reference" else ())
    reference["encode"], reference["decode"] = codec["encode"], codec["decode"]
    run: Callable[..., Mapping[str, Array]] = reference["paged_attention"]
    return run


def _module(package: str, name: str, edits: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    source = resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
    for text, replacement in edits:
        if source.count(text) != 1:
            raise ContractError(f"mutant text {text!r} occurs {source.count(text)} times in {name}.py; it must be once")
        source = source.replace(text, replacement)
    module = types.ModuleType(f"{package}.{name}_mutant")
    module.__package__ = package
    exec(compile(source, f"{name}_mutant.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


_CHECK = "    check_values(feeds, attributes, g)\n"
_SCORE = 'score_HP = scale * np.einsum("hd,phd->hp", query_HD, key_PHD[sees_P])'
_SUM = "weight_HP.sum(axis=1) + np.exp(sink_H - top_H)"
_VALUES = 'np.einsum("hp,phd->hd", weight_HP, value_PHD[sees_P])'
_SINK = 'feeds["head_sink"].astype(np.float64) if'
_BLOCK = "    block_P = table_M.astype(np.int64)[position_P // g.block_size]\n"
_WRITTEN = "    written = slot_T != UNMAPPED\n"
_CACHES = "feeds, attributes, g, outputs\n        )"
_TOP = "        top_H = np.maximum(score_HP.max(axis=1), sink_H)\n"
_TILES = """        tiles = [score_HP[:, at : at + 64] for at in range(0, score_HP.shape[1], 64)]
        tops = np.maximum.accumulate([np.maximum(t.max(axis=1), sink_H) for t in tiles])
        top_H = tops[-1]
        score_HP = np.concatenate([t - m[:, None] + top_H[:, None] for t, m in zip(tiles, tops)], axis=1)
"""
_RANGE = "    start, end = visible_range(past, len(query_nHD), a)\n"
_UPDATED = "    slot_T = _slots(feeds, g)\n"
_REPEAT = "np.repeat(decode(stored, scale, g.cache_dtype, head_size), g.query_heads // g.kv_heads, axis=1)"
_KV = '    value_PHD = key_PHD[..., : g.value_head_size] if a.latent else read("value", g.value_head_size)\n'
_SWAP = """    if g.head_size == g.value_head_size and not a.latent:
        key_PHD[:, -1], value_PHD[:, -1] = value_PHD[:, -1].copy(), key_PHD[:, -1].copy()
"""

MUTANTS: tuple[Mutant, ...] = (
    _one(
        "block 0 for a bad id",
        "negative",
        _CHECK,
        '    bad = (feeds["block_table"] < -1) | (feeds["block_table"] >= g.blocks)\n'
        '    feeds = {**feeds, "block_table": np.where(bad, 0, feeds["block_table"])}\n' + _CHECK,
    ),
    _one("block 0 for an unmapped block", "layout", _BLOCK, _BLOCK + "    block_P = np.maximum(block_P, 0)\n"),
    _one("top-left causal mask", "masks", "position_P <= p\n", "position_P <= i\n"),
    _one("causal mask hides the token itself", "masks", "position_P <= p\n", "position_P < p\n"),
    _one("bidirectional treated as causal", "masks", "if a.is_causal:", "if True:"),
    _one(
        "window one too wide", "masks", "position_P > p - a.local_window_size", "position_P >= p - a.local_window_size"
    ),
    _one("window one too narrow", "masks", "position_P > p - a.local", "position_P > p + 1 - a.local"),
    Mutant(
        name="window ignored on decode",
        group="masks",
        edits=(
            ("if a.local_window_size > 0:", "if a.local_window_size > 0 and len(query_nHD) > 1:"),
            (_RANGE, _RANGE + "    start = 0 if len(query_nHD) == 1 else start\n"),
        ),
    ),
    _one("sink ignored", "masks", _SUM, "weight_HP.sum(axis=1)"),
    _one("sink added to values", "masks", _VALUES, "(" + _VALUES + " + np.exp(sink_H - top_H)[:, None])"),
    _one("sink scaled", "masks", _SINK, "(scale * feeds['head_sink'].astype(np.float64)) if"),
    _one(
        "softcap only beyond the cap",
        "masks",
        "if a.softcap > 0:",
        "if a.softcap > 0 and score_HP.max() > a.softcap:",
    ),
    _one(
        "softcap before the bias",
        "masks",
        "        score_HP += slope",
        "        if a.softcap > 0:\n"
        "            score_HP = a.softcap * np.tanh(score_HP / a.softcap)\n"
        "        score_HP += slope",
    ),
    _one("bias from the key's position alone", "masks", "(position_P[sees_P] - p)", "position_P[sees_P]"),
    _one("scale applied twice", "core", _SCORE, _SCORE.replace("scale *", "scale * scale *")),
    _one("scale of zero is the default", "core", "if a.scale is None else", "if not a.scale else"),
    _one("scale of the value head size", "core", "1.0 / np.sqrt(g.head_size)", "1.0 / np.sqrt(g.value_head_size)"),
    Mutant(
        name="stale cache read before the write",
        group="core",
        edits=(
            (_UPDATED, _UPDATED + '    stale = {f"{name}_out": feeds[name].copy() for name in updated}\n'),
            (_CACHES, _CACHES.replace("outputs", "stale")),
        ),
    ),
    _one("missing rescale between tiles", "stress", _TOP, _TILES),
    _one("key and value swapped for one head", "core", _KV, _KV + _SWAP),
    _one(
        "query heads dealt round robin",
        "core",
        _REPEAT,
        "np.tile(decode(stored, scale, g.cache_dtype, head_size), (1, g.query_heads // g.kv_heads, 1))",
    ),
    _one(
        "32-bit element offset",
        "stress",
        _BLOCK,
        _BLOCK
        + "    stride = g.block_size * g.kv_heads * g.head_size\n"
        + "    block_P = np.where(block_P < 0, -1, block_P * stride % 2**31 // stride)\n",
    ),
    _one(
        "32-bit byte offset on write",
        "stress",
        _WRITTEN,
        "    stride = g.kv_heads * g.head_size * feeds['key_cache'].itemsize\n"
        "    slot_T = np.where(slot_T < 0, -1, slot_T * stride % 2**32 // stride)\n" + _WRITTEN,
    ),
    _one("16-bit block id", "layout", _BLOCK, _BLOCK + "    block_P = np.where(block_P < 0, -1, block_P & 0xFFFF)\n"),
    _one("slot -1 written to slot 0", "layout", _WRITTEN, "    slot_T = np.maximum(slot_T, 0)\n" + _WRITTEN),
    _one("slot -1 written to the last slot", "layout", _WRITTEN, "    written = np.ones(len(slot_T), bool)\n"),
    _one(
        "past ignored on prefill",
        "core",
        _RANGE,
        "    past = past if len(query_nHD) == 1 else 0\n" + _RANGE,
    ),
    _one(
        "row without a visible key is NaN",
        "layout",
        "            continue  # a row",
        "            output_nHD[i] = np.nan\n            continue  # a row",
    ),
    _one(
        "dead slots weighted with zero",
        "layout",
        "    return output_nHD\n",
        "    rows = table_M[(table_M >= 0) & (table_M < g.blocks)]\n"
        "    held = [c[rows].astype(np.float64) for n, c in caches.items() if n.endswith('cache_out')]\n"
        "    return output_nHD + 0.0 * sum(np.sum(c) for c in held)\n",
    ),
    _one(
        "write spills into the next slot",
        "core",
        '    outputs[f"{which}_cache_out"][block, offset] = encode',
        '    outputs[f"{which}_cache_out"][block, np.minimum(offset + 1, g.block_size - 1)] = 0\n'
        '    outputs[f"{which}_cache_out"][block, offset] = encode',
    ),
    _one(
        "scores kept in float16",
        "stress",
        _SCORE,
        'score_HP = scale * np.einsum("hd,phd->hp", query_HD, key_PHD[sees_P]).astype(np.float16)',
    ),
    _one("rotary pairs confused", "rotary", "if a.rotary_interleaved:", "if not a.rotary_interleaved:"),
    _one(
        "rotary position without the past",
        "rotary",
        'position_T: Array = np.repeat(feeds["past_seqlens"].astype(np.int64), new_S) + within_T',
        "position_T: Array = within_T",
    ),
    _one(
        "rotary turns backwards",
        "rotary",
        "x_TnD[..., first] * cos - x_TnD[..., second] * sin",
        "x_TnD[..., first] * cos + x_TnD[..., second] * sin",
    ),
    _one("rotary offset ignored", "rotary", "first = a.rotary_offset + np.arange(half)", "first = np.arange(half)"),
    _one("norm without epsilon", "rotary", "keepdims=True) + epsilon)", "keepdims=True))"),
    _one("norm over all heads", "rotary", "np.mean(x_TnD**2, axis=-1", "np.mean(x_TnD**2, axis=(-2, -1)"),
    _one(
        "codes cut off instead of rounded",
        "quantised",
        "np.clip(np.rint(codes), -128, 127)",
        "np.clip(np.trunc(codes), -128, 127)",
        "cache_codec",
    ),
    _one(
        "codes wrap around",
        "quantised",
        "np.clip(np.rint(codes), -128, 127).astype(np.int8)",
        "np.rint(codes).astype(np.int64).astype(np.int8)",
        "cache_codec",
    ),
    _one("nibbles swapped", "quantised", "[stored & 15, stored >> 4]", "[stored >> 4, stored & 15]", "cache_codec"),
    _one("fp8 overflow is NaN", "quantised", "np.clip(codes, -FP8_MAX, FP8_MAX).astype", "codes.astype", "cache_codec"),
    _one("per-token scale of signed maximum", "quantised", "np.abs(x_TGD).max(axis=-1)", "x_TGD.max(axis=-1)"),
    _one(
        "value dequantised with the key's scale",
        "quantised",
        "        scale = _channel_scale(which[0], feeds, a)\n",
        "        scale = _channel_scale('k', feeds, a)\n",
    ),
    _one(
        "latent value from the trailing channels",
        "latent",
        "key_PHD[..., : g.value_head_size]",
        "key_PHD[..., -g.value_head_size :]",
    ),
)
