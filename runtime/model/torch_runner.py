"""Runs a converted model through torch, node by node: on Ascend (`npu`), or on the CPU with the same code.

The graph of a converted decoder is a few dozen kinds of nodes; each is one function on torch tensors. Weights are moved
to the device once, the caches live there, and PagedAttention is `torch.ops.pagegraft.paged_attention`. Inputs that only
shape the computation (Reshape's sizes, axes) stay on the host, so that no step waits for the device to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from ...custom_ops.ascend.torch import import_torch, load, require_npu
from ...custom_ops.errors import LibraryError
from ...custom_ops.manifest import INPUT_IDS, LOGITS, Manifest, cache_name
from ..engine.errors import ConfigurationError, StepError
from ..engine.plan import BlockCopy
from .kv_pool import cache_tensors
from .runner import Feeds, KVGroup
from .torch_layers import OPERATORS
from .torch_ops import Node, attributes_of, operator_of
from .torch_types import cache_type, read_tensor

__all__ = ["TorchRunner"]

#: Inputs by operator that are read as numbers by the host.
_HOST_INPUTS: Final = {
    "Reshape": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "Slice": (1, 2, 3, 4),
    "Expand": (1,),
    "Tile": (1,),
    "Split": (1,),
    "Pad": (1,),
    "TopK": (1,),
    "ConstantOfShape": (0,),
    "ReduceMean": (1,),
    "ReduceSum": (1,),
    "ReduceMax": (1,),
}


class TorchRunner:
    """A ModelRunner on torch. `device` is "npu" or "cpu".

    Raises ConfigurationError when the device's software is missing (the message names the piece) or the model has an
    operator that the runner does not know.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, *, device: str = "cpu", num_threads: int | None = None
    ) -> None:
        try:
            self._torch = require_npu() if device == "npu" else import_torch()
            load()
        except LibraryError as error:
            raise ConfigurationError(str(error)) from error
        if device == "cpu" and num_threads is not None:
            self._torch.set_num_threads(num_threads)
        self._manifest = manifest
        self._device = self._torch.device(device)
        model = onnx.load(folder / manifest.model_file, load_external_data=False)
        self._input_names = {value.name for value in model.graph.input}
        self._nodes = [self._node(node) for node in model.graph.node]
        self._weights = self._load_weights(model.graph, folder)
        self._last_use = _last_uses(self._nodes)
        self._caches: list[list[Any]] = [[] for _ in manifest.groups]
        self._cache_feeds: dict[str, Any] = {}

    def _node(self, proto: onnx.NodeProto) -> Node:
        if proto.op_type != "Constant":
            operator_of(proto.domain, proto.op_type)
        names = (tuple(proto.input), tuple(proto.output), attributes_of(proto))
        return Node(self._torch, proto.domain, proto.op_type, proto.name or proto.op_type, *names)

    def _load_weights(self, graph: onnx.GraphProto, folder: Path) -> dict[str, Any]:
        """Initializers and Constant nodes as tensors; those that only the host reads stay there."""
        protos = {proto.name: proto for proto in graph.initializer}
        for node in self._nodes:
            if node.op_type == "Constant":
                protos[node.outputs[0]] = _constant(node)
        self._nodes = [node for node in self._nodes if node.op_type != "Constant"]
        host = {n.inputs[i] for n in self._nodes for i in _HOST_INPUTS.get(n.op_type, ()) if i < len(n.inputs)}
        cpu = self._torch.device("cpu")
        return {
            name: read_tensor(self._torch, proto, folder, cpu if name in host else self._device)
            for name, proto in protos.items()
        }

    def allocate_kv(self, groups: Sequence[KVGroup]) -> None:
        """Allocates the caches on the device; see ModelRunner."""
        for tensor in cache_tensors(self._manifest, groups[0].block_size):
            shape = (groups[tensor.group].num_blocks, *tensor.block_shape)
            cache = self._torch.zeros(shape, dtype=cache_type(self._torch, tensor.dtype), device=self._device)
            self._caches[tensor.group].append(cache)
            self._cache_feeds[cache_name(tensor.layer, tensor.part)] = cache

    @property
    def kv_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.numel() * cache.element_size() for cache in self._cache_feeds.values())

    def execute(self, feeds: Feeds) -> NDArray[np.float32]:
        """Runs one step; see ModelRunner."""
        values: dict[str, Any] = {**self._weights, **self._cache_feeds}
        for name, array in feeds.items():
            if name in self._input_names:
                values[name] = self._torch.from_numpy(np.array(array)).to(self._device)
        with self._torch.inference_mode():
            for index, node in enumerate(self._nodes):
                self._run(node, values, feeds[INPUT_IDS].size)
                for name in self._last_use[index]:
                    values.pop(name, None)
            logits: NDArray[np.float32] = values[LOGITS].float().cpu().numpy()
        return logits

    def _run(self, node: Node, values: dict[str, Any], num_tokens: int) -> None:
        inputs = [values[name] if name else None for name in node.inputs]
        try:
            outputs = OPERATORS[node.domain, node.op_type](node, inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise StepError(f"node {node.name} failed on a step of {num_tokens} tokens: {error}") from error
        values.update(zip(node.outputs, outputs, strict=False))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in order; see ModelRunner."""
        for copy in copies:
            for cache in self._caches[copy.group]:
                cache[copy.target].copy_(cache[copy.source])

    def close(self) -> None:
        """Gives the caches back."""
        self._caches = [[] for _ in self._manifest.groups]
        self._cache_feeds = {}


def _constant(node: Node) -> onnx.TensorProto:
    for name, value in node.attributes.items():
        if isinstance(value, onnx.TensorProto):
            return value
        if name in ("value_float", "value_floats"):
            return onnx.numpy_helper.from_array(np.array(value, np.float32))
        if name in ("value_int", "value_ints"):
            return onnx.numpy_helper.from_array(np.array(value, np.int64))
    raise ConfigurationError(f"the torch runner cannot read the constant of node {node.name}")


def _last_uses(nodes: Sequence[Node]) -> list[list[str]]:
    """By node, the intermediate values that nobody reads after it."""
    produced = {name for node in nodes for name in node.outputs if name} - {LOGITS}
    out: list[list[str]] = [[] for _ in nodes]
    for index in reversed(range(len(nodes))):
        for name in (*nodes[index].inputs, *nodes[index].outputs):
            if name in produced:
                produced.remove(name)
                out[index].append(name)
    return out
