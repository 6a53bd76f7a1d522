"""Spells ai.onnx Attention nodes out in plain products and a softmax, so that one recogniser reads them all.

The spelled-out form is only analysed, and replaced as a whole when the pass succeeds; where it and onnxruntime's kernel
could disagree, verification against the source decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from .errors import NotConvertible
from .graph import integer, number, optional_input
from .rewrite.builder import Builder

__all__ = [
    "FORM_KEY",
    "appended",
    "decompose_attention",
    "mixed",
    "numbered",
    "refuse_used_scores",
    "ruled",
    "scaled_scores",
    "split_heads",
    "take_over",
]

#: Metadata key under which a spelled-out softmax remembers the node it came from.
FORM_KEY = "pagegraft.form"


def decompose_attention(model: ir.Model) -> None:
    """Replaces every ai.onnx Attention node, in place."""
    nodes = [n for n in model.graph if n.op_type == "Attention" and not n.domain]
    if nodes:
        builder = Builder(model.graph, "attention")
        for node in nodes:
            _decompose(builder, node)


#: Attributes that are spelled out; another one could change the meaning unseen.
_KNOWN = frozenset(
    {
        *("scale", "softcap", "is_causal", "q_num_heads", "kv_num_heads", "left_window_size"),
        *("qk_matmul_output_mode", "softmax_precision"),
    }
)


def _decompose(builder: Builder, node: ir.Node) -> None:
    unknown = set(node.attributes) - _KNOWN
    if unknown:
        raise NotConvertible(f"Attention with the attribute {min(unknown)}", node.name or "", kind="fused")
    refuse_used_scores(node)
    query, key, value = node.inputs[0], node.inputs[1], node.inputs[2]
    if query is None or key is None or value is None:
        raise NotConvertible("an Attention node lacks an operand", node.name or "")
    flat = (query.shape is not None and len(query.shape) == 3) or "q_num_heads" in node.attributes
    heads, groups = integer(node, "q_num_heads", 1), integer(node, "kv_num_heads", 1)
    if flat:
        query, key, value = (
            split_heads(builder, operand, n) for operand, n in ((query, heads), (key, groups), (value, groups))
        )
    past_key, past_value = optional_input(node, 4), optional_input(node, 5)
    if past_key is not None and past_value is not None:
        key, value = appended(builder, past_key, key), appended(builder, past_value, value)
        take_over(node, 1, key)
        take_over(node, 2, value)
    if flat and heads != groups:
        key, value = (_repeat(builder, operand, heads, heads // groups) for operand in (key, value))
    attended = _attend(builder, node, (query, key, value), past_key)
    if flat:
        attended = builder.transpose(attended, (0, 2, 1, 3))
        attended = builder.reshape(attended, [0, 0, -1])
    node.outputs[0].replace_all_uses_with(attended, replace_graph_outputs=True)
    builder.graph.remove(node, safe=True)


def _attend(
    builder: Builder, node: ir.Node, operands: tuple[ir.Value, ir.Value, ir.Value], past_key: ir.Value | None
) -> ir.Value:
    query, key, value = operands
    kind = (query.dtype or value.dtype or ir.DataType.FLOAT).numpy()
    stated = number(node, "scale") if "scale" in node.attributes else None
    scores = scaled_scores(builder, query, key, stated, kind)
    softcap = number(node, "softcap")
    if softcap:
        cap = builder.constant(np.array(softcap, kind))
        scores = builder.node("Mul", [builder.node("Tanh", [builder.node("Div", [scores, cap])[0]])[0], cap])[0]
    mask = optional_input(node, 3)
    if mask is not None:
        scores = _masked(builder, scores, mask, kind)
    causal, left = bool(integer(node, "is_causal")), integer(node, "left_window_size", -1)
    lengths = optional_input(node, 6)
    if lengths is not None:
        scores = _ruled_by_lengths(builder, node, scores, lengths, kind)
    elif causal or left >= 0:
        scores = ruled(builder, scores, past_key, kind, causal=causal, left=left)
    return mixed(builder, scores, value, name=node.name or "Softmax", form="Attention")


def refuse_used_scores(node: ir.Node) -> None:
    """Raises NotConvertible when the fourth output of a fused attention, its scores, is used."""
    if len(node.outputs) > 3 and (node.outputs[3].uses() or node.outputs[3].is_graph_output()):
        raise NotConvertible(
            f"the scores of {node.op_type} are used elsewhere",
            node.name or "",
            "a paged attention keeps no scores: export without outputs of attention scores",
            kind="score",
        )


def mixed(builder: Builder, scores: ir.Value, value: ir.Value, *, name: str, form: str) -> ir.Value:
    """Values by the softmax of the scores; the softmax remembers the node's name and form."""
    softmax = builder.node("Softmax", [scores], {"axis": -1}, stem=name)[0]
    producer = softmax.producer()
    if producer is not None:
        producer.metadata_props[FORM_KEY] = form
    return builder.node("MatMul", [softmax, value])[0]


def appended(builder: Builder, past: ir.Value, new: ir.Value) -> ir.Value:
    """`[batch, heads, past + tokens, size]`."""
    return builder.node("Concat", [past, new], {"axis": 2})[0]


def scaled_scores(
    builder: Builder, query: ir.Value, key: ir.Value, stated: float | None, kind: np.dtype[Any]
) -> ir.Value:
    """Products of queries and keys `[batch, heads, tokens, size]`, times the stated scale or the default."""
    scores = builder.node("MatMul", [query, builder.transpose(key, (0, 1, 3, 2))])[0]
    return builder.node("Mul", [scores, _score_scale(builder, stated, query, kind)])[0]


def _score_scale(builder: Builder, stated: float | None, query: ir.Value, kind: np.dtype[Any]) -> ir.Value:
    """The stated scale, or one over the root of the head size, which may be known at run time only."""
    if stated is not None:
        return builder.constant(np.array(stated, kind))
    shape = builder.node("Shape", [query])[0]
    size = builder.node("Gather", [shape, builder.constant(np.array(-1, np.int64))], {"axis": 0})[0]
    size = builder.cast(size, ir.DataType.from_numpy(kind))
    return builder.node("Reciprocal", [builder.node("Sqrt", [size])[0]])[0]


def split_heads(builder: Builder, value: ir.Value, heads: int) -> ir.Value:
    """`[batch, tokens, heads * size]` to `[batch, heads, tokens, size]`."""
    return builder.transpose(builder.reshape(value, [0, 0, heads, -1]), (0, 2, 1, 3))


def _repeat(builder: Builder, value: ir.Value, heads: int, times: int) -> ir.Value:
    """Each head of `[batch, groups, tokens, size]` as many times as query heads share it."""
    index = builder.constant(np.arange(heads, dtype=np.int64) // times)
    return builder.node("Gather", [value, index], {"axis": 1})[0]


def _masked(builder: Builder, scores: ir.Value, mask: ir.Value, kind: np.dtype[Any]) -> ir.Value:
    lowest = builder.constant(np.array(-np.inf, kind))
    if mask.dtype == ir.DataType.BOOL or _is_boolean(mask):
        return builder.node("Where", [mask, scores, lowest])[0]
    return builder.node("Add", [scores, mask])[0]


_BOOLEAN_OPS = frozenset(
    {"And", "Or", "Not", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "Xor"}
)


def _is_boolean(value: ir.Value) -> bool:
    """Whether a value without a stated type is boolean, by the nodes that make it."""
    while (producer := value.producer()) is not None:
        if producer.op_type in _BOOLEAN_OPS:
            return True
        if producer.op_type == "Cast":
            return producer.attributes["to"].as_int() == ir.DataType.BOOL
        source = producer.inputs[0] if producer.inputs else None
        if producer.op_type not in ("Expand", "Unsqueeze", "Reshape", "Slice", "Identity") or source is None:
            return False
        value = source
    return value.dtype == ir.DataType.BOOL


def ruled(
    builder: Builder, scores: ir.Value, past: ir.Value | None, kind: np.dtype[Any], *, causal: bool, left: int = -1
) -> ir.Value:
    """An operator's own rules: row i, counted from the length of its past input `[batch, heads, past, size]`, sees no
    later column when causal, and none further back than its left window."""
    shape = builder.node("Shape", [scores])[0]
    rows = builder.reshape(numbered(builder, shape, -2, past), [-1, 1])
    columns = numbered(builder, shape, -1, None)
    lowest = builder.constant(np.array(-np.inf, kind))
    if causal:
        unseen = builder.node("Greater", [columns, rows])[0]
        scores = builder.node("Where", [unseen, lowest, scores])[0]
    if left >= 0:
        first = builder.node("Sub", [rows, builder.constant(np.array(left, np.int64))])[0]
        unseen = builder.node("Less", [columns, first])[0]
        scores = builder.node("Where", [unseen, lowest, scores])[0]
    return scores


def _ruled_by_lengths(
    builder: Builder, node: ir.Node, scores: ir.Value, lengths: ir.Value, kind: np.dtype[Any]
) -> ir.Value:
    """The rules when keys are padded behind a length `[batch]` of each sequence, whose last key is that of the last
    row."""
    if optional_input(node, 4) is not None or integer(node, "left_window_size", -1) >= 0:
        raise NotConvertible(
            "an Attention node takes lengths of padded keys beside a past or a window",
            node.name or "",
            "export with caches that are concatenated, or with the window in the mask",
            kind="mask",
        )
    shape = builder.node("Shape", [scores])[0]
    columns = numbered(builder, shape, -1, None)
    ends = builder.reshape(builder.cast(lengths, ir.DataType.INT64), [-1, 1, 1, 1])
    if integer(node, "is_causal"):
        count = builder.node("Gather", [shape, builder.constant(np.array(-2, np.int64))], {"axis": 0})[0]
        rows = builder.reshape(numbered(builder, shape, -2, None), [-1, 1])
        ends = builder.node("Add", [builder.node("Sub", [ends, count])[0], rows])[0]
        unseen = builder.node("Greater", [columns, ends])[0]
    else:
        unseen = builder.node("GreaterOrEqual", [columns, ends])[0]
    return builder.node("Where", [unseen, builder.constant(np.array(-np.inf, kind)), scores])[0]


def numbered(builder: Builder, shape: ir.Value, axis: int, past: ir.Value | None) -> ir.Value:
    """0, 1, ... along one axis of a shape, or from the length of `past` on."""
    count = builder.node("Gather", [shape, builder.constant(np.array(axis, np.int64))], {"axis": 0})[0]
    zero, one = builder.constant(np.array(0, np.int64)), builder.constant(np.array(1, np.int64))
    numbers = builder.node("Range", [zero, count, one])[0]
    if past is None:
        return numbers
    length = builder.node("Gather", [builder.node("Shape", [past])[0], builder.constant(np.array(2, np.int64))])[0]
    return builder.node("Add", [numbers, length])[0]


def take_over(node: ir.Node, index: int, value: ir.Value) -> None:
    """Puts a value in the place of one of a node's outputs, as which it keeps the name."""
    if index < len(node.outputs):
        old = node.outputs[index]
        name = old.name
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        if value.is_graph_output():
            old.name = f"{name}/replaced"
            value.name = name
            value.type, value.shape = old.type, old.shape
