"""The CPU kernel as a backend: an onnxruntime session on a one-node model, caches bound in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime

from ..errors import ContractError
from ..library import register
from ..spec import PAGEGRAFT_DOMAIN
from ..validation import Array, element_type, geometry_of
from .backends import Capabilities
from .call import Call
from .node_model import ONNX_TYPES, domain_of, node_model, output_names

__all__ = ["IN_PLACE", "CpuBackend", "ort_value"]

_KEPT_SESSIONS = 256
#: The input whose memory each cache output is.
IN_PLACE = {
    "key_cache_out": "key_cache",
    "value_cache_out": "value_cache",
    "k_scale_out": "k_scale",
    "v_scale_out": "v_scale",
}


class CpuBackend:
    """Runs calls on the compiled library through onnxruntime.

    `threads`: intra-op threads of the sessions. `domain`: register name to use; by default com.microsoft where it
    suffices. The latest sessions are kept, one for each set of attributes, inputs
    and element types.
    """

    name = "cpu"

    def __init__(self, *, threads: int = 2, domain: str | None = None) -> None:
        self._domain = domain
        self._sessions: OrderedDict[Any, onnxruntime.InferenceSession] = OrderedDict()
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.enable_mem_pattern = False
        self._options.log_severity_level = 4
        register(self._options)

    def capabilities(self) -> Capabilities:
        """The whole contract."""
        return Capabilities(bitwise=True, max_cache_bytes=1 << 34)

    def run(self, feeds: dict[str, Array], attributes: dict[str, Any]) -> Mapping[str, Array]:
        """Runs one call; the caches in `feeds` are updated in place. Raises ContractError when onnxruntime refuses."""
        call = Call(feeds, attributes)
        session = self.session(call)
        try:
            return _run(session, call)
        except Exception as error:  # onnxruntime raises its own untyped exceptions here
            raise ContractError(str(error)) from None

    def session(self, call: Call) -> onnxruntime.InferenceSession:
        """The session for a call's attributes, inputs and element types. Raises ContractError when it is refused."""
        domain = self._domain or _domain_or_ours(call)
        signature = tuple((name, element_type(a), a.ndim) for name, a in sorted(call.feeds.items()))
        key = (domain, signature, repr(sorted(call.attributes.items())))
        if key not in self._sessions:
            model = node_model(call, domain, concrete=False)
            try:
                self._sessions[key] = onnxruntime.InferenceSession(
                    model.SerializeToString(), self._options, providers=["CPUExecutionProvider"]
                )
            except Exception as error:
                raise ContractError(str(error)) from None
            if len(self._sessions) > _KEPT_SESSIONS:
                self._sessions.popitem(last=False)
        return self._sessions[key]


def _domain_or_ours(call: Call) -> str:
    try:
        return domain_of(call)
    except ContractError:
        return PAGEGRAFT_DOMAIN


def _run(session: onnxruntime.InferenceSession, call: Call) -> dict[str, Array]:
    binding = session.io_binding()
    values = {name: ort_value(array) for name, array in call.feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    outputs: dict[str, Array] = {}
    for name in filter(None, output_names(call)):
        if name in IN_PLACE:
            outputs[name] = call.feeds[IN_PLACE[name]]
            binding.bind_ortvalue_output(name, values[IN_PLACE[name]])
    width = _output_width(call)
    if width is None:
        binding.bind_output("output", "cpu")
    else:
        # All bits set is NaN in every float type: rows that the kernel leaves out do not pass for zeros.
        outputs["output"] = np.empty((call.feeds["query"].shape[0], width), call.feeds["query"].dtype)
        outputs["output"].view(np.uint8)[...] = 0xFF
        values["output"] = ort_value(outputs["output"])
        binding.bind_ortvalue_output("output", values["output"])
    session.run_with_iobinding(binding)
    return outputs


def _output_width(call: Call) -> int | None:
    try:
        g = geometry_of(call.feeds, call.parsed())
    except ContractError:
        return None
    return g.query_heads * g.value_head_size


def ort_value(array: Array) -> onnxruntime.OrtValue:
    """An OrtValue that shares the array's memory (the array must be contiguous)."""
    kind = element_type(array)
    if kind in ("bfloat16", "float8e4m3fn"):
        plain = array.view(np.uint16 if kind == "bfloat16" else np.uint8)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(plain, ONNX_TYPES[kind])
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
