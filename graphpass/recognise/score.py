"""Finds by evaluation what a graph does to attention scores between q.k and the probabilities.

The region from the scores X to the softmax input Z and on to the probabilities P is run with chosen X at many
(new, past) sizes; scale, softcap, ALiBi slopes, visible range and sinks are fitted to Z and proven on P with random X.
Nothing is assumed of how the region is spelled. What does not fit is refused, with the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import NotConvertible
from ..evaluate import Array, Unevaluable
from .probe import Probe
from .rows import from_heads_first, heads_first
from .site import ScoreFunction
from .sizes import LARGEST_LENGTH, base_sizes, probe_sizes

__all__ = ["ScoreRegion", "attend_probabilities", "fit_score", "fit_visible"]


@dataclass(frozen=True)
class ScoreRegion:
    """From the scores `raw` ([..., T, K], heads in the leading axes) to softmax input and probabilities."""

    raw: ir.Value
    softmax: ir.Node
    probabilities: ir.Value

    @property
    def logits(self) -> ir.Value:
        """The softmax input Z."""
        value = self.softmax.inputs[0]
        if value is None:
            raise NotConvertible("a Softmax has no input", self.softmax.name or "")
        return value


def fit_score(probe: Probe, region: ScoreRegion, longest: int) -> ScoreFunction:
    """The score function of a region. Raises NotConvertible when the contract cannot say what the region does."""
    name = region.softmax.name or ""
    scale, softcap = _fit_transfer(probe, region)
    sizes = probe_sizes(probe, [region.probabilities], {region.raw}, longest)
    slopes: Array | None = None
    sinks: Array | None = None
    rows: list[tuple[int, Array]] = []
    limit: int | None = None
    base = base_sizes(probe)
    for new, past in sorted(sizes, key=lambda s: (s not in base, s[0] + s[1])):
        if limit is not None and new + past > limit:
            continue
        try:
            z_HTK = _logits(probe, region, _no_scores(probe, region, new, past), past)[0]
        except Unevaluable:
            if (new, past) in base:
                raise
            limit = new + past - 1  # the source itself does not run beyond
            continue
        if z_HTK.shape[-1] == new + past + 1:
            sinks = z_HTK[:, -1, -1] - z_HTK[:, -1, new + past - 1]
            z_HTK = z_HTK[..., :-1]
        difference_HTK = z_HTK - _diagonal(z_HTK, past)
        if slopes is None and new + past > 1:
            slopes = _fit_slopes(difference_HTK, past)
        known = np.zeros(len(z_HTK)) if slopes is None else slopes
        rows.extend(_visible_rows(difference_HTK, known, past, name))
    window = fit_visible(rows, name)
    function = ScoreFunction(
        scale=scale,
        softcap=softcap,
        window=window,
        slopes=() if slopes is None or not np.any(slopes) else tuple(float(s) for s in slopes),
        sinks=() if sinks is None else tuple(float(s) for s in sinks),
        limit=limit,
    )
    for new, past in base:
        _prove(probe, region, function, new, past)
    return function


def _no_scores(probe: Probe, region: ScoreRegion, new: int, past: int) -> Array:
    """Zeros `[H, T, K]`."""
    return _heads_first(probe, region.raw, np.zeros(probe.shape(region.raw, new, past)), new)


def _heads_first(probe: Probe, value: ir.Value, array: Array, new: int) -> Array:
    ordered = heads_first(probe, value, array, new)
    if ordered is None:
        raise NotConvertible(f"the rows of the scores '{value.name}' are not understood", kind="layout")
    return ordered.astype(np.float64)


def _logits(probe: Probe, region: ScoreRegion, raw_HTK: Array, past: int) -> tuple[Array, Array]:
    """Z and P as `[H, T, K]` in float64 for given scores."""
    new = raw_HTK.shape[1]
    given = {region.raw: from_heads_first(probe, region.raw, raw_HTK, past).astype(probe.dtype(region.raw))}
    z, p = probe.region([region.logits, region.probabilities], given, new, past)
    return _heads_first(probe, region.logits, z, new), _heads_first(probe, region.probabilities, p, new)


def _diagonal(z_HTK: Array, past: int) -> Array:
    new = z_HTK.shape[1]
    own = past + np.arange(new)
    return z_HTK[:, np.arange(new), own][..., None]


def _fit_transfer(probe: Probe, region: ScoreRegion) -> tuple[float, float]:
    """Scale and softcap of the map from one score to one logit, from a sweep over scores."""
    new, past = (1, 1) if probe.has_past else (2, 0)
    zero = _no_scores(probe, region, new, past)
    name = region.softmax.name or ""

    def transfer(score: float) -> float:
        raw = zero.copy()
        raw[..., -1, -1] = score  # the last token looks at itself; its predecessor is the reference
        z_HK = _logits(probe, region, raw, past)[0][:, -1]
        zero_HK = _logits(probe, region, zero, past)[0][:, -1]
        with np.errstate(invalid="ignore"):  # a token that does not see itself
            gain = z_HK[:, 1] - zero_HK[:, 1]
        if np.all(np.abs(zero_HK[:, 0]) < LARGEST_LENGTH):  # not masked: what is taken off whole rows cancels
            gain = gain - (z_HK[:, 0] - zero_HK[:, 0])
        if not np.allclose(gain, gain[0], rtol=1e-3, atol=1e-6):
            raise NotConvertible("heads scale their scores differently", name, kind="score")
        return float(gain[0])

    half = probe.dtype(region.raw) == np.float16
    large, small = (64.0, 4.0) if half else (4096.0, 1.0)
    high, low = transfer(large), transfer(small)
    tolerance = 3e-3 if half else 1e-5
    if abs(high / large - low / small) <= tolerance * abs(low / small):
        scale = _snap(high / large, probe, region, 2e-3 if half else 1e-6)
        return scale, 0.0
    cap = _snap(transfer(1e4 if half else 1e6), probe, region, 2e-3 if half else 1e-5)
    # Inverse of cap * tanh(scale * x / cap) at a point of small curvature.
    point = 0.25 * cap / max(abs(low / small), 1e-6)
    scale = _snap(float(np.arctanh(transfer(point) / cap)) * cap / point, probe, region, 2e-3 if half else 1e-5)
    for score in (-3.0 * point, point, 2.0 * point, 8.0 * point):
        expected = cap * np.tanh(scale * score / cap)
        if abs(transfer(score) - expected) > (1e-2 if half else 1e-3) * abs(expected):
            raise NotConvertible("scores pass a function that is neither linear nor a tanh cap", name, kind="score")
    return scale, cap


def _snap(value: float, probe: Probe, region: ScoreRegion, tolerance: float) -> float:
    """The constant of the region (or its inverse) that the fitted value must be, when there is one near it."""
    nodes = probe.view.between([region.raw], region.logits)
    best = value
    for node in nodes:
        for operand in node.inputs:
            tensor = operand.const_value if operand is not None else None
            if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
                continue
            constant = float(tensor.numpy().reshape(-1)[0])
            for candidate in (constant, 1.0 / constant if constant else 0.0):
                if candidate and abs(candidate - value) <= tolerance * abs(value):
                    best = candidate
    return best


def _fit_slopes(difference_HTK: Array, past: int) -> Array:
    """Slope per head from the last token's view of its predecessors; zeros when there is no such bias."""
    own = past + difference_HTK.shape[1] - 1
    near = difference_HTK[:, -1, own - 1] if own else np.zeros(difference_HTK.shape[0])
    if not np.all(np.isfinite(near)) or np.any(np.abs(near) > 100) or not np.any(np.abs(near) > 1e-7):
        return np.zeros(difference_HTK.shape[0])
    far = difference_HTK[:, -1, max(0, own - 16)] / min(16, own)
    return np.asarray(-(far if np.allclose(far, near, rtol=1e-2) else near), np.float64)


def _visible_rows(difference_HTK: Array, slopes: Array, past: int, name: str) -> list[tuple[int, Array]]:
    """Per token (position, which keys it sees); raises when heads differ or an entry is neither seen nor masked."""
    _, new, keys = difference_HTK.shape
    rows: list[tuple[int, Array]] = []
    for token in range(new):
        distance_K = np.arange(keys) - (past + token)
        expected_HK = slopes[:, None] * distance_K
        actual_HK = difference_HTK[:, token]
        with np.errstate(invalid="ignore"):
            residual_HK = actual_HK - expected_HK
            seen_HK = np.abs(residual_HK) <= 2e-3 * (1.0 + np.abs(expected_HK))
            masked_HK = ~np.isfinite(residual_HK) | (residual_HK < -5000.0)
        odd_HK = ~(seen_HK | masked_HK)
        if odd_HK.any():
            head, key = (int(i) for i in np.argwhere(odd_HK)[0])
            raise NotConvertible(
                f"the mask adds {actual_HK[head, key]:.4g} where position {past + token} looks at {key} (head {head}); "
                f"causal, window and ALiBi explain {expected_HK[head, key]:.4g}, residual {residual_HK[head, key]:.4g}",
                name,
                "only causal, windowed and ALiBi masks can be paged",
                kind="mask",
            )
        if not np.array_equal(seen_HK, np.broadcast_to(seen_HK[:1], seen_HK.shape)):
            raise NotConvertible("heads of one layer have different masks", name, kind="mask")
        rows.append((past + token, seen_HK[0]))
    return rows


def fit_visible(rows: Sequence[tuple[int, Any]], name: str) -> int | None:
    """The window W that explains which keys each position sees (None: all of the past). Raises when nothing does."""
    widths: set[int] = set()
    longest_full = 0
    for position, seen in rows:
        seen_at = np.flatnonzero(seen)
        if seen_at.size and seen_at[-1] > position:
            raise NotConvertible(
                f"position {position} sees {int(seen_at[-1])}, which is in its future",
                name,
                "bidirectional and prefix masks cannot be paged",
                kind="mask",
            )
        first = int(seen_at[0]) if seen_at.size else position + 1
        if seen_at.size != position - first + 1:
            raise NotConvertible(
                f"position {position} sees {seen_at.size} of the keys from {first} on: the mask has holes",
                name,
                "dilated, block-sparse and tree masks cannot be paged",
                kind="mask",
            )
        if first == 0:
            longest_full = max(longest_full, position + 1)
        else:
            widths.add(position - first + 1)
    if len(widths) > 1 or (widths and longest_full > max(widths)):
        raise NotConvertible(
            f"the mask is no window: rows see {sorted(widths)[:6]} keys, and the longest full row {longest_full}",
            name,
            "the visible range must have one fixed length",
            kind="mask",
        )
    return widths.pop() if widths else None


def attend_probabilities(function: ScoreFunction, raw_HTK: Array, past: int) -> Array:
    """Probabilities that the contract gives for raw scores `[H, T, K]`, in float64."""
    _, new, keys = raw_HTK.shape
    position_T1 = past + np.arange(new)[:, None]
    key_1K = np.arange(keys)[None]
    score = raw_HTK * function.scale
    if function.slopes:
        score = score + np.asarray(function.slopes)[:, None, None] * (key_1K - position_T1)
    if function.softcap:
        score = function.softcap * np.tanh(score / function.softcap)
    seen = key_1K <= position_T1
    if function.window is not None:
        seen &= key_1K > position_T1 - function.window
    score = np.where(seen, score, -np.inf)
    top = score.max(-1, keepdims=True)
    if function.sinks:
        top = np.maximum(top, np.asarray(function.sinks)[:, None, None])
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True)
    if function.sinks:
        total = total + np.exp(np.asarray(function.sinks)[:, None, None] - top)
    return np.asarray(weight / total)


def _prove(probe: Probe, region: ScoreRegion, function: ScoreFunction, new: int, past: int) -> None:
    """Compares probabilities for random scores with what the fitted function gives."""
    shape = _no_scores(probe, region, new, past).shape
    spread = 2.0 / max(function.scale, 1e-3)
    raw = np.asarray(np.random.default_rng(new * 1009 + past).standard_normal(shape) * spread, probe.dtype(region.raw))
    actual = _logits(probe, region, raw, past)[1]
    expected = attend_probabilities(function, raw.astype(np.float64), past)
    error = float(np.max(np.abs(actual - expected))) if actual.shape == expected.shape else float("inf")
    if not error <= (5e-3 if raw.dtype == np.float16 else 1e-4):
        raise NotConvertible(
            f"the probabilities differ from {function.kind} attention by {error:.2g} at {new} new and {past} past",
            region.softmax.name or "",
            kind="score",
        )
