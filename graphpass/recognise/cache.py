"""Finds where caches enter the graph: each Concat that appends new keys or values to a past input, and its axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..errors import NotConvertible
from ..evaluate import Unevaluable
from ..graph import CACHE, DATA, GraphView, integer, node_inputs, static_size
from ..io_contract import SourceInterface, reader
from .probe import Probe
from .site import CacheLink

__all__ = ["CacheIndex", "resolve_cache_shapes"]

#: Fused attention nodes take their caches as `[batch, heads, past, size]`.
_FUSED_TOKEN_AXIS = 2
_FUSED_OPS = frozenset({"GroupQueryAttention"})


class CacheIndex:
    """The links of every cache input, by the Concat (or fused node) that appends to it."""

    def __init__(self, view: GraphView, interface: SourceInterface) -> None:
        self.view = view
        self.by_node: dict[ir.Node, list[CacheLink]] = {}
        presents = {origin: v for v in interface.presents for origin in self._origins(v)}
        for node in view.graph:
            for position, value in enumerate(node.inputs):
                if value is None or view.taint(value) != CACHE:
                    continue
                link = self._link(node, position, value, presents)
                if link is not None:
                    self.by_node.setdefault(node, []).append(link)

    def _link(
        self, node: ir.Node, position: int, value: ir.Value, presents: dict[ir.Value, ir.Value]
    ) -> CacheLink | None:
        past = self._source(value)
        if past is None:
            return None
        if node.op_type == "Concat":
            if not self.view.is_data(node.outputs[0]):
                return None  # rearranges the past by itself
            others = [v for i, v in enumerate(node.inputs) if i != position and v is not None]
            if len(others) != 1 or position != 0:
                raise NotConvertible(
                    f"new tokens are not appended behind the past '{past.name}'", node.name or "", kind="cache"
                )
            joined, new = node.outputs[0], others[0]
        elif node.op_type in _FUSED_OPS:
            outs = [o for o in node.outputs if self.view.taint(o) and o in presents]
            names = {i: o for o in outs for i in [o.index()]}
            index = 1 if not any(link.past is not past for link in self.by_node.get(node, ())) else 2
            joined, new = names.get(index, node.outputs[min(index, len(node.outputs) - 1)]), None
        else:
            return None
        return CacheLink(past=past, node=node, joined=joined, new=new, present=presents.get(joined))

    def _source(self, value: ir.Value) -> ir.Value | None:
        """The cache input that a value of cache data alone comes from."""
        stack, found, seen = [value], set(), set()
        while stack:
            current = stack.pop()
            producer = current.producer()
            if producer is None:
                if self.view.taint(current) == CACHE:
                    found.add(current)
            elif producer not in seen:
                seen.add(producer)
                stack.extend(v for v in node_inputs(producer) if self.view.taint(v))
        return found.pop() if len(found) == 1 else None

    def _origins(self, output: ir.Value) -> list[ir.Value]:
        """The values that a present output is a rearrangement of: several when it stacks what was appended to."""
        value = self._origin(output)
        producer = value.producer()
        if producer is None or producer.op_type != "Concat" or len(producer.inputs) < 2:
            return [value]
        parts = [v for v in producer.inputs if v is not None]
        if any(self.view.taint(v) != DATA | CACHE for v in parts):  # it appends itself, or holds no cache
            return [value]
        return [self._origin(v) for v in parts]

    def _origin(self, output: ir.Value) -> ir.Value:
        """The value that one value is a rearrangement of."""
        value = output
        while (producer := value.producer()) is not None and producer.op_type in (
            "Identity",
            "Transpose",
            "Reshape",
            "Cast",
            "Unsqueeze",
            "Squeeze",
        ):
            source = producer.inputs[0]
            if source is None:
                break
            value = source
        return value

    def reached_from(self, value: ir.Value) -> tuple[list[CacheLink], bool]:
        """Links that a value's token data passes through, and whether all of it does.

        A key or value operand comes from its cache alone; a query reaches the tokens by way of no cache.
        """
        links: dict[ir.Node, list[CacheLink]] = {}
        complete = True
        stack, seen = [value], set()
        while stack:
            current = stack.pop()
            producer = current.producer()
            if producer is None:
                complete &= not self.view.is_data(current)
                continue
            if producer in seen:
                continue
            seen.add(producer)
            if producer in self.by_node and producer.op_type == "Concat":
                links[producer] = self.by_node[producer]
                continue
            stack.extend(self.view.tainted_inputs(producer))
            if not complete:
                break
        return [link for group in links.values() for link in group], complete


def resolve_cache_shapes(probe: Probe, index: CacheIndex) -> None:
    """States every cache input's shape for batch 1. Raises NotConvertible for a state that does not grow by tokens."""
    links = {link.past: link for group in index.by_node.values() for link in group}
    for cache in probe.interface.caches:
        if cache not in links:
            _refuse_state(cache)
    # In graph order: a later layer's operands are computed through the earlier layers' caches.
    symbols: dict[str, int] = {}  # what a symbolic dimension was found to be holds for all caches
    for cache, link in sorted(links.items(), key=lambda item: probe.view.order[item[1].node]):
        axis = _token_axis(link)
        shape = [static_size(d) if i == axis else static_size(d, symbols) for i, d in enumerate(cache.shape or ())]
        if shape[axis] is not None:
            _refuse_state(cache)
        known: list[int | None] = list(shape)
        if any(d is None for i, d in enumerate(shape) if i != axis):
            known = _complete(probe, link, shape, axis)
        known[axis] = None
        for dim, size in zip(cache.shape or (), known, strict=True):
            if not isinstance(dim, int) and dim.value is not None and size is not None:
                symbols.setdefault(str(dim.value), size)
        probe.set_cache_shape(cache, tuple(known))


def _token_axis(link: CacheLink) -> int:
    if link.new is None:
        return _FUSED_TOKEN_AXIS
    axes = _cache_axes(link)
    return axes[link.node.attributes["axis"].as_int() % len(axes)]


def _cache_axes(link: CacheLink) -> list[int]:
    """Which axis of the cache input each axis of what new tokens are appended to is."""
    steps: list[ir.Node] = []
    value = link.node.inputs[0]
    while value is not None and (producer := value.producer()) is not None:
        steps.append(producer)
        value = producer.inputs[0]
    axes = list(range(len(link.past.shape or ())))
    for node in reversed(steps):
        if node.op_type == "Transpose":
            axes = [axes[a] for a in node.attributes["perm"].as_ints()]
        elif node.op_type == "Gather" and _is_scalar(node.inputs[1]):
            del axes[integer(node, "axis") % len(axes)]
        elif node.op_type == "Squeeze" and (gone := _squeezed(node, len(axes))):
            axes = [a for i, a in enumerate(axes) if i not in gone]
        elif node.op_type not in ("Cast", "Identity", "Split"):
            raise NotConvertible(
                f"the past '{link.past.name}' is rearranged by {node.op_type} before new tokens are appended",
                node.name or "",
                "export with caches of [batch, heads, past, size] or another order of these axes",
                kind="cache",
            )
    return axes


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.shape.rank() == 0


def _squeezed(node: ir.Node, rank: int) -> set[int]:
    """The axes that a Squeeze takes away; none when they are not stated."""
    if "axes" in node.attributes:
        return {a % rank for a in node.attributes["axes"].as_ints()}
    axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
    return set() if axes is None else {int(a) % rank for a in axes.numpy().reshape(-1)}


def _complete(probe: Probe, link: CacheLink, shape: Sequence[int | None], axis: int) -> list[int | None]:
    """Fills symbolic dimensions from what is appended to the cache, or from the fused node's attributes."""
    if link.new is None:
        return _complete_fused(probe, link, shape)
    guess = [1 if d is None else d for d in shape]
    feeds = {**probe.graph_feeds(3, 2), **probe.cache_feeds(2)}
    for other in probe.interface.caches:
        if other not in feeds:
            dims = [static_size(d) or 1 for d in (other.shape or ())]
            dims[axis] = 2
            feeds[other] = np.zeros(dims, other.dtype.numpy())  # type: ignore[union-attr]
    guess[axis] = 2
    feeds[link.past] = np.zeros(guess, link.past.dtype.numpy())  # type: ignore[union-attr]
    actual = probe.evaluator.run([link.new], feeds, light=True)[0].shape
    appended = dict(zip(_cache_axes(link), actual, strict=True))
    known = [appended.get(i) if d is None else d for i, d in enumerate(shape)]
    if None in known:
        raise Unevaluable(f"the shape of cache '{link.past.name}' is not known", link.node.name or "")
    return known


def _complete_fused(probe: Probe, link: CacheLink, shape: Sequence[int | None]) -> list[int | None]:
    attributes = link.node.attributes
    heads = attributes["kv_num_heads"].as_int() if "kv_num_heads" in attributes else None
    filled: list[int | None] = [1, heads if shape[1] is None else shape[1], None, shape[3]]
    if shape[3] is None and link.node.op_type == "GroupQueryAttention" and heads:
        feeds = {**probe.graph_feeds(3, 2), **probe.cache_feeds(2)}
        query, key = link.node.inputs[0], link.node.inputs[1]
        if query is None:
            raise Unevaluable("a fused attention has no query", link.node.name or "")
        width = probe.evaluator.run([query], feeds, light=True)[0].shape[-1]
        query_heads = attributes["num_heads"].as_int()
        filled[3] = width // (query_heads + (0 if key is not None else 2 * heads))
    if any(d is None for i, d in enumerate(filled) if i != _FUSED_TOKEN_AXIS):
        raise Unevaluable(f"the shape of cache '{link.past.name}' is not known", link.node.name or "")
    return filled


def _refuse_state(cache: ir.Value) -> None:
    users = sorted({n.op_type for n, _ in cache.uses()})
    raise NotConvertible(
        f"input '{cache.name}' is a state that does not grow by one entry a token (read by {', '.join(users)})",
        reader(cache),
        hint="states of convolutions, recurrent layers and encoders cannot be paged",
        kind="state",
    )
