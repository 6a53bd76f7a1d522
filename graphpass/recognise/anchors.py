"""Finds the products around each Softmax: those of two token-dependent operands before it, and the one behind it.

Scores may be a sum of products, whose heads lie side by side: the part of a query without a position by a latent
vector and the part with one by a rotated key, for instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..errors import NotConvertible
from ..graph import GraphView
from .cache import CacheIndex
from .score import ScoreRegion

__all__ = ["Product", "ScoreAnchor", "find_score_anchors"]


@dataclass(frozen=True)
class Product:
    """One product of queries and keys, `[..., rows, D]` by `[..., D, K]`."""

    node: ir.Node
    query: ir.Value
    key: ir.Value

    @property
    def scores(self) -> ir.Value:
        """What it computes."""
        return self.node.outputs[0]


@dataclass(frozen=True)
class ScoreAnchor:
    """The products whose sum the region takes for scores, the softmax, and the product that mixes the values."""

    region: ScoreRegion
    products: tuple[Product, ...]
    mixing: ir.Node
    value: ir.Value

    @property
    def operands(self) -> list[ir.Value]:
        """All queries, keys and values."""
        return [v for p in self.products for v in (p.query, p.key)] + [self.value]


def find_score_anchors(view: GraphView, caches: CacheIndex) -> list[ScoreAnchor]:
    """All attentions of the graph in order. A Softmax over anything but products of two token operands is none."""
    anchors = [_anchor(view, caches, node) for node in view.graph if node.op_type == "Softmax"]
    return [a for a in anchors if a is not None]


def _anchor(view: GraphView, caches: CacheIndex, softmax: ir.Node) -> ScoreAnchor | None:
    nodes, other = _products_before(view, softmax)
    if not nodes:
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
    products = [Product(n, n.inputs[0], n.inputs[1]) for n in nodes]  # type: ignore[arg-type]
    for product in products:
        if caches.by_node and caches.reached_from(product.query)[1] and not caches.reached_from(product.key)[1]:
            raise NotConvertible(
                "keys are the left factor of the score product", product.node.name or "", kind="layout"
            )
    raw = products[0].scores if len(products) == 1 else _sum_of(view, products, softmax)
    return ScoreAnchor(ScoreRegion(raw, softmax, probabilities), tuple(products), mixing, value)


def _products_before(view: GraphView, softmax: ir.Node) -> tuple[list[ir.Node], ir.Node | None]:
    """The products of two token operands that token paths into the softmax come from, in graph order, and a node that
    is on other paths."""
    products: set[ir.Node] = set()
    other: ir.Node | None = None
    stack = [v for v in softmax.inputs if view.taint(v)]
    seen: set[ir.Node] = set()
    while stack:
        value = stack.pop()
        producer = value.producer() if value is not None else None
        if producer is None or len(seen) > 64:
            return [], None
        if producer in seen:
            continue
        seen.add(producer)
        if producer.op_type == "MatMul" and len(view.tainted_inputs(producer)) >= 2:
            products.add(producer)
        elif producer.op_type in ("MatMul", "Gemm", "LayerNormalization"):
            other = producer
        else:
            stack.extend(view.tainted_inputs(producer))
    return sorted(products, key=view.order.__getitem__), other


def _sum_of(view: GraphView, products: Sequence[Product], softmax: ir.Node) -> ir.Value:
    """The first value behind all products that every path from them to the softmax passes."""
    last = max(view.order[p.node] for p in products)
    found: ir.Value | None = None
    for value in view.dominators(softmax.inputs[0]):  # type: ignore[arg-type]
        producer = value.producer()
        if producer is None or view.order[producer] <= last:
            break
        found = value
    if found is None:
        raise NotConvertible(
            "several products reach the scores on ways that do not meet", softmax.name or "", kind="score"
        )
    return found


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
