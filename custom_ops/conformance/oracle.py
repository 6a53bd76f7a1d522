"""A second formulation of the contract, to judge the reference itself.

It shares no arithmetic with `reference` or `cache_codec`: one token, one head and one key at a time, scalar formulas, a
running softmax, the cache as single stored codes that are decoded and encoded by searching tables of all values. It
takes valid calls only and is slow by intent. The reference is further checked against onnxruntime's
GroupQueryAttention and ONNX's node tests (see tests/conformance).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..spec import AttentionAttributes
from ..validation import Array, Feeds

__all__ = ["token_by_token"]


def token_by_token(feeds: Feeds, attributes: AttentionAttributes) -> dict[str, Array]:
    """Outputs by contract name of a valid call."""
    return _Oracle(feeds, attributes).run()


class _Oracle:
    def __init__(self, feeds: Feeds, attributes: AttentionAttributes) -> None:
        self.f, self.a = feeds, attributes
        self.H, self.G = attributes.num_heads, attributes.kv_num_heads
        self.B = feeds["key_cache"].shape[1]
        self.kind = attributes.k_cache_dtype or str(feeds["key_cache"].dtype.name)
        self.D, self.Dv = self._sizes()
        self.k_cache = feeds["key_cache"].copy()
        self.v_cache = feeds["value_cache"].copy() if "value_cache" in feeds else self.k_cache
        self.k_scale = feeds["k_scale"].copy() if "k_scale" in feeds else None
        self.v_scale = feeds["v_scale"].copy() if "v_scale" in feeds else None

    def _sizes(self) -> tuple[int, int]:
        width = self.f["query"].shape[1]
        if "key" in self.f:
            D = width // self.H
            return D, (self.a.v_head_size or D) if self.a.latent else self.f["value"].shape[1] // self.G
        kw, vw = self.f["key_cache"].shape[3], self.f["value_cache"].shape[3]
        if self.kind != "int4":
            return kw, vw
        fits = [
            (d, v) for d in (2 * kw - 1, 2 * kw) for v in (2 * vw - 1, 2 * vw) if self.H * d + self.G * (d + v) == width
        ]
        return fits[0]

    def run(self) -> dict[str, Array]:
        starts = self.f["cumulative_sequence_length"].tolist()
        tokens = [
            (s, t, int(self.f["past_seqlens"][s]) + t - starts[s])
            for s in range(len(starts) - 1)
            for t in range(starts[s], starts[s + 1])
        ]
        for s, t, position in tokens:
            self._store(s, t, position)
        rows = np.zeros((len(tokens), self.H * self.Dv))
        for s, t, position in tokens:
            end = int(self.f["past_seqlens"][s]) + starts[s + 1] - starts[s]
            for h in range(self.H):
                rows[t, h * self.Dv : (h + 1) * self.Dv] = self._row(s, t, position, h, end)
        out = {"output": rows.astype(self.f["query"].dtype), "key_cache_out": self.k_cache}
        if not self.a.latent:
            out["value_cache_out"] = self.v_cache
        for letter in "kv":
            if getattr(self.a, f"{letter}_quant_type") == "PER_TOKEN":
                out[f"{letter}_scale_out"] = getattr(self, f"{letter}_scale")
        return out

    def _vector(self, which: str, t: int, head: int, position: int) -> list[float]:
        """One head of a new token's query or key (after norm and rotary) or value."""
        size = self.Dv if which == "value" else self.D
        at = head * size
        source = self.f.get(which)
        if source is None or "key" not in self.f:
            source = self.f["query"]
            at += {"query": 0, "key": self.H * self.D, "value": (self.H + self.G) * self.D}[which]
        x = [float(v) for v in source[t, at : at + size]]
        if which == "value":
            return x
        gain = self.f.get("q_norm_weight" if which == "query" else "k_norm_weight")
        if gain is not None:
            root = math.sqrt(math.fsum(v * v for v in x) / size + self.a.qk_norm_epsilon)
            x = [v / root * float(w) for v, w in zip(x, gain, strict=True)]
        if self.a.do_rotary:
            x = self._rotated(x, position)
        return x

    def _rotated(self, x: list[float], position: int) -> list[float]:
        out = list(x)
        half = self.f["cos_cache"].shape[1]
        for i in range(half):
            first = self.a.rotary_offset + (2 * i if self.a.rotary_interleaved else i)
            second = first + (1 if self.a.rotary_interleaved else half)
            turned = complex(x[first], x[second]) * complex(
                float(self.f["cos_cache"][position, i]), float(self.f["sin_cache"][position, i])
            )
            out[first], out[second] = turned.real, turned.imag
        return out

    def _place(self, s: int, position: int) -> tuple[int, int]:
        return int(self.f["block_table"][s, position // self.B]), position % self.B

    def _store(self, s: int, t: int, position: int) -> None:
        if "slot_mapping" in self.f:
            slot = int(self.f["slot_mapping"][t])
            block, offset = divmod(slot, self.B) if slot >= 0 else (-1, 0)
        else:
            block, offset = self._place(s, position)
        if block < 0:
            return
        for head in range(self.G):
            self._put("k", self._vector("key", t, head, position), block, offset, head)
            if not self.a.latent:
                self._put("v", self._vector("value", t, head, position), block, offset, head)

    def _scales(self, letter: str, block: int, offset: int, head: int, size: int) -> list[float]:
        quant, scale = getattr(self.a, f"{letter}_quant_type"), getattr(self, f"{letter}_scale")
        if quant == "NONE":
            return [1.0] * size
        if quant == "PER_TENSOR":
            return [float(scale[0])] * size
        if quant == "PER_CHANNEL":
            return [float(v) for v in scale[head, 0]]
        return [float(scale[block, head, offset])] * size

    def _put(self, letter: str, x: list[float], block: int, offset: int, head: int) -> None:
        if getattr(self.a, f"{letter}_quant_type") == "PER_TOKEN":
            getattr(self, f"{letter}_scale")[block, head, offset] = max(abs(v) for v in x) / 127
        cache = getattr(self, f"{letter}_cache")
        scales = self._scales(letter, block, offset, head, len(x))
        for i, (value, scale) in enumerate(zip(x, scales, strict=True)):
            if self.kind == "int4":
                code = int(_nearest_integer(value, scale, -8, 7)) + 8
                old = int(cache[block, offset, head, i // 2])
                cache[block, offset, head, i // 2] = (old & 0xF0 | code) if i % 2 == 0 else (old & 0x0F | code << 4)
            elif self.kind == "int8":
                cache[block, offset, head, i] = _nearest_integer(value, scale, -128, 127)
            elif self.kind.startswith("float8"):
                cache.view(np.uint8)[block, offset, head, i] = _nearest_fp8(value / scale if scale else 0.0)
            else:
                cache[block, offset, head, i] = value

    def _get(self, letter: str, block: int, offset: int, head: int, size: int) -> list[float]:
        cache = self.k_cache if self.a.latent else getattr(self, f"{letter}_cache")
        stored = cache[block, offset, head]
        if self.kind == "int4":
            codes = [float((int(stored[i // 2]) >> (4 * (i % 2))) % 16 - 8) for i in range(size)]
        elif self.kind.startswith("float8"):
            codes = [_FP8[int(b)] for b in stored.view(np.uint8)[:size]]
        else:
            codes = [float(v) for v in stored[:size]]
        scales = self._scales(
            "k" if self.a.latent else letter, block, offset, head, len(stored) if self.kind != "int4" else size
        )
        return [c * s for c, s in zip(codes, scales, strict=False)]

    def _row(self, s: int, t: int, position: int, h: int, end: int) -> Any:
        """Attention of one query head: a running softmax over the keys from the last to the first."""
        query = np.array(self._vector("query", t, h, position))
        scale = self.a.scale if self.a.scale is not None else self.D**-0.5
        head = h * self.G // self.H
        top, total, value = -math.inf, 0.0, np.zeros(self.Dv)
        if "head_sink" in self.f:
            top, total = float(self.f["head_sink"][h]), 1.0
        last = position if self.a.is_causal else end - 1
        first = max(0, position - self.a.local_window_size + 1) if self.a.local_window_size > 0 else 0
        for j in range(last, first - 1, -1):
            block, offset = self._place(s, j)
            if block == -1:
                continue
            score = scale * float(query @ np.array(self._get("k", block, offset, head, self.D)))
            if self.a.alibi_slopes:
                score -= self.a.alibi_slopes[h] * (position - j)
            if self.a.softcap > 0:
                score = self.a.softcap * math.tanh(score / self.a.softcap)
            new_top = max(top, score)
            shrink = math.exp(top - new_top) if top > -math.inf else 0.0
            weight = math.exp(score - new_top)
            value = value * shrink + weight * np.array(self._get("v", block, offset, head, self.Dv))
            top, total = new_top, total * shrink + weight
        return value / total if total > 0 else value


def _nearest_integer(value: float, scale: float, low: int, high: int) -> int:
    if scale == 0:
        return 0
    ratio = value / scale
    if math.isnan(ratio):
        return 0
    floor = math.floor(max(min(ratio, 1e6), -1e6))
    rest = max(min(ratio, 1e6), -1e6) - floor
    nearest = floor + (1 if rest > 0.5 or (rest == 0.5 and floor % 2) else 0)
    return max(low, min(high, nearest))


def _fp8_value(code: int) -> float:
    """e4m3fn: sign, 4 exponent bits with bias 7, 3 mantissa bits; all ones is NaN, there is no infinity."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_FP8 = [_fp8_value(code) for code in range(256)]
_FP8_POSITIVE = np.array(_FP8[:127])


def _nearest_fp8(value: float) -> int:
    if math.isnan(value):
        return 127
    sign = 128 if math.copysign(1.0, value) < 0 else 0
    distance = np.abs(_FP8_POSITIVE - min(abs(value), 448.0))
    ties = np.flatnonzero(distance == distance.min())
    even = [code for code in ties if code % 2 == 0]
    return sign | int(even[0] if even else ties[0])
