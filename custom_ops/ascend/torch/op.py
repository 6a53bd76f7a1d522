"""Registers the op with torch: schema from the contract, a Meta implementation for shapes, a CPU one by our kernel.

The caches (and PER_TOKEN scales) are mutated and not returned: graph mode forbids returning mutated inputs.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np

from ...errors import LibraryError
from ...spec import ATTRIBUTES, INPUTS, AttributeSpec, ParameterSpec
from ...validation import Array

__all__ = ["import_torch", "load", "schema"]

_MUTATED: Final = ("key_cache", "value_cache", "k_scale", "v_scale")
_KINDS: Final = {"INT": "int", "FLOAT": "float", "STRING": "str", "FLOATS": "float[]"}


def import_torch() -> Any:
    """The torch module, imported without its automatic loading of device backends. Raises LibraryError."""
    if "torch" not in sys.modules:
        before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        try:
            import torch
        except ImportError as error:
            raise LibraryError(f"PyTorch cannot be imported ({error}); install it: pip install torch") from error
        finally:
            if before is None:
                del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
            else:
                os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = before
        return torch
    return sys.modules["torch"]


def schema() -> str:
    """The op's schema: inputs in the contract's order, attributes as keyword arguments."""
    inputs = [_input(spec) for spec in INPUTS]
    attributes = [_attribute(spec) for spec in ATTRIBUTES]
    return f"paged_attention({', '.join(inputs)}, *, {', '.join(attributes)}) -> Tensor"


def _input(spec: ParameterSpec) -> str:
    alias = f"({'abcd'[_MUTATED.index(spec.name)]}!)" if spec.name in _MUTATED else ""
    return f"Tensor{alias}{'?' if spec.optional else ''} {spec.name}"


def _attribute(spec: AttributeSpec) -> str:
    kind = _KINDS[spec.kind]
    if spec.required:
        return f"{kind} {spec.name}"
    if spec.kind == "FLOATS":
        return f"{kind} {spec.name}=[]"
    if spec.default is None:
        return f"{kind}? {spec.name}=None"
    return f"{kind} {spec.name}={repr(spec.default).replace(chr(39), chr(34))}"


@cache
def load() -> Any:
    """Registers the op once and returns `torch.ops.pagegraft.paged_attention`. Raises LibraryError without torch."""
    torch = import_torch()
    library = torch.library.Library("pagegraft", "DEF")
    library.define(schema())
    library.impl("paged_attention", _meta, "Meta")
    library.impl("paged_attention", _CpuImplementation(), "CPU")
    _KEPT.append(library)  # torch unregisters what a collected Library had registered
    return torch.ops.pagegraft.paged_attention


_KEPT: Final[list[Any]] = []


def _meta(query: Any, *inputs: Any, num_heads: int, v_head_size: int = 0, **attributes: Any) -> Any:
    key_cache, value_cache = inputs[2], inputs[3]
    width = key_cache.shape[-1] if value_cache is None else value_cache.shape[-1]
    if value_cache is None and v_head_size:
        width = v_head_size
    packed = attributes.get("v_cache_dtype") == "int4" and value_cache is not None
    return query.new_empty((query.shape[0], num_heads * width * (2 if packed else 1)))


class _CpuImplementation:
    """Hands the tensors' memory to the compiled kernel: nothing is copied, the caches are updated in place."""

    def __init__(self) -> None:
        from ...conformance.cpu_backend import CpuBackend

        self._backend = CpuBackend(threads=import_torch().get_num_threads())

    def __call__(self, *inputs: Any, **attributes: Any) -> Any:
        feeds: dict[str, Array] = {}
        for spec, tensor in zip(INPUTS, inputs, strict=False):
            if tensor is None:
                continue
            if spec.name in _MUTATED and not tensor.is_contiguous():
                raise ValueError(f"{spec.name} must be contiguous: it is updated in place")
            feeds[spec.name] = _as_numpy(tensor.contiguous())
        given = {name: value for name, value in attributes.items() if value is not None and value != []}
        return _as_tensor(self._backend.run(feeds, given)["output"])


def _as_numpy(tensor: Any) -> Array:
    torch = import_torch()
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    elif tensor.dtype == torch.float8_e4m3fn:
        array = tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    else:
        array = tensor.numpy()
    return array


def _as_tensor(array: Array) -> Any:
    torch = import_torch()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
