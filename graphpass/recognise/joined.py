"""Scores that are a sum of products: their operands become one operand with parts side by side in each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ..errors import NotConvertible
from ..evaluate import Array
from .anchors import ScoreAnchor
from .layout import TOKENS, moved
from .probe import Probe
from .rows import has_joined_rows, heads_first
from .site import Operand

__all__ = ["find_row_order", "join_operands", "score_factors"]


def find_row_order(probe: Probe, anchor: ScoreAnchor) -> None:
    """Notes in the probe which values of an attention hold all tokens of a head before those of the next, where heads
    and tokens share an axis: found by the token that each row of the query comes from."""
    queries = [p.query for p in anchor.products if has_joined_rows(probe, p.query)]
    if not any(_tokens_innermost(probe, query) for query in queries):
        return
    region = anchor.region
    rows = [*queries, *(p.scores for p in anchor.products), region.raw, region.logits, region.probabilities]
    probe.tokens_innermost.update(v for v in (*rows, anchor.mixing.outputs[0]) if has_joined_rows(probe, v))


def _tokens_innermost(probe: Probe, query: ir.Value) -> bool:
    rows = next(axis for axis, (_, per_new, _) in enumerate(probe.affine(query) or ()) if per_new > 1)
    for candidate in probe.view.dominators(query):
        axes = [axis for axis, dim in enumerate(probe.affine(candidate) or ()) if dim == (0, 1, 0)]
        if len(axes) != 1:
            continue
        found = moved(probe, candidate, query)
        if found is None:
            return False
        shape = probe.shape(candidate, TOKENS, 0)
        token = np.unravel_index(found.index, shape)[axes[0]]
        token_of_row = np.moveaxis(token, rows, -1).reshape(-1, token.shape[rows])[0]
        return bool(np.array_equal(token_of_row, np.arange(token_of_row.size) % TOKENS))
    return False


def score_factors(probe: Probe, anchor: ScoreAnchor) -> tuple[float, ...]:
    """By what each product is multiplied before their sum. Raises NotConvertible when the scores are no such sum."""
    name = anchor.region.softmax.name or ""
    sizes = [(TOKENS, 0), (4, 9), (1, 12)] if probe.has_past else [(TOKENS, 0), (4, 0)]
    factors: list[float] = []
    for product in anchor.products:
        ones = {p.scores: np.full(probe.shape(p.scores, TOKENS, 0), float(p is product)) for p in anchor.products}
        factors.append(float(_sum(probe, anchor, ones, TOKENS, 0).flat[0]))
    rng = np.random.default_rng(19)
    for new, past in sizes:
        given = {p.scores: rng.standard_normal(probe.shape(p.scores, new, past)) for p in anchor.products}
        actual = heads_first(probe, anchor.region.raw, _sum(probe, anchor, given, new, past), new)
        terms = [heads_first(probe, value, array, new) for value, array in given.items()]
        tolerance = 1e-2 if probe.dtype(anchor.region.raw) == np.float16 else 1e-4
        expected = sum(f * t for f, t in zip(factors, terms, strict=True) if t is not None)
        if actual is None or any(t is None for t in terms) or not np.allclose(actual, expected, rtol=0, atol=tolerance):
            raise NotConvertible(
                f"the scores are no weighted sum of the {len(factors)} products that they come from",
                name,
                "scores may be a sum of products, each times a constant",
                kind="score",
            )
    if not all(np.isfinite(f) and f for f in factors):
        raise NotConvertible(f"products are multiplied by {factors} in the scores", name, kind="score")
    return tuple(factors)


def _sum(probe: Probe, anchor: ScoreAnchor, given: dict[ir.Value, Array], new: int, past: int) -> Array:
    typed = {value: array.astype(probe.dtype(value)) for value, array in given.items()}
    return probe.region([anchor.region.raw], typed, new, past)[0].astype(np.float64)


def join_operands(
    queries: Sequence[Operand], keys: Sequence[Operand], factors: Sequence[float], name: str
) -> tuple[Operand, Operand]:
    """One query and one key whose product is the weighted sum of the products; keys are stored as they are, so the
    scales of a part go into its query."""
    heads, groups = max(q.heads for q in queries), max(k.heads for k in keys)
    for operand, most in (*((q, heads) for q in queries), *((k, groups) for k in keys)):
        if most % operand.heads:
            raise NotConvertible(f"{operand.heads} heads of one product do not divide {most}", name, kind="layout")
    scales = [f * q.scale * k.scale for f, q, k in zip(factors, queries, keys, strict=True)]
    query = Operand(
        value=None,
        heads=heads,
        size=sum(q.size for q in queries),
        scale=scales[0],
        parts=tuple(replace(q, scale=s / scales[0]) for q, s in zip(queries, scales, strict=True)),
    )
    key = Operand(
        value=None, heads=groups, size=sum(k.size for k in keys), parts=tuple(replace(k, scale=1.0) for k in keys)
    )
    return query, key
