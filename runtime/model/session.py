"""The onnxruntime runner: caches bound once to input and output alike; small inputs and logits in buffers kept by shape
and rebound when the shape changes.

Other ways were measured to be slower (new OrtValues or a new binding each step, `get_outputs`) or copy the cache
(`run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from ...custom_ops import register
from ...custom_ops.manifest import INPUT_IDS, LOGITS, LOGITS_INDICES, Manifest
from ..engine.errors import ConfigurationError, StepError
from ..engine.plan import BlockCopy
from .kv_pool import KVLayout, KVPool
from .runner import Feeds, KVGroup
from .shared_memory import SharedRegion

__all__ = ["OnnxRunner", "new_session"]

_LOGITS_TYPES: dict[str, tuple[Any, int]] = {
    "tensor(float)": (np.float32, TensorProto.FLOAT),
    "tensor(float16)": (np.float16, TensorProto.FLOAT16),
    "tensor(bfloat16)": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}
#: Making an OrtValue costs more than copying a step's inputs, so buffers are kept by shape, this many.
_REMEMBERED_SHAPES = 1024
#: Inputs of more bytes (tables of long contexts) are bound as they are, so that the buffers stay small together.
_LARGEST_BUFFER = 1 << 16
_Slot = tuple[NDArray[Any], onnxruntime.OrtValue]


def new_session(model: Path, *, num_threads: int | None, with_our_op: bool = True) -> onnxruntime.InferenceSession:
    """A CPU session, with our op unless told otherwise. Raises ConfigurationError when the model cannot be loaded.

    A model that does not import com.microsoft cannot be optimised beside our library: onnxruntime then knows that
    domain from the library alone. Converted models import it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # shapes differ from step to step
    options.inter_op_num_threads = 1
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    if with_our_op:
        register(options)
    try:
        return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own untyped exceptions
        raise ConfigurationError(f"onnxruntime cannot load {model}: {error}") from error


class OnnxRunner:
    """A ModelRunner on onnxruntime's CPU provider; `shared_memory` names a region that holds the caches."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, num_threads: int | None = None, shared_memory: str | None = None
    ) -> None:
        self._manifest = manifest
        self._session = new_session(folder / manifest.model_file, num_threads=num_threads)
        self._binding = self._session.io_binding()
        self._inputs = {i.name for i in self._session.get_inputs()}
        logits = next(o for o in self._session.get_outputs() if o.name == LOGITS)
        self._logits_type, self._logits_onnx_type = _LOGITS_TYPES[logits.type]
        self._logits = np.empty((0, manifest.vocab_size), self._logits_type)
        self._logits_values: dict[int, onnxruntime.OrtValue] = {}
        self._pool: KVPool | None = None
        self._shared_name = shared_memory
        self._region: SharedRegion | None = None
        self._num_rows = -1  # rows of the logits bound now
        self._buffers: dict[tuple[str, tuple[int, ...]], _Slot] = {}
        self._bound: dict[str, _Slot] = {}

    def allocate_kv(self, groups: Sequence[KVGroup]) -> None:
        """Allocates the caches and binds them; see ModelRunner. Raises ConfigurationError when memory is lacking."""
        layout = KVLayout(self._manifest, groups)
        if self._shared_name is not None:
            self._region = SharedRegion(self._shared_name, layout.num_bytes, layout.describe())
        self._pool = KVPool(layout, buffer=self._region.buffer if self._region else None)
        for past, (present, value) in self._pool.values.items():
            self._binding.bind_ortvalue_input(past, value)
            self._binding.bind_ortvalue_output(present, value)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all caches."""
        return self._pool.num_bytes if self._pool else 0

    def execute(self, feeds: Feeds) -> NDArray[np.float32]:
        """Runs one step; see ModelRunner."""
        for name, array in feeds.items():
            if name in self._inputs:
                self._feed(name, array)
        num_rows = feeds[LOGITS_INDICES].size
        if num_rows != self._num_rows:
            self._binding.bind_ortvalue_output(LOGITS, self._logits_value(num_rows))
            self._num_rows = num_rows
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises its own untyped exceptions
            raise StepError(f"the model failed on a step of {feeds[INPUT_IDS].size} tokens: {error}") from error
        logits = self._logits[:num_rows]
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)

    def _feed(self, name: str, array: NDArray[Any]) -> None:
        """Copies an input into the buffer of its shape, and binds that buffer unless it is bound already."""
        if array.nbytes > _LARGEST_BUFFER:
            array = np.ascontiguousarray(array)
            self._bind(name, (array, onnxruntime.OrtValue.ortvalue_from_numpy(array)))
            return
        key = (name, array.shape)
        slot = self._buffers.get(key)
        if slot is None:
            if len(self._buffers) >= _REMEMBERED_SHAPES:
                self._buffers.clear()
            buffer = np.empty(array.shape, array.dtype)
            slot = self._buffers[key] = (buffer, onnxruntime.OrtValue.ortvalue_from_numpy(buffer))
        slot[0][...] = array
        if self._bound.get(name) is not slot:
            self._bind(name, slot)

    def _bind(self, name: str, slot: _Slot) -> None:
        self._binding.bind_ortvalue_input(name, slot[1])
        self._bound[name] = slot  # a binding does not keep numpy's memory alive

    def _logits_value(self, num_rows: int) -> onnxruntime.OrtValue:
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self._manifest.vocab_size), self._logits_type)
            self._logits_values.clear()
        value = self._logits_values.get(num_rows)
        if value is None:
            if len(self._logits_values) >= _REMEMBERED_SHAPES:
                self._logits_values.clear()
            part = self._logits[:num_rows]
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(part, self._logits_onnx_type)
            self._logits_values[num_rows] = value
        return value

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in order; see ModelRunner."""
        if self._pool is not None and copies:
            self._pool.copy(copies)

    def close(self) -> None:
        """Gives the caches back."""
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound, self._pool = {}, None
        if self._region is not None:
            self._region.close()
            self._region = None
