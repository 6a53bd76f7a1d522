"""Reads one attention around a Softmax: a product of two token-dependent operands before it, another one behind it.

Everything about it - layouts, head counts, scale, mask, cap, sinks - is read off by evaluation (layout.py, score.py),
not matched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..decompose import FORM_KEY
from ..errors import NotConvertible
from ..evaluate import Array
from .anchors import ScoreAnchor, find_score_anchors
from .cache import CacheIndex
from .joined import find_row_order, join_operands, score_factors
from .latent import as_latent
from .layout import TOKENS, find_operand, find_output
from .probe import Probe
from .rows import heads_first
from .score import fit_score
from .site import AttentionSite, CacheLink, Operand

__all__ = ["find_score_anchors", "recognise_scores"]


def recognise_scores(probe: Probe, caches: CacheIndex, anchor: ScoreAnchor, longest: int) -> AttentionSite:
    """Everything about one attention. Raises NotConvertible with the reason when the op cannot compute it."""
    name = anchor.region.softmax.name or ""
    find_row_order(probe, anchor)
    query, key, value = _operands(probe, anchor, name)
    output = find_output(probe, anchor.mixing.outputs[0], _row_places(probe, anchor.mixing.outputs[0]))
    if output is None:
        raise NotConvertible("the layout of the attention output is not understood", name, kind="layout")
    score = fit_score(probe, anchor.region, longest)
    key_links: dict[str, CacheLink] = {}
    for product in anchor.products:
        links = _links(caches, product.key, name)
        check_cache_is_per_token(probe, product.key, links, name)
        key_links.update((link.past.name or "", link) for link in links)
    value_links = _links(caches, anchor.value, name)
    check_cache_is_per_token(probe, anchor.value, value_links, name)
    site = AttentionSite(
        node=anchor.region.softmax,
        form=anchor.region.softmax.metadata_props.get(FORM_KEY, "softmax"),
        query=query,
        key=key,
        value=value,
        output=output,
        score=score,
        key_cache=tuple(key_links.values()),
        value_cache=tuple(value_links),
        dropped=tuple(probe.view.between(anchor.operands, anchor.mixing.outputs[0])),
    )
    return as_latent(probe, site, anchor.value, _value_places(probe, anchor.value, anchor.mixing))


def _operands(probe: Probe, anchor: ScoreAnchor, name: str) -> tuple[Operand, Operand, Operand]:
    queries, keys = [], []
    for product in anchor.products:
        queries.append(_operand(probe, "query", product.query, _row_places(probe, product.query), name))
        keys.append(_operand(probe, "key", product.key, _key_places(probe, product.key, product.node), name))
    value = _operand(probe, "value", anchor.value, _value_places(probe, anchor.value, anchor.mixing), name)
    query, key = queries[0], keys[0]
    if len(queries) > 1:
        query, key = join_operands(queries, keys, score_factors(probe, anchor), name)
    if key.heads != value.heads:
        raise NotConvertible(f"{key.heads} key heads but {value.heads} value heads", name, kind="layout")
    if query.heads % key.heads:
        raise NotConvertible(f"{key.heads} key heads do not divide {query.heads} query heads", name, kind="layout")
    return query, key, value


def _operand(probe: Probe, role: str, target: ir.Value, place_HTD: Array, name: str) -> Operand:
    operand = find_operand(probe, probe.view.dominators(target), target, place_HTD)
    if operand is None:
        raise NotConvertible(f"the layout of the {role} is not understood", name, kind="layout")
    return operand


def _row_places(probe: Probe, value: ir.Value) -> Array:
    """Places of (head, token, channel) in a query or an attention output."""
    shape = probe.shape(value, TOKENS, 0)
    places = heads_first(probe, value, np.arange(int(np.prod(shape))).reshape(shape), TOKENS)
    if len(shape) < 3 or places is None:
        raise NotConvertible(f"the rows of '{value.name}' {list(shape)} are not understood", kind="layout")
    return places


def _broadcast_places(probe: Probe, value: ir.Value, product: ir.Node) -> Array:
    """Places in keys or values, one matrix a head: those of leading axes that count tokens must be the same."""
    shape, made = (probe.shape(v, TOKENS, 0) for v in (value, product.outputs[0]))
    lead = [1 if per_new else n for n, (_, per_new, _) in zip(made, _factors(probe, product.outputs[0]), strict=True)]
    places = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        return np.broadcast_to(places, (*lead[:-2], *shape[-2:])).reshape(-1, *shape[-2:])
    except ValueError:
        raise NotConvertible(
            f"each token has keys or values of its own in '{value.name}'", product.name or "", kind="layout"
        ) from None


def _factors(probe: Probe, value: ir.Value) -> Sequence[tuple[int, int, int]]:
    affine = probe.affine(value)
    return ((0, 0, 0),) * len(probe.shape(value, TOKENS, 0)) if affine is None else affine


def _key_places(probe: Probe, value: ir.Value, scores: ir.Node) -> Array:
    return _broadcast_places(probe, value, scores).transpose(0, 2, 1)


def _value_places(probe: Probe, value: ir.Value, mixing: ir.Node) -> Array:
    return _broadcast_places(probe, value, mixing)


def _links(caches: CacheIndex, value: ir.Value, name: str) -> list[CacheLink]:
    if not caches.by_node:
        return []
    links, complete = caches.reached_from(value)
    if not complete or not links:
        raise NotConvertible(
            "keys or values do not come from a cache although the model has caches",
            name,
            "cross attention and attention over uncached tokens cannot be paged",
            kind="cache",
        )
    return links


def check_cache_is_per_token(probe: Probe, target: ir.Value, links: list[CacheLink], name: str) -> None:
    """Proves that what is computed from cached entries is what was computed from them when they were new.

    Feeds the same entries once as new tokens and once split into past and new; the operand must be the same.
    """
    if not links:
        return
    new, past = 4, 3
    rng = np.random.default_rng(7)
    whole: dict[ir.Value, Array] = {}
    split: dict[ir.Value, Array] = {}
    for link in links:
        if link.new is None:
            return
        shape = probe.shape(link.joined, new, past)
        entries = rng.standard_normal(shape).astype(probe.dtype(link.joined))
        axis = link.node.attributes["axis"].as_int() % len(shape)
        before, after = np.split(entries, [past], axis=axis)
        head = link.node.inputs[0]
        if head is None:
            return
        whole[link.new], whole[head] = (
            entries,
            before[tuple(slice(0, 0) if i == axis else slice(None) for i in range(len(shape)))],
        )
        split[link.new], split[head] = after, before
    once = probe.region([target], whole, new + past, 0)[0]
    twice = probe.region([target], split, new, past)[0]
    if once.shape != twice.shape or not np.allclose(once, twice, rtol=1e-3, atol=1e-4):
        raise NotConvertible("cached keys or values are not what they were when they were new", name, kind="cache")
