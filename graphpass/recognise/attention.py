"""Finds attention around a Softmax: a product of two token-dependent operands before it, another one behind it.

Everything else about it - layouts, head counts, scale, mask, cap, sinks - is read off by evaluation (layout.py,
score.py), not matched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..decompose import FORM_KEY
from ..errors import NotConvertible
from ..evaluate import Array
from ..graph import GraphView
from .cache import CacheIndex
from .layout import TOKENS, find_operand, find_output
from .probe import Probe
from .rows import heads_first
from .score import ScoreRegion, fit_score
from .site import AttentionSite, CacheLink, Operand

__all__ = ["ScoreAnchor", "find_score_anchors", "recognise_scores"]


@dataclass(frozen=True)
class ScoreAnchor:
    """The two products and the softmax of one attention, and its operands."""

    region: ScoreRegion
    scores: ir.Node
    mixing: ir.Node
    query: ir.Value
    key: ir.Value
    value: ir.Value


def find_score_anchors(view: GraphView, caches: CacheIndex) -> list[ScoreAnchor]:
    """All attentions of the graph in order. A Softmax over anything but a product of two token operands is none."""
    anchors = [_anchor(view, caches, node) for node in view.graph if node.op_type == "Softmax"]
    return [a for a in anchors if a is not None]


def _anchor(view: GraphView, caches: CacheIndex, softmax: ir.Node) -> ScoreAnchor | None:
    scores, other = _product_before(view, softmax)
    if scores is None:
        return None
    found = _product_behind(view, softmax)
    if found is None:
        return None
    if other is not None:
        raise NotConvertible(
            f"scores are changed by what '{other.name}' computes from the tokens themselves",
            softmax.name or "",
            "only masks and biases that depend on positions alone can be paged",
            kind="score",
        )
    mixing, probabilities, value = found
    left, right = scores.inputs[0], scores.inputs[1]
    if left is None or right is None:
        return None
    if caches.by_node and caches.reached_from(left)[1] and not caches.reached_from(right)[1]:
        raise NotConvertible("keys are the left factor of the score product", scores.name or "", kind="layout")
    region = ScoreRegion(scores.outputs[0], softmax, probabilities)
    return ScoreAnchor(region, scores, mixing, left, right, value)


def _product_before(view: GraphView, softmax: ir.Node) -> tuple[ir.Node | None, ir.Node | None]:
    """The product of two token operands that token paths into the softmax come from, and a node that is on others."""
    products: set[ir.Node] = set()
    other: ir.Node | None = None
    stack = [v for v in softmax.inputs if view.taint(v)]
    seen: set[ir.Node] = set()
    while stack:
        value = stack.pop()
        producer = value.producer() if value is not None else None
        if producer is None or len(seen) > 64:
            return None, None
        if producer in seen:
            continue
        seen.add(producer)
        if producer.op_type == "MatMul" and len(view.tainted_inputs(producer)) >= 2:
            products.add(producer)
        elif producer.op_type in ("MatMul", "Gemm", "LayerNormalization"):
            other = producer
        else:
            stack.extend(view.tainted_inputs(producer))
    if len(products) > 1:
        raise NotConvertible(
            "scores are a sum of several products", softmax.name or "", "export with joined heads", kind="score"
        )
    return (products.pop() if products else None), other


def _product_behind(view: GraphView, softmax: ir.Node) -> tuple[ir.Node, ir.Value, ir.Value] | None:
    """The product that mixes values by the probabilities: (node, probabilities, values)."""
    reached: set[ir.Value] = {softmax.outputs[0]}
    stack = [softmax.outputs[0]]
    products: dict[ir.Node, ir.Value] = {}
    while stack:
        value = stack.pop()
        for user, position in value.uses():
            if user.op_type in ("Shape", "Size") or user not in view.order:
                continue
            if user.op_type == "MatMul" and position == 0:
                products[user] = value
            elif len(reached) < 24:
                for out in user.outputs:
                    if out not in reached:
                        reached.add(out)
                        stack.append(out)
    if len(products) > 1 and all(view.taint(node.inputs[1]) for node in products):
        raise NotConvertible(
            f"the probabilities of one Softmax weigh {len(products)} sets of values",
            softmax.name or "",
            "differential attention cannot be paged",
            kind="score",
        )
    if len(products) != 1:
        return None
    node, probabilities = next(iter(products.items()))
    values = node.inputs[1]
    if values is None or not view.taint(values):
        return None
    return node, probabilities, values


def recognise_scores(probe: Probe, caches: CacheIndex, anchor: ScoreAnchor, longest: int) -> AttentionSite:
    """Everything about one attention. Raises NotConvertible with the reason when the op cannot compute it."""
    name = anchor.region.softmax.name or ""
    query, key, value = _operands(probe, anchor, name)
    output = find_output(probe, anchor.mixing.outputs[0], _row_places(probe, anchor.mixing.outputs[0]))
    if output is None:
        raise NotConvertible("the layout of the attention output is not understood", name, kind="layout")
    score = fit_score(probe, anchor.region, longest)
    key_links, value_links = _links(caches, anchor.key, name), _links(caches, anchor.value, name)
    for target, links in ((anchor.key, key_links), (anchor.value, value_links)):
        if links:
            check_cache_is_per_token(probe, target, links, name)
    return AttentionSite(
        node=anchor.region.softmax,
        form=anchor.region.softmax.metadata_props.get(FORM_KEY, "softmax"),
        query=query,
        key=key,
        value=value,
        output=output,
        score=score,
        key_cache=tuple(key_links),
        value_cache=tuple(value_links),
        dropped=tuple(probe.view.between([anchor.query, anchor.key, anchor.value], anchor.mixing.outputs[0])),
    )


def _operands(probe: Probe, anchor: ScoreAnchor, name: str) -> tuple[Operand, Operand, Operand]:
    view = probe.view
    places = (
        _row_places(probe, anchor.query),
        _key_places(probe, anchor.key, anchor.scores),
        _value_places(probe, anchor.value, anchor.mixing),
    )
    found: list[Operand] = []
    for role, target, place in zip(
        ("query", "key", "value"), (anchor.query, anchor.key, anchor.value), places, strict=True
    ):
        operand = find_operand(probe, view.dominators(target), target, place)
        if operand is None:
            raise NotConvertible(f"the layout of the {role} is not understood", name, kind="layout")
        found.append(operand)
    query, key, value = found
    if key.heads != value.heads:
        raise NotConvertible(f"{key.heads} key heads but {value.heads} value heads", name, kind="layout")
    if query.heads % key.heads:
        raise NotConvertible(f"{key.heads} key heads do not divide {query.heads} query heads", name, kind="layout")
    return query, key, value


def _row_places(probe: Probe, value: ir.Value) -> Array:
    """Places of (head, token, channel) in a query or an attention output."""
    shape = probe.shape(value, TOKENS, 0)
    places = heads_first(probe, value, np.arange(int(np.prod(shape))).reshape(shape), TOKENS)
    if len(shape) < 3 or places is None:
        raise NotConvertible(f"the rows of '{value.name}' {list(shape)} are not understood", kind="layout")
    return places


def _broadcast_places(shape: tuple[int, ...], lead: tuple[int, ...]) -> Array:
    places = np.arange(int(np.prod(shape))).reshape(shape)
    return np.broadcast_to(places, (*lead, *shape[-2:])).reshape(-1, *shape[-2:])


def _key_places(probe: Probe, value: ir.Value, scores: ir.Node) -> Array:
    lead = probe.shape(scores.outputs[0], TOKENS, 0)[:-2]
    return _broadcast_places(probe.shape(value, TOKENS, 0), lead).transpose(0, 2, 1)


def _value_places(probe: Probe, value: ir.Value, mixing: ir.Node) -> Array:
    lead = probe.shape(mixing.outputs[0], TOKENS, 0)[:-2]
    return _broadcast_places(probe.shape(value, TOKENS, 0), lead)


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
