"""Builds small decoders as ONNX graphs, spelled out by hand, with any mask, score path and cache layout.

Nothing here shares code with the graph pass. Shape letters: S new tokens, P past ones, K = P + S, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE, VOCAB = 4, 8, 64
WIDTH = HEADS * SIZE


class Graph:
    """Collects nodes and constants; every method returns the name of a value."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)

    def op(self, op_type: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        """Adds a node; the name of its first output."""
        names = outputs or (f"v{len(self.nodes)}",)
        self.nodes.append(helper.make_node(op_type, inputs, names, name=f"n{len(self.nodes)}", **attributes))
        return names[0]

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Adds an initializer."""
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def integers(self, *values: int) -> str:
        """An int64 vector."""
        return self.constant(list(values), np.int64)

    def scalar(self, value: int) -> str:
        """An int64 scalar."""
        return self.constant(value, np.int64)

    def weight(self, *shape: int, scale: float = 0.15) -> str:
        """A random float32 matrix."""
        return self.constant(self.rng.standard_normal(shape) * scale, np.float32)

    def length(self, value: str, axis: int) -> str:
        """One dimension of a value as an int64 scalar."""
        return self.op("Gather", self.op("Shape", value), self.scalar(axis), axis=0)

    def arange(self, stop: str) -> str:
        """0, 1, ... below an int64 scalar."""
        return self.op("Range", self.scalar(0), stop, self.scalar(1))


@dataclass(frozen=True)
class Ranges:
    """What a mask may be built from: query positions `[S, 1]`, key positions `[1, K]`, and the key count."""

    query: str
    key: str
    total: str


Visible = Callable[[Graph, Ranges], str]
Scores = Callable[[Graph, str, Ranges], str]


def causal(g: Graph, r: Ranges) -> str:
    """Each position sees itself and what is before it."""
    return g.op("LessOrEqual", r.key, r.query)


def window(width: int) -> Visible:
    """The last `width` positions, itself included."""

    def visible(g: Graph, r: Ranges) -> str:
        near = g.op("Greater", r.key, g.op("Sub", r.query, g.scalar(width)))
        return g.op("And", causal(g, r), near)

    return visible


def dilated(g: Graph, r: Ranges) -> str:
    """Every second position of the past."""
    even = g.op("Equal", g.op("Mod", g.op("Sub", r.query, r.key), g.scalar(2)), g.scalar(0))
    return g.op("And", causal(g, r), even)


def block_sparse(g: Graph, r: Ranges) -> str:
    """Only positions of the own block of eight."""
    same = g.op("Equal", g.op("Div", r.query, g.scalar(8)), g.op("Div", r.key, g.scalar(8)))
    return g.op("And", causal(g, r), same)


def tree(g: Graph, r: Ranges) -> str:
    """Each position sees itself, its parent and its parent's parent in a binary tree."""
    seen = [g.op("Equal", r.key, g.op("Div", r.query, g.scalar(n))) for n in (1, 2, 4)]
    return g.op("Or", g.op("Or", seen[0], seen[1]), seen[2])


def prefix(g: Graph, r: Ranges) -> str:
    """The first four positions are seen by all."""
    return g.op("Or", causal(g, r), g.op("Less", r.key, g.scalar(4)))


def bidirectional(g: Graph, r: Ranges) -> str:
    """Everything is seen."""
    return g.op("GreaterOrEqual", r.key, g.op("Mul", r.query, g.scalar(0)))


def causal_while_short(limit: int) -> Visible:
    """Causal up to `limit` keys, every second key beyond."""

    def visible(g: Graph, r: Ranges) -> str:
        short = g.op("LessOrEqual", r.total, g.scalar(limit))
        return g.op("And", causal(g, r), g.op("Or", short, dilated(g, r)))

    return visible


def no_change(_: Graph, scores: str, __: Ranges) -> str:
    """Scores as they are."""
    return scores


def alibi(slopes: tuple[float, ...]) -> Scores:
    """Adds slope * (key - query)."""

    def change(g: Graph, scores: str, r: Ranges) -> str:
        distance = g.op("Cast", g.op("Sub", r.key, r.query), to=TensorProto.FLOAT)
        slope = g.constant(np.array(slopes).reshape(1, HEADS, 1, 1), np.float32)
        return g.op("Add", scores, g.op("Mul", slope, distance))

    return change


def softcap(cap: float) -> Scores:
    """cap * tanh(score / cap)."""

    def change(g: Graph, scores: str, _: Ranges) -> str:
        value = g.constant(cap, np.float32)
        return g.op("Mul", g.op("Tanh", g.op("Div", scores, value)), value)

    return change


def clipped(g: Graph, scores: str, _: Ranges) -> str:
    """Scores clipped, which no op can say."""
    return g.op("Clip", scores, g.constant(-1.0, np.float32), g.constant(1.0, np.float32))


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder to build. `cache_axes` permutes `[batch, H, tokens, D]` to the layout of cache inputs and outputs."""

    visible: Visible = causal
    scores: Scores = no_change
    layers: int = 2
    past: bool = True
    cache_axes: tuple[int, int, int, int] = (0, 1, 2, 3)
    learned_positions: bool = True
    rotate: Callable[[Graph, str, str, str], str] | None = None
    inputs: tuple[str, ...] = ("attention_mask", "position_ids")

    def model(self) -> onnx.ModelProto:
        """The graph."""
        g = Graph()
        ids = "input_ids"
        hidden = g.op("Gather", g.weight(VOCAB, WIDTH, scale=1.0), ids, axis=0)
        new = g.length(ids, 1)
        past = g.length("past.0.key", self.cache_axes.index(2)) if self.past else g.scalar(0)
        if self.learned_positions:
            hidden = g.op("Add", hidden, g.op("Gather", g.weight(512, WIDTH, scale=0.5), "position_ids", axis=0))
        total = g.op("Add", past, new)
        query = g.op("Unsqueeze", g.op("Add", g.arange(new), past), g.integers(1))
        ranges = Ranges(query, g.op("Unsqueeze", g.arange(total), g.integers(0)), total)
        seen = self.visible(g, ranges)
        mask = g.op("Where", seen, g.constant(0.0, np.float32), g.constant(-3.4e38, np.float32))
        for layer in range(self.layers):
            hidden = g.op("Add", hidden, self._attention(g, hidden, layer, mask, ranges))
        logits = g.op("MatMul", hidden, g.weight(WIDTH, VOCAB), outputs=("logits",))
        return self._wrap(g, logits)

    def operands(self, g: Graph, hidden: str) -> tuple[str, str, str]:
        """Query, key and value `[B, H, S, D]` of the new tokens."""
        return self._heads(g, hidden), self._heads(g, hidden), self._heads(g, hidden)

    def _heads(self, g: Graph, hidden: str) -> str:
        flat = g.op("MatMul", hidden, g.weight(WIDTH, WIDTH))
        return g.op("Transpose", g.op("Reshape", flat, g.integers(0, 0, HEADS, SIZE)), perm=[0, 2, 1, 3])

    def _attention(self, g: Graph, hidden: str, layer: int, mask: str, ranges: Ranges) -> str:
        query, key, value = self.operands(g, hidden)
        if self.rotate is not None:
            query, key = (self.rotate(g, x, "position_ids", ranges.total) for x in (query, key))
        if self.past:
            key, value = (self._join(g, x, layer, part) for x, part in ((key, "key"), (value, "value")))
        scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = g.op("Mul", scores, g.constant(0.3, np.float32))
        scores = g.op("Add", self.scores(g, scores, ranges), mask)
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
        flat = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.integers(0, 0, WIDTH))
        return g.op("MatMul", flat, g.weight(WIDTH, WIDTH))

    def _join(self, g: Graph, new: str, layer: int, part: str) -> str:
        axes = self.cache_axes
        stored = g.op("Transpose", new, perm=list(axes))
        joined = g.op(
            "Concat", f"past.{layer}.{part}", stored, outputs=(f"present.{layer}.{part}",), axis=axes.index(2)
        )
        return g.op("Transpose", joined, perm=[axes.index(i) for i in range(4)])

    def _wrap(self, g: Graph, logits: str) -> onnx.ModelProto:
        used = {name for node in g.nodes for name in node.input}
        integer = TensorProto.INT64
        inputs = [helper.make_tensor_value_info("input_ids", integer, ["batch", "new"])]
        if "attention_mask" in self.inputs:
            inputs.append(helper.make_tensor_value_info("attention_mask", integer, ["batch", "total"]))
        if "position_ids" in used:
            inputs.append(helper.make_tensor_value_info("position_ids", integer, ["batch", "new"]))
        outputs = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", "new", VOCAB])]
        for layer in range(self.layers if self.past else 0):
            for part in ("key", "value"):
                for kind, length, group in (("past", "past", inputs), ("present", "total", outputs)):
                    dims: list[Any] = ["batch", HEADS, length, SIZE]
                    shape = [dims[a] for a in self.cache_axes]
                    group.append(helper.make_tensor_value_info(f"{kind}.{layer}.{part}", TensorProto.FLOAT, shape))
        graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, g.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    def save(self, folder: Path) -> Path:
        """Writes the model into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(self.model(), folder / "model.onnx")
        return folder


def rotary(g: Graph, x: str, positions: str, _: str, *, interleaved: bool = False, factor: str = "") -> str:
    """Rotary embedding of `[B, H, S, D]`, spelled out; half-split or interleaved pairs, angles times a factor."""
    half = SIZE // 2
    frequency = g.constant(1.0 / 100.0 ** (np.arange(half) / half), np.float32)
    angle = g.op("Mul", g.op("Cast", g.op("Unsqueeze", positions, g.integers(1, 3)), to=TensorProto.FLOAT), frequency)
    angle = g.op("Mul", angle, factor) if factor else angle
    cos, sin = g.op("Cos", angle), g.op("Sin", angle)
    step = 2 if interleaved else 1
    first = g.op("Slice", x, g.integers(0), g.integers(SIZE if interleaved else half), g.integers(3), g.integers(step))
    second = g.op("Slice", x, g.integers(1 if interleaved else half), g.integers(SIZE), g.integers(3), g.integers(step))
    left = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
    right = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
    if not interleaved:
        return g.op("Concat", left, right, axis=3)
    pairs = g.op("Concat", *(g.op("Unsqueeze", v, g.integers(4)) for v in (left, right)), axis=4)
    return g.op("Reshape", pairs, g.integers(0, 0, 0, SIZE))


def rotary_switched_by_length(g: Graph, x: str, positions: str, total: str) -> str:
    """Rotary embedding that slows down for the whole batch once the longest position passes 20."""
    longest = g.op("ReduceMax", positions, keepdims=0)
    slow = g.op("Greater", longest, g.scalar(20))
    factor = g.op("Where", slow, g.constant(0.5, np.float32), g.constant(1.0, np.float32))
    return rotary(g, x, positions, total, factor=factor)
