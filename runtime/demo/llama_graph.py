"""The graph of a Llama decoder with past_key_values, spelled out node by node as PyTorch's exporters do.

Nothing here knows about paging: RMSNorm, rotary embedding, repeated KV heads, causal mask and attention are primitive
ONNX operators of opset 18, and the weights are references into an external data file.

Shape letters: `b` batch, `s` new tokens, `p` past tokens, `t` = p + s, `H`/`G` query/KV heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from .gguf_model import LlamaShape

__all__ = ["OPSET", "ExternalTensor", "build_decoder"]

OPSET = 18
_IR_VERSION = 8
_MASKED = float(np.finfo(np.float32).min)


@dataclass(frozen=True, kw_only=True)
class ExternalTensor:
    """Where a weight lies in the external data file; offset and length in bytes."""

    location: str
    offset: int
    length: int
    shape: tuple[int, ...]


@dataclass
class _Builder:
    """Nodes and initializers under construction; `scope` is the module path that names the nodes."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    scope: str = "/model"

    def op(self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Append a node of one output and return the output's name."""
        stem = f"{self.scope}/{op_type}"
        count = self.counts.get(stem, 0)
        self.counts[stem] = count + 1
        name = f"{stem}_{count}" if count else stem
        output = output or f"{name}_output_0"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=name, **attributes))
        return output

    def vector(self, *values: int) -> str:
        """A constant int64 vector."""
        return self._constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        """A constant int64 scalar."""
        return self._constant(f"int_{value}", np.array(value, np.int64))

    def number(self, label: str, value: float | npt.NDArray[np.float32]) -> str:
        """A constant float32 scalar or array."""
        return self._constant(label, np.asarray(value, np.float32))

    def dimension(self, tensor: str, axis: int) -> str:
        """One dimension of a tensor, as a scalar."""
        return self.op("Gather", self.op("Shape", tensor), self.scalar(axis), axis=0)

    def shape_of(self, *dimensions: str | int) -> str:
        """A shape from scalars and known numbers."""
        parts = [
            self.vector(size) if isinstance(size, int) else self.op("Unsqueeze", size, self.vector(0))
            for size in dimensions
        ]
        return self.op("Concat", *parts, axis=0)

    def _constant(self, label: str, value: npt.NDArray[Any]) -> str:
        name = f"/constants/{label}"
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(value, name)
        return name


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What every layer reads: the mask, the rotary tables `[b, 1, s, D]` and the sizes of this call."""

    mask_b1st: str
    cos: str
    sin: str
    batch: str
    new: str


def build_decoder(shape: LlamaShape, weights: Mapping[str, ExternalTensor]) -> onnx.ModelProto:
    """The decoder as an ONNX model whose weights are external.

    Inputs `input_ids`, `position_ids` [b, s] and `attention_mask` [b, p + s] int64, `past_key_values.<i>.key/value`
    [b, G, p, D] float32; outputs `logits` [b, s, V] and `present.<i>.key/value` [b, G, p + s, D].
    """
    g = _Builder()
    hidden = g.op("Gather", "model.embed_tokens.weight", "input_ids")
    shared = _shared_tensors(g, shape)
    for layer in range(shape.num_layers):
        prefix = f"layers.{layer}"
        normed = _rms_norm(g, shape, hidden, f"{prefix}.input_layernorm")
        hidden = g.op("Add", hidden, _attention(g, shape, normed, layer, shared))
        normed = _rms_norm(g, shape, hidden, f"{prefix}.post_attention_layernorm")
        hidden = g.op("Add", hidden, _mlp(g, normed, f"{prefix}.mlp"))
        g.scope = "/model"
    hidden = _rms_norm(g, shape, hidden, "norm")
    g.scope = "/lm_head"
    head = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    g.op("MatMul", hidden, g.op("Transpose", head, perm=[1, 0]), output="logits")
    return _model(g, shape, weights)


def _shared_tensors(g: _Builder, shape: LlamaShape) -> _Shared:
    batch, new = g.dimension("input_ids", 0), g.dimension("input_ids", 1)
    past = g.dimension("past_key_values.0.key", 2)
    total = g.op("Add", past, new)
    cos, sin = _rotary_tables(g, shape)
    return _Shared(mask_b1st=_causal_mask(g, past, total), cos=cos, sin=sin, batch=batch, new=new)


def _causal_mask(g: _Builder, past: str, total: str) -> str:
    """0 where a query may look, the lowest float elsewhere: [b, 1, s, t]."""
    query_11s1 = g.op("Unsqueeze", g.op("Range", past, total, g.scalar(1)), g.vector(0, 1, 3))
    key_111t = g.op("Unsqueeze", g.op("Range", g.scalar(0), total, g.scalar(1)), g.vector(0, 1, 2))
    causal_11st = g.op("LessOrEqual", key_111t, query_11s1)
    unpadded_bt = g.op("Cast", "attention_mask", to=TensorProto.BOOL)
    allowed_b1st = g.op("And", causal_11st, g.op("Unsqueeze", unpadded_bt, g.vector(1, 2)))
    return g.op("Where", allowed_b1st, g.number("zero", 0.0), g.number("lowest", _MASKED))


def _rotary_tables(g: _Builder, shape: LlamaShape) -> tuple[str, str]:
    """Cosine and sine of position * frequency, both halves alike: [b, 1, s, D]."""
    g.scope = "/model/rotary_emb"
    exponents = np.arange(0, shape.head_size, 2, dtype=np.float64) / shape.head_size
    inverse = (1.0 / shape.rope_theta**exponents).astype(np.float32)
    inverse_1d1 = g.number("inverse_frequencies", inverse[None, :, None])
    position_b1s = g.op("Cast", g.op("Unsqueeze", "position_ids", g.vector(1)), to=TensorProto.FLOAT)
    angle_bsd = g.op("Transpose", g.op("MatMul", inverse_1d1, position_b1s), perm=[0, 2, 1])
    angle_bsD = g.op("Concat", angle_bsd, angle_bsd, axis=-1)
    cos = g.op("Unsqueeze", g.op("Cos", angle_bsD), g.vector(1))
    sin = g.op("Unsqueeze", g.op("Sin", angle_bsD), g.vector(1))
    g.scope = "/model"
    return cos, sin


def _rms_norm(g: _Builder, shape: LlamaShape, hidden: str, module: str) -> str:
    g.scope = "/model/" + module
    square = g.op("Pow", hidden, g.number("two", 2.0))
    mean = g.op("ReduceMean", square, g.vector(-1), keepdims=1)
    root = g.op("Sqrt", g.op("Add", mean, g.number("epsilon", shape.rms_norm_eps)))
    scaled = g.op("Mul", hidden, g.op("Div", g.number("one", 1.0), root))
    return g.op("Mul", f"model.{module}.weight", scaled)


def _attention(g: _Builder, shape: LlamaShape, hidden: str, layer: int, shared: _Shared) -> str:
    module = f"layers.{layer}.self_attn"
    g.scope = "/model/" + module
    query_bHsD = _rotate(g, shape, _heads(g, shape, hidden, f"{module}.q_proj", shared), shared)
    key_bGsD = _rotate(g, shape, _heads(g, shape, hidden, f"{module}.k_proj", shared), shared)
    value_bGsD = _heads(g, shape, hidden, f"{module}.v_proj", shared)
    past, present = f"past_key_values.{layer}", f"present.{layer}"
    key_bGtD = g.op("Concat", f"{past}.key", key_bGsD, axis=-2, output=f"{present}.key")
    value_bGtD = g.op("Concat", f"{past}.value", value_bGsD, axis=-2, output=f"{present}.value")
    key_bHtD = _repeat_heads(g, shape, key_bGtD)
    value_bHtD = _repeat_heads(g, shape, value_bGtD)
    scores = g.op("MatMul", query_bHsD, g.op("Transpose", key_bHtD, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.number("attention_scale", shape.head_size**-0.5))
    weights_bHst = g.op("Softmax", g.op("Add", scores, shared.mask_b1st), axis=-1)
    mixed_bsHD = g.op("Transpose", g.op("MatMul", weights_bHst, value_bHtD), perm=[0, 2, 1, 3])
    mixed = g.op("Reshape", mixed_bsHD, g.shape_of(shared.batch, shared.new, shape.num_heads * shape.head_size))
    return g.op("MatMul", mixed, f"model.{module}.o_proj.weight")


def _heads(g: _Builder, shape: LlamaShape, hidden: str, module: str, shared: _Shared) -> str:
    projected = g.op("MatMul", hidden, f"model.{module}.weight")
    split = g.op("Reshape", projected, g.shape_of(shared.batch, shared.new, -1, shape.head_size))
    return g.op("Transpose", split, perm=[0, 2, 1, 3])


def _rotate(g: _Builder, shape: LlamaShape, heads: str, shared: _Shared) -> str:
    """x * cos + rotate_half(x) * sin."""
    half, end, axis, step = shape.head_size // 2, 2**63 - 1, g.vector(3), g.vector(1)
    first = g.op("Slice", heads, g.vector(0), g.vector(half), axis, step)
    second = g.op("Slice", heads, g.vector(half), g.vector(end), axis, step)
    turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return g.op("Add", g.op("Mul", heads, shared.cos), g.op("Mul", turned, shared.sin))


def _repeat_heads(g: _Builder, shape: LlamaShape, heads_bGtD: str) -> str:
    """Each KV head as often as query heads share it: [b, G, t, D] to [b, H, t, D]."""
    repeats = shape.num_heads // shape.num_kv_heads
    if repeats == 1:
        return heads_bGtD
    batch, total = g.dimension(heads_bGtD, 0), g.dimension(heads_bGtD, 2)
    expanded = g.op(
        "Expand",
        g.op("Unsqueeze", heads_bGtD, g.vector(2)),
        g.shape_of(batch, shape.num_kv_heads, repeats, total, shape.head_size),
    )
    return g.op("Reshape", expanded, g.shape_of(batch, shape.num_heads, total, shape.head_size))


def _mlp(g: _Builder, hidden: str, module: str) -> str:
    g.scope = "/model/" + module
    gate = g.op("MatMul", hidden, f"model.{module}.gate_proj.weight")
    up = g.op("MatMul", hidden, f"model.{module}.up_proj.weight")
    activated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
    return g.op("MatMul", activated, f"model.{module}.down_proj.weight")


def _model(g: _Builder, shape: LlamaShape, weights: Mapping[str, ExternalTensor]) -> onnx.ModelProto:
    past: list[str | int] = ["batch_size", shape.num_kv_heads, "past_sequence_length", shape.head_size]
    total = "past_sequence_length + sequence_length"
    present: list[str | int] = ["batch_size", shape.num_kv_heads, total, shape.head_size]
    tokens: list[str | int] = ["batch_size", "sequence_length"]
    inputs = [
        _info("input_ids", TensorProto.INT64, tokens),
        _info("attention_mask", TensorProto.INT64, ["batch_size", total]),
        _info("position_ids", TensorProto.INT64, tokens),
    ]
    outputs = [_info("logits", TensorProto.FLOAT, [*tokens, shape.vocab_size])]
    for layer in range(shape.num_layers):
        for part in ("key", "value"):
            inputs.append(_info(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, past))
            outputs.append(_info(f"present.{layer}.{part}", TensorProto.FLOAT, present))
    initializers = [*g.constants.values(), *(_external(name, tensor) for name, tensor in weights.items())]
    graph = helper.make_graph(g.nodes, "main_graph", inputs, outputs, initializers)
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
        producer_name="pagegraft.runtime.demo",
    )


def _info(name: str, element: int, dimensions: Sequence[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, list(dimensions))


def _external(name: str, tensor: ExternalTensor) -> TensorProto:
    proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", tensor.location), ("offset", tensor.offset), ("length", tensor.length)):
        proto.external_data.add(key=key, value=str(value))
    return proto
