"""The operators with parameters: norms, activations, matrix products, routing, and PagedAttention itself."""

from __future__ import annotations

from typing import Any

from ...custom_ops.ascend.torch import load
from ...custom_ops.spec import INPUTS, MICROSOFT_DOMAIN, OP_TYPE, PAGEGRAFT_DOMAIN
from .torch_ops import OPERATORS, Inputs, Node, Outputs, Tensor, integers
from .torch_types import torch_type

__all__ = ["OPERATORS"]


def _rms(x: Tensor, weight: Tensor, epsilon: float, axis: int = -1) -> Tensor:
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x.float()
    normed = wide * (wide.pow(2).mean(dim=axes, keepdim=True) + epsilon).rsqrt()
    return (normed * weight.float()).to(x.dtype)


def _layer(node: Node, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, axis: int = -1) -> Tensor:
    axis %= x.dim()
    return node.torch.nn.functional.layer_norm(x, x.shape[axis:], weight, bias, epsilon)


def _simplified_layer_norm(node: Node, inputs: Inputs) -> Outputs:
    return (_rms(inputs[0], inputs[1], node.get("epsilon", 1e-5), node.get("axis", -1)),)


def _layer_norm(node: Node, inputs: Inputs) -> Outputs:
    bias = inputs[2] if len(inputs) > 2 else None
    return (_layer(node, inputs[0], inputs[1], bias, node.get("epsilon", 1e-5), node.get("axis", -1)),)


def _sum_outputs(node: Node, normed: Tensor, total: Tensor) -> Outputs:
    """Outputs of the skip norms: normed, two statistics that inference leaves out, the sum."""
    return (normed, None, None, total)[: len(node.outputs)]


def _skip_simplified(node: Node, inputs: Inputs) -> Outputs:
    total = inputs[0] + inputs[1]
    if len(inputs) > 3 and inputs[3] is not None:
        total = total + inputs[3]
    return _sum_outputs(node, _rms(total, inputs[2], node.get("epsilon", 1e-12)), total)


def _skip_layer(node: Node, inputs: Inputs) -> Outputs:
    total = inputs[0] + inputs[1]
    if len(inputs) > 4 and inputs[4] is not None:
        total = total + inputs[4]
    beta = inputs[3] if len(inputs) > 3 else None
    return _sum_outputs(node, _layer(node, total, inputs[2], beta, node.get("epsilon", 1e-12)), total)


def _embed_layer(node: Node, inputs: Inputs) -> Outputs:
    """Sum of word, position and segment embeddings, normed; a mask's lengths, the second output, nobody reads."""
    tokens, segments, words, places, parts, gamma, beta, _, positions = (*inputs, *[None] * 9)[:9]
    if positions is None:
        positions = node.torch.arange(tokens.shape[-1], device=tokens.device)
    total = words[tokens.long()] + places[positions.long()]
    if segments is not None and parts is not None:
        total = total + parts[segments.long()]
    normed = _layer(node, total, gamma, beta, node.get("epsilon", 1e-12))
    return (normed, None, total)[: len(node.outputs)]


def _fast_gelu(node: Node, inputs: Inputs) -> Outputs:
    x = inputs[0] if len(inputs) < 2 or inputs[1] is None else inputs[0] + inputs[1]
    return (node.torch.nn.functional.gelu(x, approximate="tanh"),)


def _gelu(node: Node, inputs: Inputs) -> Outputs:
    return (node.torch.nn.functional.gelu(inputs[0], approximate=node.get("approximate", "none")),)


def _softmax(node: Node, inputs: Inputs) -> Outputs:
    return (node.torch.softmax(inputs[0], dim=node.get("axis", -1)),)


def _clip(node: Node, inputs: Inputs) -> Outputs:
    low, high = (*inputs[1:], None, None)[:2]
    return (node.torch.clamp(inputs[0], min=low, max=high),)


def _gemm(node: Node, inputs: Inputs) -> Outputs:
    a, b = inputs[0], inputs[1]
    a, b = (a.t() if node.get("transA", 0) else a), (b.t() if node.get("transB", 0) else b)
    out = node.get("alpha", 1.0) * (a @ b)
    if len(inputs) > 2 and inputs[2] is not None:
        out = out + node.get("beta", 1.0) * inputs[2]
    return (out.to(a.dtype),)


def _matmul_nbits(node: Node, inputs: Inputs) -> Outputs:
    x = inputs[0]
    if "weight" not in node.memo:
        node.memo["weight"] = _dequantised(node, inputs).to(x.dtype)
    out = x @ node.memo["weight"].t()
    if len(inputs) > 5 and inputs[5] is not None:
        out = out + inputs[5]
    return (out,)


def _dequantised(node: Node, inputs: Inputs) -> Tensor:
    """Weights [N, K] of packed codes [N, blocks, block bytes], scales [N * blocks] and optional zero points."""
    torch, packed, scales = node.torch, inputs[1], inputs[2]
    bits, rows, depth, block = node.get("bits", 4), node.get("N"), node.get("K"), node.get("block_size")
    blocks = -(-depth // block)

    def unpack(codes: Tensor, count: int) -> Tensor:
        codes = codes.reshape(rows, -1)
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(rows, -1)
        return codes[:, :count].float()

    values = unpack(packed, blocks * block).reshape(rows, blocks, block)
    zeros = inputs[3] if len(inputs) > 3 else None
    if zeros is None:
        offset = torch.full((rows, blocks), float(1 << (bits - 1)), device=packed.device)
    elif zeros.is_floating_point():
        offset = zeros.reshape(rows, blocks).float()
    else:
        offset = unpack(zeros, blocks)
    weight = (values - offset[..., None]) * scales.reshape(rows, blocks, 1).float()
    return weight.reshape(rows, -1)[:, :depth]


def _top_k(node: Node, inputs: Inputs) -> Outputs:
    count = integers(inputs[1])[0]
    largest, ordered = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    values, index = node.torch.topk(inputs[0], count, dim=node.get("axis", -1), largest=largest, sorted=ordered)
    return values, index


def _scatter_elements(node: Node, inputs: Inputs) -> Outputs:
    data, index, updates = inputs[0], inputs[1], inputs[2]
    axis, kind = node.get("axis", 0) % data.dim(), node.get("reduction", "none")
    index = node.torch.where(index < 0, index + data.shape[axis], index)
    if kind == "none":
        return (data.scatter(axis, index, updates),)
    reductions = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return (data.scatter_reduce(axis, index, updates, reduce=reductions[kind]),)


def _constant_of_shape(node: Node, inputs: Inputs) -> Outputs:
    value = node.get("value")
    sizes = integers(inputs[0])
    if value is None:
        return (node.torch.zeros(sizes),)
    from onnx import numpy_helper

    number = numpy_helper.to_array(value).reshape(-1)[0].item()
    return (node.torch.full(sizes, number, dtype=torch_type(node.torch, value.data_type)),)


def _paged_attention(node: Node, inputs: Inputs) -> Outputs:
    """The caches are updated where they are; the cache outputs are those tensors."""
    given = list(inputs) + [None] * (len(INPUTS) - len(inputs))
    output = load()(*given[: len(INPUTS)], **node.attributes)
    cached: list[Any] = [output, given[3], given[4], None, given[14], given[15]]
    return tuple(cached[: len(node.outputs)])


for _domain in ("", MICROSOFT_DOMAIN):
    OPERATORS[_domain, "SimplifiedLayerNormalization"] = _simplified_layer_norm
    OPERATORS[_domain, "Gelu"] = _gelu
OPERATORS["", "RMSNormalization"] = _simplified_layer_norm
OPERATORS["", "LayerNormalization"] = _layer_norm
OPERATORS[MICROSOFT_DOMAIN, "SkipSimplifiedLayerNormalization"] = _skip_simplified
OPERATORS[MICROSOFT_DOMAIN, "SkipLayerNormalization"] = _skip_layer
OPERATORS[MICROSOFT_DOMAIN, "EmbedLayerNormalization"] = _embed_layer
OPERATORS[MICROSOFT_DOMAIN, "FastGelu"] = _fast_gelu
OPERATORS["", "Softmax"] = _softmax
OPERATORS["", "Clip"] = _clip
OPERATORS["", "Gemm"] = _gemm
OPERATORS[MICROSOFT_DOMAIN, "MatMulNBits"] = _matmul_nbits
OPERATORS["", "TopK"] = _top_k
OPERATORS["", "ScatterElements"] = _scatter_elements
OPERATORS["", "ConstantOfShape"] = _constant_of_shape
for _domain in (MICROSOFT_DOMAIN, PAGEGRAFT_DOMAIN):
    OPERATORS[_domain, OP_TYPE] = _paged_attention
