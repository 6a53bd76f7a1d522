"""Reads com.microsoft GroupQueryAttention nodes: most of what they do is in their attributes, the rest is evaluated."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops.spec import MICROSOFT_DOMAIN

from ..decompose import refuse_used_scores
from ..errors import NotConvertible
from ..evaluate import Array
from ..graph import is_constant
from .cache import CacheIndex
from .probe import Probe
from .site import AttentionSite, Operand, Output, Rotary, ScoreFunction

__all__ = ["find_grouped", "recognise_grouped"]

_NAMES = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache"),
    *("sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight"),
    *("k_norm_weight", "query_seqlens"),
)
_UNSUPPORTED = ("attention_bias", "k_scale", "v_scale", "query_seqlens")
#: Windows up to this are run in the kernel as they are.
_WIDEST_RUN = 4096


def find_grouped(graph: ir.Graph) -> list[ir.Node]:
    """All GroupQueryAttention nodes, in order."""
    return [n for n in graph if n.op_type == "GroupQueryAttention"]


def recognise_grouped(probe: Probe, caches: CacheIndex, node: ir.Node) -> AttentionSite:
    """The site of one node. Raises NotConvertible for what the op cannot say."""
    name = node.name or ""
    inputs = {n: v for n, v in zip(_NAMES, node.inputs, strict=False) if v is not None}
    for unsupported in _UNSUPPORTED:
        if unsupported in inputs:
            raise NotConvertible(f"GroupQueryAttention with {unsupported}", name, kind="fused")
    refuse_used_scores(node)
    attribute = _Attributes(node)
    if attribute.integer("causal", 1) != 1:
        raise NotConvertible("GroupQueryAttention that is not causal", name, kind="mask")
    _check_lengths(probe, inputs, name)
    heads, groups = attribute.integer("num_heads"), attribute.integer("kv_num_heads")
    packed = "key" not in inputs
    size = _head_size(probe, inputs, heads, groups, name)
    links = caches.by_node.get(node, [])
    if len(links) != 2:
        raise NotConvertible("GroupQueryAttention without past key and value", name, kind="cache")
    if attribute.integer("sliding_window_cache"):
        probe.capacities.update({link.past: attribute.integer("local_window_size") for link in links})
    rotary, limit = _rotary(inputs, attribute, name)
    sinks = _sinks(inputs, attribute, heads, name)
    return AttentionSite(
        node=node,
        form="GroupQueryAttention" + (", packed QKV" if packed else ""),
        query=Operand(value=inputs["query"], heads=heads, size=size),
        key=Operand(value=inputs.get("key"), heads=groups, size=size),
        value=Operand(value=inputs.get("value"), heads=groups, size=size),
        output=Output(value=node.outputs[0], dims=(1, -1, heads * size)),
        score=ScoreFunction(
            scale=attribute.number("scale") or 1.0 / float(np.sqrt(size)),
            softcap=attribute.number("softcap"),
            window=_window(probe, node, attribute.integer("local_window_size", -1), heads, groups),
            sinks=sinks,
            limit=limit,
        ),
        key_cache=(links[0],),
        value_cache=(links[1],),
        rotary=rotary,
        q_norm=_constant(inputs.get("q_norm_weight"), name),
        k_norm=_constant(inputs.get("k_norm_weight"), name),
        norm_epsilon=attribute.number("qk_norm_epsilon") or attribute.number("q_norm_epsilon") or 1e-6,
        dropped=(node,),
    )


def _head_size(probe: Probe, inputs: dict[str, ir.Value], heads: int, groups: int, name: str) -> int:
    """Channels of a head, from the width of the query (and of key and value behind it when they are packed)."""
    if "query" not in inputs or ("key" in inputs) != ("value" in inputs):
        raise NotConvertible("GroupQueryAttention lacks an operand", name, kind="fused")
    width = probe.shape(inputs["query"], 3, 0)[-1]
    parts = heads if "key" in inputs else heads + 2 * groups
    if heads < 1 or groups < 1 or heads % groups or width % parts:
        raise NotConvertible(
            f"GroupQueryAttention of {heads} query heads and {groups} key/value heads over {width} channels",
            name,
            "num_heads must be a multiple of kv_num_heads, and divide the query's width",
            kind="fused",
        )
    return width // parts


class _Attributes:
    def __init__(self, node: ir.Node) -> None:
        self._attributes = node.attributes
        for kind in ("k_quant_type", "v_quant_type"):
            if kind in node.attributes and node.attributes[kind].as_string() != "NONE":
                raise NotConvertible("GroupQueryAttention over quantised caches", node.name or "", kind="fused")

    def integer(self, name: str, default: int = 0) -> int:
        return self._attributes[name].as_int() if name in self._attributes else default

    def number(self, name: str) -> float:
        return self._attributes[name].as_float() if name in self._attributes else 0.0


def _check_lengths(probe: Probe, inputs: dict[str, ir.Value], name: str) -> None:
    """The length inputs must be what one unpadded sequence has, and positions those of its new tokens."""
    for new, past in ((5, 0), (1, 9), (3, 4)):
        wanted = {
            "seqlens_k": np.array([past + new - 1]),
            "total_sequence_length": np.array([past + new]),
            "position_ids": np.arange(past, past + new),
        }
        for role, expected in wanted.items():
            value = inputs.get(role)
            if value is None:
                continue
            if probe.view.taint(value):
                raise NotConvertible(f"{role} of GroupQueryAttention depends on tokens", name, kind="fused")
            actual = probe.structural([value], new, past)[0].reshape(-1)
            if not np.array_equal(actual, expected):
                raise NotConvertible(
                    f"{role} of GroupQueryAttention is {actual.tolist()[:6]} for {new} new and {past} past tokens",
                    name,
                    kind="fused",
                )


def _rotary(inputs: dict[str, ir.Value], attribute: _Attributes, name: str) -> tuple[Rotary | None, int | None]:
    if not attribute.integer("do_rotary"):
        return None, None
    tables = [inputs.get("cos_cache"), inputs.get("sin_cache")]
    if not all(is_constant(table) for table in tables):
        raise NotConvertible(
            "rotary tables are chosen at run time, by the length of the whole batch",
            name,
            "export for one context length",
            kind="batch-global",
        )
    cos, sin = (table.const_value.numpy() for table in tables)  # type: ignore[union-attr]
    rotary = Rotary(cos=cos, sin=sin, interleaved=bool(attribute.integer("rotary_interleaved")))
    return rotary, int(cos.shape[0])


def _sinks(inputs: dict[str, ir.Value], attribute: _Attributes, heads: int, name: str) -> tuple[float, ...]:
    sinks = _constant(inputs.get("head_sink"), name)
    if sinks is not None:
        return tuple(float(s) for s in sinks.reshape(-1))
    return (0.0,) * heads if attribute.integer("smooth_softmax") == 1 else ()


def _constant(value: ir.Value | None, name: str) -> np.ndarray[Any, Any] | None:
    if value is None:
        return None
    if not is_constant(value) or value.const_value is None:
        raise NotConvertible(f"'{value.name}' is not constant", name, kind="fused")
    return value.const_value.numpy()


def _window(probe: Probe, node: ir.Node, stated: int, heads: int, groups: int) -> int | None:
    """How far back the kernel sees, by running it alone: uniform scores over values that count their positions.

    A wide window is run as one of fewer tokens, to which the rest is added.
    """
    if stated < 0:
        return None
    if not 0 < stated < 1 << 31:
        raise NotConvertible(f"GroupQueryAttention with a window of {stated} tokens", node.name or "", kind="mask")
    stated, rest = min(stated, _WIDEST_RUN), max(0, stated - _WIDEST_RUN)
    size, past = 16, 3 * stated + 9
    kind = probe.dtype(node.inputs[0]) if node.inputs[0] is not None else np.dtype(np.float32)
    values = np.zeros((1, groups, past + 1, size), np.float64)
    values[..., 0] = np.arange(past + 1) == past
    feeds: dict[str, Array] = {
        "query": np.zeros((1, 1, heads * size), kind),
        "key": np.zeros((1, 1, groups * size), kind),
        "value": values[:, :, past].reshape(1, 1, groups * size).astype(kind),
        "past_key": np.zeros((1, groups, past, size), kind),
        "past_value": values[:, :, :past].astype(kind),
        "seqlens_k": np.array([past], np.int32),
        "total_sequence_length": np.array(past + 1, np.int32),
    }
    attributes = {"num_heads": heads, "kv_num_heads": groups, "local_window_size": stated}
    output = probe.evaluator.run_node(MICROSOFT_DOMAIN, "GroupQueryAttention", feeds, attributes)[0]
    return round(1.0 / float(output.reshape(-1)[0])) + rest
