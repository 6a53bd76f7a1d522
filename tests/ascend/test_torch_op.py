"""The op under torch: schema, Meta and CPU implementations, and what `npu` says where the stack is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascend_calls import half_call
from pagegraft.custom_ops.ascend.torch import load, require_npu, schema
from pagegraft.custom_ops.ascend.torch import npu as npu_module
from pagegraft.custom_ops.ascend.torch.op import _as_numpy, _as_tensor, import_torch
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.conformance.check import check_outputs
from pagegraft.custom_ops.errors import LibraryError
from pagegraft.custom_ops.reference import paged_attention as reference
from pagegraft.custom_ops.spec import ATTRIBUTES, INPUTS

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def test_schema_is_the_contract() -> None:
    text = schema()
    positional, keyword = text.removeprefix("paged_attention(").removesuffix(") -> Tensor").split(", *, ")
    assert [part.split()[-1] for part in positional.split(", ")] == [spec.name for spec in INPUTS]
    assert [part.split()[1].split("=")[0] for part in keyword.split(", ")] == [spec.name for spec in ATTRIBUTES]
    assert "Tensor(a!) key_cache, Tensor(b!)? value_cache" in text
    assert text.endswith("-> Tensor"), "mutated inputs are not returned"


def _run(call: Call, device: str | None = None) -> dict[str, Any]:
    tensors = {name: _as_tensor(array.copy()) for name, array in call.feeds.items()}
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    output = load()(*(tensors.get(spec.name) for spec in INPUTS), **call.attributes)
    return {"output": output, **{f"{n}_out": tensors[n] for n in ("key_cache", "value_cache") if n in tensors}}


@needs_torch
@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "setup", [{"attributes": {"softcap": 3.0}}, {"packed": True, "slots": "explicit", "sink": True}]
)
def test_cpu_implementation_updates_the_caches_in_place(compute: str, setup: dict[str, Any]) -> None:
    call = half_call(compute=compute, **setup)
    outputs = {name: _as_numpy(tensor) for name, tensor in _run(call).items()}
    check_outputs(call, outputs, reference)
    assert not np.array_equal(outputs["key_cache_out"], call.feeds["key_cache"])


@needs_torch
def test_meta_implementation_knows_the_shape() -> None:
    call = half_call(value_head_size=48)
    output = _run(call, "meta")["output"]
    torch = import_torch()
    assert tuple(output.shape) == (8, 4 * 48)
    assert output.dtype == torch.float16


@needs_torch
def test_torch_s_own_checks_of_a_custom_op() -> None:
    torch = import_torch()
    call = half_call(compute="float32")
    tensors = [_as_tensor(call.feeds[s.name].copy()) if s.name in call.feeds else None for s in INPUTS]
    torch.library.opcheck(
        load().default, tuple(tensors), call.attributes, test_utils=("test_schema", "test_faketensor")
    )


@needs_torch
def test_importing_torch_never_loads_device_backends() -> None:
    code = (
        "import os, sys; from pagegraft.custom_ops.ascend.torch import load; "
        "assert 'torch' not in sys.modules; load(); "
        "assert 'torch' in sys.modules and 'torch_npu' not in sys.modules; "
        "assert 'TORCH_DEVICE_BACKEND_AUTOLOAD' not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_torch
def test_npu_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"torch"}
    monkeypatch.setattr(npu_module.importlib.util, "find_spec", lambda name: object() if name in found else None)
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LibraryError, match=r"torch_npu.*pip install"):
        require_npu()
    found.add("torch_npu")
    if not os.path.isdir("/usr/local/Ascend"):
        with pytest.raises(LibraryError, match=r"CANN.*set_env\.sh"):
            require_npu()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    if "torch_npu" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch_npu", None)  # its import fails
        with pytest.raises(LibraryError, match="torch_npu cannot be loaded"):
            require_npu()
