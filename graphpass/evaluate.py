"""Runs pieces of a graph in onnxruntime: the values asked for, from the values given, weights only where needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper
from pagegraft.custom_ops import register

from .errors import NotConvertible
from .graph import GraphView, node_inputs
from .stand_ins import stand_in_for

__all__ = ["Evaluator", "Unevaluable", "first_line", "session_options"]

Array = np.ndarray[Any, Any]

#: Sessions kept for reuse; the oldest goes first.
_KEPT_SESSIONS = 48
#: Weights from this size on are fed.
_FED_BYTES = 1 << 20


class Unevaluable(NotConvertible):
    """A piece of the graph that onnxruntime cannot run by itself."""


def session_options(*, optimise: bool = False, threads: int = 1) -> ort.SessionOptions:
    """Quiet single-threaded session options; without graph optimisation unless asked for."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def element_type(array: Array) -> int:
    """ONNX element type of a numpy array."""
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


@dataclass(frozen=True)
class _Session:
    """A session, the names of the values it is fed, and large weights that are fed too: as constants of its graph they
    would be copied several times."""

    session: ort.InferenceSession
    used: list[str]
    weights: dict[str, Array]


class Evaluator:
    """Evaluates slices of one graph. Sessions are kept by what they compute and from what."""

    def __init__(self, model: ir.Model, view: GraphView, *, custom_ops: bool = False) -> None:
        """With `custom_ops`, sessions know pagegraft's ops."""
        self._custom_ops = custom_ops
        self._model = model
        self.view = view
        self._sessions: dict[tuple[Any, ...], _Session] = {}
        self._node_protos: dict[ir.Node, onnx.NodeProto] = {}

    def run(self, outputs: Sequence[ir.Value], feeds: Mapping[ir.Value, Array], *, light: bool = False) -> list[Array]:
        """Values of `outputs` when the values in `feeds` are given.

        Everything between is computed; a graph input that is needed and not fed raises Unevaluable. With `light`,
        products with heavy weights are replaced by stand-ins of the right shape: only shapes are then meaningful.
        """
        by_name = {value.name or "": array for value, array in feeds.items()}
        direct = {o.name: by_name[o.name or ""] for o in outputs if o.name in by_name}
        wanted = list(dict.fromkeys(o for o in outputs if o.name not in direct))
        results: dict[str | None, Array] = dict(direct.items())
        if wanted:
            kept = self._session(wanted, feeds, light=light)
            try:
                values = kept.session.run(None, {**{name: by_name[name] for name in kept.used}, **kept.weights})
            except Exception as error:  # onnxruntime raises untyped exceptions
                raise Unevaluable(
                    f"onnxruntime fails on a part of the source: {first_line(error)}",
                    wanted[0].name or "",
                    kind="broken-source",
                ) from None
            results.update({o.name: v for o, v in zip(wanted, values, strict=True)})
        return [results[o.name] for o in outputs]

    def run_node(
        self, domain: str, op_type: str, feeds: Mapping[str, Array], attributes: Mapping[str, Any]
    ) -> list[Array]:
        """Outputs of a single node with the given inputs (in the op's order) and attributes. Raises Unevaluable."""
        node = helper.make_node(op_type, list(feeds), ["out0", "out1", "out2"], domain=domain, **attributes)
        inputs = [helper.make_tensor_value_info(n, element_type(a), list(a.shape)) for n, a in feeds.items()]
        outputs = [onnx.ValueInfoProto(name=n) for n in node.output]
        graph = helper.make_graph([node], "node", inputs, outputs)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        try:
            session = ort.InferenceSession(model.SerializeToString(), session_options())
            return [np.asarray(v) for v in session.run(None, dict(feeds))]
        except Exception as error:  # onnxruntime raises untyped exceptions
            raise Unevaluable(
                f"onnxruntime does not run {op_type}: {first_line(error)}", kind="broken-source"
            ) from None

    def _session(self, wanted: Sequence[ir.Value], feeds: Mapping[ir.Value, Array], *, light: bool) -> _Session:
        key = (
            light,
            tuple(v.name for v in wanted),
            tuple(sorted((v.name or "", a.ndim, str(a.dtype)) for v, a in feeds.items())),
        )
        if key not in self._sessions:
            while len(self._sessions) >= _KEPT_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[key] = self._build(wanted, feeds, light=light)
        return self._sessions[key]

    def _build(self, wanted: Sequence[ir.Value], feeds: Mapping[ir.Value, Array], *, light: bool) -> _Session:
        nodes, leaves, constants = self._slice(wanted, set(feeds))
        protos: list[onnx.NodeProto] = []
        initializers: dict[str, onnx.TensorProto] = {}
        needed = {v.name or "" for v in wanted}
        for node in reversed(nodes):
            if not any(out.name in needed for out in node.outputs):
                continue  # transposed a weight that a stand-in does without
            stand_in = stand_in_for(node, initializers) if light else None
            if stand_in is None:
                needed.update(_captured(node))
            made = stand_in if stand_in is not None else [self._proto(node)]
            needed.update(name for p in made for name in p.input)
            protos[:0] = made
        weights: dict[str, Array] = {}
        for value in constants:
            if value.name not in needed:
                continue
            if _is_plain_weight(value):
                weights[value.name or ""] = _read_weight(value.const_value)
            else:
                initializers[value.name or ""] = _tensor_proto(value)
        given = [helper.make_tensor_value_info(n, element_type(w), list(w.shape)) for n, w in weights.items()]
        inputs = [
            helper.make_tensor_value_info(v.name, element_type(feeds[v]), [None] * feeds[v].ndim)
            for v in leaves
            if v.name in needed
        ]
        graph = helper.make_graph(
            protos,
            "slice",
            inputs + given,
            [onnx.ValueInfoProto(name=v.name) for v in wanted],
            list(initializers.values()),
        )
        opsets = [helper.make_opsetid(d, v) for d, v in self._model.opset_imports.items()]
        proto = helper.make_model(graph, opset_imports=opsets, ir_version=min(self._model.ir_version, 11))
        try:
            options = session_options()
            if self._custom_ops:
                register(options)
            session = ort.InferenceSession(proto.SerializeToString(), options)
        except Exception as error:
            raise Unevaluable(
                f"onnxruntime does not load a part of the source: {first_line(error)}",
                wanted[0].name or "",
                kind="broken-source",
            ) from None
        return _Session(session, [i.name for i in inputs], weights)

    def _slice(
        self, wanted: Sequence[ir.Value], stops: set[ir.Value]
    ) -> tuple[list[ir.Node], list[ir.Value], list[ir.Value]]:
        nodes: set[ir.Node] = set()
        leaves: dict[ir.Value, None] = {}
        constants: dict[ir.Value, None] = {}
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in stops:
                leaves[value] = None
                continue
            producer = value.producer()
            if producer is None:
                if not value.is_initializer():
                    raise Unevaluable(f"a value depends on graph input '{value.name}'", wanted[0].name or "")
                constants[value] = None
            elif producer not in nodes:
                nodes.add(producer)
                stack.extend(node_inputs(producer))
        return sorted(nodes, key=self.view.order.__getitem__), list(leaves), list(constants)

    def _proto(self, node: ir.Node) -> onnx.NodeProto:
        if node not in self._node_protos:
            self._node_protos[node] = ir.serde.serialize_node(node)
        return self._node_protos[node]


def _captured(node: ir.Node) -> list[str]:
    return [v.name or "" for v in node_inputs(node)]


def _tensor_proto(value: ir.Value) -> onnx.TensorProto:
    tensor = value.const_value
    if tensor is None:
        raise Unevaluable(f"constant '{value.name}' has no data", value.name or "")
    if isinstance(tensor, ir.ExternalTensor):
        return _read_external(tensor, value.name or "")
    return ir.serde.serialize_tensor(ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name))


def _read_external(tensor: ir.ExternalTensor, name: str) -> onnx.TensorProto:
    """Reads external data without mapping the file, whose touched pages would count as memory for good."""
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        raw = file.read(tensor.length if tensor.length is not None else tensor.nbytes)
    dims = [int(d) for d in tensor.shape.numpy()]
    return onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=dims, raw_data=raw)


def _is_plain_weight(value: ir.Value) -> bool:
    """True for a large weight in a file whose readers take any operand, not constants alone."""
    tensor = value.const_value
    return (
        isinstance(tensor, ir.ExternalTensor)
        and tensor.dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT)
        and tensor.nbytes >= _FED_BYTES
        and all(
            user.op_type in ("MatMul", "Gemm", "Gather", "Transpose") and not user.domain for user, _ in value.uses()
        )
    )


def _read_weight(tensor: Any) -> Array:
    """A weight's values, read without mapping the file."""
    shape = [int(d) for d in tensor.shape.numpy()]
    kind, count = tensor.dtype.numpy(), int(np.prod(shape))
    return np.fromfile(tensor.path, kind, count, offset=tensor.offset or 0).reshape(shape)


def first_line(error: Exception) -> str:
    """The first line of an exception's message, cut short."""
    return str(error).strip().splitlines()[0][:300]
