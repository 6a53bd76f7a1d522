"""The ONNX operators that converted decoders consist of, in torch.

One function an operator: the node and its input tensors (None where an optional one is left out) to its outputs. Type
annotations say Any for torch's tensors: torch is optional and imported by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from ..engine.errors import ConfigurationError
from .torch_types import torch_type

__all__ = ["OPERATORS", "Inputs", "Node", "Operator", "Outputs", "Tensor", "attributes_of", "integers", "operator_of"]

Tensor = Any
Inputs = Sequence[Any]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Node:
    """One node: its operator, names and attributes. `memo` keeps what an operator derives from constant inputs."""

    torch: Any
    domain: str
    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    memo: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.attributes.get(name, default)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes as Python values; text as str."""
    out = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in out.items()}


Operator = Callable[[Node, Inputs], Outputs]
OPERATORS: dict[tuple[str, str], Operator] = {}


def operator_of(domain: str, op_type: str) -> Operator:
    """The implementation of an operator. Raises ConfigurationError when there is none."""
    found = OPERATORS.get((domain, op_type))
    if found is None:
        raise ConfigurationError(
            f"the torch runner has no operator {domain or 'ai.onnx'}::{op_type}; run this model with --device cpu"
        )
    return found


def _operator(op_type: str, domain: str = "") -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS[domain, op_type] = function
        return function

    return register


def _unary(op_type: str, function: Callable[[Any, Tensor], Tensor]) -> None:
    OPERATORS["", op_type] = lambda node, inputs: (function(node.torch, inputs[0]),)


def _binary(op_type: str, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    OPERATORS["", op_type] = lambda node, inputs: (function(node.torch, inputs[0], inputs[1]),)


def _divide(torch: Any, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


for _name in ("Sigmoid", "Sqrt", "Tanh", "Reciprocal", "Relu", "Cos", "Sin", "Exp", "Erf", "Neg", "Abs", "Floor"):
    _unary(_name, lambda torch, x, name=_name.lower(): getattr(torch, name)(x))  # type: ignore[misc]
_unary("Identity", lambda torch, x: x)
_unary("Not", lambda torch, x: ~x)
_binary("Add", lambda torch, a, b: a + b)
_binary("Sub", lambda torch, a, b: a - b)
_binary("Mul", lambda torch, a, b: a * b)
_binary("Div", _divide)
_binary("Pow", lambda torch, a, b: torch.pow(a, b).to(a.dtype))
_binary("MatMul", lambda torch, a, b: torch.matmul(a, b))
_binary("Max", lambda torch, a, b: torch.maximum(a, b))
_binary("Min", lambda torch, a, b: torch.minimum(a, b))
_binary("Equal", lambda torch, a, b: a == b)
_binary("Less", lambda torch, a, b: a < b)
_binary("Greater", lambda torch, a, b: a > b)
_binary("LessOrEqual", lambda torch, a, b: a <= b)
_binary("GreaterOrEqual", lambda torch, a, b: a >= b)
_binary("And", lambda torch, a, b: a & b)
_binary("Or", lambda torch, a, b: a | b)


def integers(tensor: Tensor) -> list[int]:
    """The values of a small integer tensor: shapes, axes, sizes. They live on the host."""
    return [] if tensor is None else [int(x) for x in tensor.reshape(-1).tolist()]


@_operator("Gather")
def _gather(node: Node, inputs: Inputs) -> Outputs:
    data, index = inputs[0], inputs[1]
    axis = node.get("axis", 0) % data.dim()
    wrapped = node.torch.where(index < 0, index + data.shape[axis], index).to(data.device)
    picked = data.index_select(axis, wrapped.reshape(-1).long())
    return (picked.reshape(*data.shape[:axis], *index.shape, *data.shape[axis + 1 :]),)


@_operator("Reshape")
def _reshape(node: Node, inputs: Inputs) -> Outputs:
    data, sizes = inputs[0], integers(inputs[1])
    if not node.get("allowzero", 0):
        sizes = [data.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return (data.reshape(sizes),)


@_operator("Cast")
def _cast(node: Node, inputs: Inputs) -> Outputs:
    return (inputs[0].to(torch_type(node.torch, node.get("to"))),)


@_operator("Transpose")
def _transpose(node: Node, inputs: Inputs) -> Outputs:
    return (inputs[0].permute(node.get("perm", list(range(inputs[0].dim()))[::-1])),)


def _axes(node: Node, inputs: Inputs, index: int = 1) -> list[int]:
    given = inputs[index] if len(inputs) > index else None
    return list(node.get("axes", [])) if given is None else integers(given)


@_operator("Unsqueeze")
def _unsqueeze(node: Node, inputs: Inputs) -> Outputs:
    out, axes = inputs[0], _axes(node, inputs)
    rank = out.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        out = out.unsqueeze(axis)
    return (out,)


@_operator("Squeeze")
def _squeeze(node: Node, inputs: Inputs) -> Outputs:
    out, axes = inputs[0], _axes(node, inputs)
    for axis in sorted((a % out.dim() for a in axes), reverse=True):
        out = out.squeeze(axis)
    return (out if axes else out.squeeze(),)


def _reduce(node: Node, inputs: Inputs, function: Callable[..., Tensor]) -> Outputs:
    data, axes = inputs[0], _axes(node, inputs)
    if not axes:
        if node.get("noop_with_empty_axes", 0):
            return (data,)
        axes = list(range(data.dim()))
    return (function(data, dim=axes, keepdim=bool(node.get("keepdims", 1))),)


@_operator("ReduceMean")
def _reduce_mean(node: Node, inputs: Inputs) -> Outputs:
    return _reduce(node, inputs, node.torch.mean)


@_operator("ReduceSum")
def _reduce_sum(node: Node, inputs: Inputs) -> Outputs:
    return _reduce(node, inputs, node.torch.sum)


@_operator("ReduceMax")
def _reduce_max(node: Node, inputs: Inputs) -> Outputs:
    return _reduce(node, inputs, node.torch.amax)


@_operator("Shape")
def _shape(node: Node, inputs: Inputs) -> Outputs:
    sizes = list(inputs[0].shape)[slice(node.get("start", 0), node.get("end"))]
    return (node.torch.tensor(sizes, dtype=node.torch.int64),)


@_operator("Concat")
def _concat(node: Node, inputs: Inputs) -> Outputs:
    return (node.torch.cat(list(inputs), dim=node.get("axis")),)


@_operator("Split")
def _split(node: Node, inputs: Inputs) -> Outputs:
    data = inputs[0]
    axis = node.get("axis", 0)
    sizes = integers(inputs[1]) if len(inputs) > 1 else list(node.get("split", []))
    if not sizes:
        each = -(-data.shape[axis] // len(node.outputs))
        return tuple(node.torch.split(data, each, dim=axis))
    return tuple(node.torch.split(data, sizes, dim=axis))


@_operator("Slice")
def _slice(node: Node, inputs: Inputs) -> Outputs:
    out = inputs[0]
    starts, ends = integers(inputs[1]), integers(inputs[2])
    axes = integers(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else list(range(len(starts)))
    steps = integers(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        positions = range(out.shape[axis])[slice(start, end if end >= -out.shape[axis] else None, step)]
        if step == 1:
            out = out.narrow(axis, positions.start, len(positions))
        else:
            out = out.index_select(axis, node.torch.tensor(list(positions), device=out.device))
    return (out,)


@_operator("Pad")
def _pad(node: Node, inputs: Inputs) -> Outputs:
    data, pads = inputs[0], integers(inputs[1])
    if node.get("mode", "constant") != "constant" or any(x is not None for x in inputs[2:]):
        raise ConfigurationError("torch runner: Pad with zeros only; run the model on cpu")
    pairs = [(pads[axis], pads[axis + data.dim()]) for axis in reversed(range(data.dim()))]
    return (node.torch.nn.functional.pad(data, [n for pair in pairs for n in pair]),)


@_operator("Expand")
def _expand(node: Node, inputs: Inputs) -> Outputs:
    data = inputs[0]
    return (data.expand(node.torch.broadcast_shapes(data.shape, integers(inputs[1]))),)


@_operator("Tile")
def _tile(node: Node, inputs: Inputs) -> Outputs:
    return (inputs[0].repeat(integers(inputs[1])),)


@_operator("Where")
def _where(node: Node, inputs: Inputs) -> Outputs:
    return (node.torch.where(*inputs),)


@_operator("Range")
def _range(node: Node, inputs: Inputs) -> Outputs:
    values = [x.item() for x in inputs if x is not None]
    return (node.torch.arange(*values, dtype=inputs[0].dtype, device=inputs[0].device),)
