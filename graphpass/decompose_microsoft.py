"""Spells com.microsoft MultiHeadAttention and Attention nodes out in plain products and a softmax.

As with ai.onnx Attention (decompose.py) the spelled-out form is only analysed; verification against the source, in
which the nodes are as they were, decides. All of it is for a batch of one sequence, which is how a source is
evaluated. Nothing newer than opset 11 is used: these nodes come in old models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops.spec import MICROSOFT_DOMAIN

from .decompose import (
    appended,
    mixed,
    numbered,
    refuse_used_scores,
    ruled,
    scaled_scores,
    split_heads,
    take_over,
)
from .errors import NotConvertible
from .graph import integer, number, optional_input
from .rewrite.builder import Builder

__all__ = ["decompose_microsoft_attention"]

_END = 1 << 40


def decompose_microsoft_attention(model: ir.Model) -> None:
    """Replaces every com.microsoft MultiHeadAttention and Attention node, in place.

    Raises NotConvertible for what such a node can say and a paged attention cannot.
    """
    spellers = {"MultiHeadAttention": _multi_head, "Attention": _merged_weights}
    nodes = [n for n in model.graph if n.domain == MICROSOFT_DOMAIN and n.op_type in spellers]
    if nodes:
        builder = Builder(model.graph, "attention")
        for node in nodes:
            spellers[node.op_type](builder, node)
            builder.graph.remove(node, safe=True)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Operands `[batch, heads, tokens, size]` (keys and values of past and new tokens) and what masks the scores."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    past_key: ir.Value | None
    mask: ir.Value | None
    bias: ir.Value | None


def _multi_head(builder: Builder, node: ir.Node) -> None:
    _refuse(node, attributes=("num_heads", "scale", "mask_filter_value", "unidirectional"))
    _refuse_inputs(
        node,
        {
            8: ("past_sequence_length", "export without a buffer shared by past and present"),
            9: ("cache_indirection", "beams are paged by the runtime: export the decoder without beam search"),
        },
    )
    refuse_used_scores(node)
    heads, bias = integer(node, "num_heads"), optional_input(node, 3)
    query, key, value = _operands(builder, node, heads)
    if bias is not None:
        query, key, value = _biased(builder, node, (query, key, value), bias)
    query_BHTD, key_BHTD, value_BHTD = (
        operand if _rank(operand) == 4 else split_heads(builder, operand, heads) for operand in (query, key, value)
    )
    past_key, past_value = optional_input(node, 6), optional_input(node, 7)
    if past_key is not None and past_value is not None:
        key_BHTD = appended(builder, past_key, key_BHTD)
        value_BHTD = appended(builder, past_value, value_BHTD)
    take_over(node, 1, key_BHTD)
    take_over(node, 2, value_BHTD)
    parts = _Parts(
        query=query_BHTD,
        key=key_BHTD,
        value=value_BHTD,
        past_key=past_key,
        mask=optional_input(node, 4),
        bias=optional_input(node, 5),
    )
    _attend(builder, node, parts)


def _merged_weights(builder: Builder, node: ir.Node) -> None:
    _refuse(
        node,
        attributes=(
            *("num_heads", "scale", "mask_filter_value", "unidirectional", "qkv_hidden_sizes"),
            *("do_rotary", "rotary_embedding_dim", "past_present_share_buffer"),
        ),
    )
    if integer(node, "do_rotary"):
        raise NotConvertible(
            "an Attention node rotates its queries and keys itself",
            node.name or "",
            "export with RotaryEmbedding nodes and MultiHeadAttention",
            kind="fused",
        )
    shared = "export without a buffer shared by past and present (past_present_share_buffer)"
    _refuse_inputs(node, {6: ("past_sequence_length", shared)})
    hidden, weights, bias = node.inputs[0], node.inputs[1], optional_input(node, 2)
    width = None if weights is None or weights.shape is None else weights.shape[-1]
    if hidden is None or weights is None or not isinstance(width, int):
        raise NotConvertible("the weights of an Attention node have no known shape", node.name or "", kind="fused")
    heads = integer(node, "num_heads")
    packed = builder.node("MatMul", [hidden, weights], stem=f"{node.name}/qkv")[0]
    if bias is not None:
        packed = builder.node("Add", [packed, bias], stem=f"{node.name}/qkv")[0]
    given = node.attributes["qkv_hidden_sizes"].as_ints() if "qkv_hidden_sizes" in node.attributes else ()
    ends = np.cumsum(list(given) or [width // 3] * 3)
    query, key, value = (
        split_heads(builder, _slice(builder, packed, first, last, 2), heads)
        for first, last in zip([0, *ends[:-1]], ends, strict=True)
    )
    past, past_key = optional_input(node, 4), None
    if past is not None:
        past_key, past_value = (
            builder.node("Gather", [past, builder.constant(np.array(i, np.int64))], {"axis": 0})[0] for i in (0, 1)
        )
        key, value = appended(builder, past_key, key), appended(builder, past_value, value)
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        both = [_unsqueeze(builder, operand, 0) for operand in (key, value)]
        take_over(node, 1, builder.node("Concat", both, {"axis": 0})[0])
    parts = _Parts(
        query=query,
        key=key,
        value=value,
        past_key=past_key,
        mask=optional_input(node, 3),
        bias=optional_input(node, 5),
    )
    _attend(builder, node, parts)


def _refuse(node: ir.Node, *, attributes: tuple[str, ...]) -> None:
    unknown = set(node.attributes) - set(attributes)
    if unknown:
        raise NotConvertible(
            f"{node.op_type} with the attribute {min(unknown)}",
            node.name or "",
            "its meaning is not known: export with the operators of ai.onnx",
            kind="fused",
        )


def _refuse_inputs(node: ir.Node, unsupported: dict[int, tuple[str, str]]) -> None:
    for index, (name, hint) in unsupported.items():
        if optional_input(node, index) is not None:
            raise NotConvertible(f"{node.op_type} with {name}", node.name or "", hint, kind="fused")


def _operands(builder: Builder, node: ir.Node, heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value, each `[batch, tokens, heads * size]` or `[batch, heads, tokens, size]`."""
    query, key, value = (optional_input(node, i) for i in range(3))
    if query is None:
        raise NotConvertible("a MultiHeadAttention node has no query", node.name or "", kind="fused")
    if key is None:  # [batch, tokens, heads, 3, size]
        query, key, value = (_packed_part(builder, query, i) for i in range(3))
    elif value is None:  # [batch, tokens, heads, 2, size]
        key, value = (_packed_part(builder, key, i) for i in range(2))
    return query, key, value


def _packed_part(builder: Builder, packed: ir.Value, index: int) -> ir.Value:
    part = builder.node("Gather", [packed, builder.constant(np.array(index, np.int64))], {"axis": 3})[0]
    return builder.reshape(part, [0, 0, -1])


def _biased(
    builder: Builder, node: ir.Node, operands: tuple[ir.Value, ir.Value, ir.Value], bias: ir.Value
) -> tuple[ir.Value, ...]:
    """Operands plus their part of the bias `[hidden + hidden + value hidden]`."""
    width = None if bias.shape is None else bias.shape[0]
    hidden = None if operands[0].shape is None else operands[0].shape[-1]
    if not isinstance(width, int):
        raise NotConvertible("the bias of a MultiHeadAttention node has no known shape", node.name or "", kind="fused")
    first = hidden if isinstance(hidden, int) else width // 3
    bounds = ((0, first), (first, 2 * first), (2 * first, _END))
    return tuple(
        builder.node("Add", [operand, _slice(builder, bias, start, end, 0)])[0]
        for operand, (start, end) in zip(operands, bounds, strict=True)
    )


def _attend(builder: Builder, node: ir.Node, parts: _Parts) -> None:
    kind = next((v.dtype for v in (*node.inputs, *node.outputs) if v is not None and _is_float(v)), ir.DataType.FLOAT)
    element = (kind or ir.DataType.FLOAT).numpy()
    stated = number(node, "scale") or None  # zero is the default and means one over the root of the head size
    scores = scaled_scores(builder, parts.query, parts.key, stated, element)
    if parts.bias is not None:
        scores = builder.node("Add", [scores, parts.bias])[0]
    if parts.mask is not None:
        scores = builder.node("Add", [scores, _additive(builder, node, parts.mask, parts.key, element)])[0]
    if integer(node, "unidirectional"):
        scores = ruled(builder, scores, parts.past_key, element, causal=True)
    form = node.op_type if node.op_type == "MultiHeadAttention" else f"{MICROSOFT_DOMAIN} {node.op_type}"
    attended = mixed(builder, scores, parts.value, name=node.name or node.op_type, form=form)
    flat = builder.reshape(builder.transpose(attended, (0, 2, 1, 3)), [0, 0, -1])
    node.outputs[0].replace_all_uses_with(flat, replace_graph_outputs=True)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _additive(builder: Builder, node: ir.Node, mask: ir.Value, key: ir.Value, kind: np.dtype[Any]) -> ir.Value:
    """What a mask adds to the scores: its filter value where it is 0, or at keys outside of the range that it gives."""
    rank = _rank(mask)
    if rank == 4:
        raise NotConvertible(
            f"{node.op_type} with a mask of rank 4",
            node.name or "",
            "onnxruntime's CPU kernel has none either: export with a two-dimensional attention mask",
            kind="mask",
        )
    shape = builder.node("Shape", [key])[0]
    if rank == 1:
        kept = _in_range(builder, mask, numbered(builder, shape, 2, None))
    else:  # [1, keys] or [1, tokens, keys]
        keys = _slice(builder, shape, 2, 3, 0)
        dims = builder.node("Concat", [builder.constant(np.array([1, 1, -1], np.int64)), keys], {"axis": 0})[0]
        kept = builder.cast(builder.node("Reshape", [mask, dims])[0], ir.DataType.BOOL)
    zero = builder.constant(np.array(0.0, kind))
    masked = builder.constant(np.array(number(node, "mask_filter_value", -10000.0)).astype(kind))
    return builder.node("Where", [kept, zero, masked])[0]


def _in_range(builder: Builder, bounds: ir.Value, keys: ir.Value) -> ir.Value:
    """Which keys a mask of rank 1 leaves: those below its first element and, where there is a second one, from that on.

    For one sequence that is right for all of its forms: a length, end and start, or a length and running sums from 0.
    """
    bounds = builder.cast(bounds, ir.DataType.INT64)
    end = _slice(builder, bounds, 0, 1, 0)
    zero = builder.constant(np.array([0], np.int64))
    starts = builder.node("Concat", [zero, _slice(builder, bounds, 1, 2, 0)], {"axis": 0})[0]
    start = builder.node("ReduceMax", [starts], {"keepdims": 1})[0]
    early = builder.node("Less", [keys, start])[0]
    return builder.node("And", [builder.node("Not", [early])[0], builder.node("Less", [keys, end])[0]])[0]


def _slice(builder: Builder, value: ir.Value, first: int, last: int, axis: int) -> ir.Value:
    bounds = [builder.constant(np.array([int(n)], np.int64)) for n in (first, last, axis)]
    return builder.node("Slice", [value, *bounds])[0]


def _unsqueeze(builder: Builder, value: ir.Value, axis: int) -> ir.Value:
    if (builder.graph.opset_imports.get("") or 13) < 13:
        return builder.node("Unsqueeze", [value], {"axes": [axis]})[0]
    return builder.node("Unsqueeze", [value, builder.constant(np.array([axis], np.int64))])[0]


#: Ops whose output has the rank of their first input, and ops that broadcast.
_KEEP_RANK = frozenset({"Cast", "Identity", "Not", "Clip", "Concat", "Slice", "Trilu", "CumSum"})
_BROADCAST = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Equal"),
        *("Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
    }
)


def _rank(value: ir.Value) -> int | None:
    """The rank of a value, stated or by the nodes that make it; None when neither says it."""
    if value.shape is not None:
        return len(value.shape)
    producer = value.producer()
    inputs = [] if producer is None else [v for v in producer.inputs if v is not None]
    if producer is None or not inputs:
        return None
    if producer.op_type == "Range":
        return 1
    if producer.op_type == "Transpose" and "perm" in producer.attributes:
        return len(producer.attributes["perm"].as_ints())
    if producer.op_type in ("Reshape", "Unsqueeze") and len(inputs) > 1 and inputs[1].const_value is not None:
        count, before = int(inputs[1].const_value.size), _rank(inputs[0])
        return count if producer.op_type == "Reshape" else None if before is None else before + count
    if producer.op_type in _BROADCAST:
        ranks = [_rank(v) for v in inputs]
        return None if None in ranks else max(r for r in ranks if r is not None)
    return _rank(inputs[0]) if producer.op_type in _KEEP_RANK else None
