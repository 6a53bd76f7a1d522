"""ONNX element types and tensors in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..engine.errors import ConfigurationError

__all__ = ["cache_type", "read_tensor", "torch_type"]

_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
    TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
}
_CACHES = {"float8e4m3fn": "float8_e4m3fn", "int4": "uint8"}


def torch_type(torch: Any, onnx_type: int) -> Any:
    """The torch dtype of an ONNX element type. Raises ConfigurationError."""
    if onnx_type not in _TYPES:
        raise ConfigurationError(f"the torch runner has no tensors of ONNX type {TensorProto.DataType.Name(onnx_type)}")
    return getattr(torch, _TYPES[onnx_type])


def cache_type(torch: Any, dtype: str) -> Any:
    """The torch dtype that stores a logical cache type of the contract."""
    return getattr(torch, _CACHES.get(dtype, dtype))


def read_tensor(torch: Any, proto: onnx.TensorProto, folder: Path, device: Any) -> Any:
    """An initializer as a torch tensor on the device."""
    array = numpy_helper.to_array(proto, str(folder))
    if proto.data_type == TensorProto.BFLOAT16:
        tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.array(array))
    return tensor.to(device)
