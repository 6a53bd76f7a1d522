"""Changes how the caches of a converted model store keys and values: element type, granularity, scales.

Works on a graph whose attentions are PagedAttention nodes already. A node whose caches are those of another node (a
layer that shares another layer's cache) takes that node's format and scales.

Shape letters: N blocks, B block size, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from ..cache_storage import storage_type
from ..errors import KvCacheError
from ..evaluate import Array
from .builder import Builder

__all__ = ["KV_DTYPES", "CacheFormat", "LayerScales", "check_scales", "set_cache_format"]

#: What `--kv-dtype` takes -> the logical cache type of the contract.
KV_DTYPES: Final = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "fp8": "float8e4m3fn",
    "float8e4m3fn": "float8e4m3fn",
}
#: Per part of a cache: the op's cache input and output, its scale input and output, and its attributes.
_PARTS: Final = {
    "key": (spec.In.KEY_CACHE, spec.Out.KEY_CACHE_OUT, spec.In.K_SCALE, spec.Out.K_SCALE_OUT, "k"),
    "value": (spec.In.VALUE_CACHE, spec.Out.VALUE_CACHE_OUT, spec.In.V_SCALE, spec.Out.V_SCALE_OUT, "v"),
}


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """Logical cache type (a key of spec.CACHE_DTYPES) and granularity of its scales.

    Raises KvCacheError for a pair that the contract does not have.
    """

    dtype: str
    quant: str = "NONE"

    def __post_init__(self) -> None:
        if self.dtype not in spec.CACHE_DTYPES:
            raise KvCacheError(f"there is no cache type '{self.dtype}'; name one of {', '.join(spec.CACHE_DTYPES)}")
        quantised = self.dtype in spec.QUANTISED_CACHE_DTYPES
        if quantised != (self.quant in ("PER_TENSOR", "PER_CHANNEL", "PER_TOKEN")):
            kinds = "scales per-tensor, per-channel or (int8) per-token" if quantised else "no scales"
            raise KvCacheError(f"a {self.dtype} cache has {kinds}, not '{self.quant}'")
        if self.quant == "PER_TOKEN" and self.dtype != "int8":
            raise KvCacheError(f"scales per token exist for int8 caches only, not for {self.dtype}; use per-channel")

    @property
    def static(self) -> bool:
        """True when the scales are constants of the graph, which calibration has to find."""
        return self.quant in ("PER_TENSOR", "PER_CHANNEL")


@dataclass(frozen=True, kw_only=True)
class LayerScales:
    """Static scales of one layer: `[1]` (PER_TENSOR) or `[G, 1, D]` (PER_CHANNEL) float32; value None when LATENT."""

    key: Array
    value: Array | None

    def part(self, part: str) -> Array | None:
        """The scales of "key" or "value"."""
        return self.key if part == "key" else self.value


def set_cache_format(
    model: ir.Model,
    manifest: names.Manifest,
    form: CacheFormat,
    scales: Sequence[LayerScales] = (),
) -> names.Manifest:
    """Edits every PagedAttention node and the cache inputs and outputs in place. Returns the manifest's new state
    (with the old digest: that is of the file, which is yet to be written).

    `scales` holds one entry a layer when `form.static`. Raises KvCacheError when they do not fit the layers, or when
    the caches are quantised already.
    """
    check_scales(manifest.layers, form, scales)
    if any(layer.quant != "NONE" for layer in manifest.layers):
        raise KvCacheError("the model's caches are quantised already; convert the source model again")
    builder = Builder(model.graph)
    index_of = {names.cache_name(i, "key"): i for i in range(len(manifest.layers))}
    layer_of: dict[ir.Node, int] = {}
    for node in [n for n in model.graph if n.op_type == spec.OP_TYPE]:
        key_cache = node.inputs[spec.In.KEY_CACHE]
        if key_cache is None:
            raise KvCacheError(f"node '{node.name}' has no key cache; convert the source model again")
        owner = key_cache.producer()
        if owner is None:
            layer_of[node] = index_of[key_cache.name or ""]
            _retype(node, manifest.layers[layer_of[node]], layer_of[node], form)
        else:
            layer_of[node] = layer_of[owner]
        _set_attributes(node, manifest.layers[layer_of[node]], form, manifest.compute_dtype)
        if form.static:
            _add_static_scales(builder, node, layer_of[node], scales[layer_of[node]])
        elif form.quant == "PER_TOKEN" and owner is None:
            _add_token_scales(model.graph, node, manifest.layers[layer_of[node]], layer_of[node])
        elif form.quant == "PER_TOKEN" and owner is not None:
            _share_token_scales(node, owner)
    if any(node.domain == spec.PAGEGRAFT_DOMAIN for node in model.graph):
        model.opset_imports.setdefault(spec.PAGEGRAFT_DOMAIN, 1)
    return replace(manifest, layers=tuple(_layer(layer, form) for layer in manifest.layers))


def _layer(layer: names.CacheLayer, form: CacheFormat) -> names.CacheLayer:
    value_dtype = None if layer.value_dtype is None else form.dtype
    return replace(layer, key_dtype=form.dtype, value_dtype=value_dtype, quant=form.quant)


def check_scales(layers: Sequence[names.CacheLayer], form: CacheFormat, scales: Sequence[LayerScales]) -> None:
    """Raises KvCacheError unless there is one entry a layer, of the granularity's shape, finite and not negative."""
    if not form.static:
        return
    if len(scales) != len(layers):
        raise KvCacheError(f"there are scales for {len(scales)} layers, the model has {len(layers)}: calibrate it anew")
    for index, (layer, entry) in enumerate(zip(layers, scales, strict=True)):
        for part, size in (("key", layer.key_head_size), ("value", layer.value_head_size)):
            array = entry.part(part)
            if size is None and array is None:
                continue
            shape = (1,) if form.quant == "PER_TENSOR" else (layer.kv_heads, 1, size)
            if array is None or array.shape != shape:
                got = "none" if array is None else f"shape {list(array.shape)}"
                raise KvCacheError(
                    f"{part} scales of layer {index}: expected shape {list(shape)}, got {got}: calibrate this model"
                )
            if not np.isfinite(array).all() or (array < 0).any():
                raise KvCacheError(f"{part} scales of layer {index} are not all finite and positive: calibrate anew")


def _storage(form: CacheFormat) -> ir.DataType:
    return ir.DataType.from_numpy(storage_type(form.dtype))


def _retype(node: ir.Node, layer: names.CacheLayer, index: int, form: CacheFormat) -> None:
    """Gives the cache inputs and outputs of a node their stored element type and width."""
    for part, size in (("key", layer.key_head_size), ("value", layer.value_head_size)):
        if size is None:
            continue
        into, out = _PARTS[part][:2]
        for value in (node.inputs[into], node.outputs[out]):
            if value is None or value.shape is None:
                raise KvCacheError(f"node '{node.name}' has no {part} cache of layer {index}; convert the source again")
            value.shape = ir.Shape([*value.shape[:3], spec.cache_head_width(size, form.dtype)])
            value.type = ir.TensorType(_storage(form))


def _set_attributes(node: ir.Node, layer: names.CacheLayer, form: CacheFormat, compute_dtype: str) -> None:
    """Granularity and logical type; and the domain that can say them."""
    parts = ["k"] if layer.value_head_size is None else ["k", "v"]
    for letter in parts:
        if form.quant != "NONE":
            node.attributes.add(ir.AttrString(f"{letter}_quant_type", form.quant))
        if form.dtype == "int4":  # the others are told by the tensor's own type
            node.attributes.add(ir.AttrString(f"{letter}_cache_dtype", form.dtype))
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    own = spec.needs_pagegraft_domain(
        spec.AttentionAttributes.from_dict(values),
        compute_dtype=compute_dtype,
        head_size=layer.key_head_size,
        value_head_size=layer.key_head_size if layer.value_head_size is None else layer.value_head_size,
        cache_dtype=form.dtype,
    )
    node.domain = spec.PAGEGRAFT_DOMAIN if own else spec.MICROSOFT_DOMAIN


def _set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _add_static_scales(builder: Builder, node: ir.Node, index: int, scales: LayerScales) -> None:
    for part in _PARTS:
        array = scales.part(part)
        if array is not None:
            value = builder.constant(array.astype(np.float32), f"layer_{index}/{part}_scale")
            _set_input(node, _PARTS[part][2], value)


def _add_token_scales(graph: ir.Graph, node: ir.Node, layer: names.CacheLayer, index: int) -> None:
    """New graph inputs `[N, G, B]` and outputs that alias them."""
    if len(node.outputs) <= spec.Out.V_SCALE_OUT:
        before = len(node.outputs)
        node.resize_outputs(spec.Out.V_SCALE_OUT + 1)
        for out in node.outputs[before:]:
            out.name = ""
    key_cache = node.inputs[spec.In.KEY_CACHE]
    blocks = "num_blocks" if key_cache is None or key_cache.shape is None else key_cache.shape[0]
    for part in _PARTS if layer.value_head_size is not None else ("key",):
        _, _, into, out_index, _ = _PARTS[part]
        out = node.outputs[out_index]
        scale = ir.Value(name=names.cache_name(index, f"{part}_scale"))
        out.name = names.cache_name(index, f"{part}_scale", present=True)
        for value in (scale, out):
            value.shape = ir.Shape([blocks, layer.kv_heads, "block_size"])
            value.type = ir.TensorType(ir.DataType.FLOAT)
        graph.inputs.append(scale)
        graph.outputs.append(out)
        _set_input(node, into, scale)


def _share_token_scales(node: ir.Node, owner: ir.Node) -> None:
    """A node that reads another node's caches reads them after that node has written them: so with their scales."""
    for part in _PARTS:
        _, _, into, out_index, _ = _PARTS[part]
        if out_index < len(owner.outputs) and owner.outputs[out_index].name:
            _set_input(node, into, owner.outputs[out_index])
