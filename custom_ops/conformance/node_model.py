"""A one-node ONNX model around PagedAttention, for sessions and for exported vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto, helper

from ..spec import (
    MICROSOFT_DOMAIN,
    OP_TYPE,
    OP_VERSION,
    OUTPUTS,
    PAGEGRAFT_DOMAIN,
    needs_pagegraft_domain,
    ordered_inputs,
)
from ..validation import Array, element_type, geometry_of
from .call import Call

__all__ = ["ONNX_TYPES", "domain_of", "node_model", "output_names"]

#: ONNX element type of each element type of the contract.
ONNX_TYPES: Final[Mapping[str, int]] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
}


def domain_of(call: Call) -> str:
    """com.microsoft where it can say a valid call, else ours. Raises ContractError for a malformed call."""
    attributes = call.parsed()
    g = geometry_of(call.feeds, attributes)
    ours = needs_pagegraft_domain(
        attributes,
        compute_dtype=g.compute_dtype,
        head_size=g.head_size,
        value_head_size=g.value_head_size,
        cache_dtype=g.cache_dtype,
    )
    return PAGEGRAFT_DOMAIN if ours else MICROSOFT_DOMAIN


def output_names(call: Call) -> list[str]:
    """Names of the node's outputs by index, "" where one is absent; caches are always included."""
    present = {"output", "key_cache_out"}
    if "value_cache" in call.feeds:
        present.add("value_cache_out")
    for letter in "kv":
        if call.attributes.get(f"{letter}_quant_type") == "PER_TOKEN" and f"{letter}_scale" in call.feeds:
            present.add(f"{letter}_scale_out")
    by_index = {int(p.index): p.name for p in OUTPUTS if p.name in present}
    return [by_index.get(i, "") for i in range(max(by_index) + 1)]


def node_model(call: Call, domain: str, *, concrete: bool) -> onnx.ModelProto:
    """The model of a call: inputs and outputs under their contract names, shapes `concrete` or symbolic."""

    def info(name: str, array: Array) -> onnx.ValueInfoProto:
        shape = list(array.shape) if concrete else [f"{name}_{i}" for i in range(array.ndim)]
        return helper.make_tensor_value_info(name, ONNX_TYPES[element_type(array)], shape)

    outputs = output_names(call)
    source = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    source |= {"k_scale_out": "k_scale", "v_scale_out": "v_scale"}
    infos = []
    for name in outputs:
        if name == "output":
            shape: list[int | str] = ["T", "output_width"]
            if concrete:
                g = geometry_of(call.feeds, call.parsed())
                shape = [g.tokens, g.query_heads * g.value_head_size]
            infos.append(helper.make_tensor_value_info(name, ONNX_TYPES[element_type(call.feeds["query"])], shape))
        elif name:
            array = call.feeds[source[name]]
            dims = list(array.shape) if concrete else [f"{source[name]}_{i}" for i in range(array.ndim)]
            infos.append(helper.make_tensor_value_info(name, ONNX_TYPES[element_type(array)], dims))
    present = {name: name for name in call.feeds}
    inputs = [name or "" for name in ordered_inputs(present)]
    node = helper.make_node(OP_TYPE, inputs, outputs, name=OP_TYPE, domain=domain)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in call.attributes.items())
    graph = helper.make_graph([node], OP_TYPE, [info(n, a) for n, a in call.feeds.items()], infos)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, OP_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="pagegraft")
