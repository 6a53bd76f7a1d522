"""Finds out what of the Ascend stack is missing, one clear message each, before anything of it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...errors import LibraryError
from .npu_ops import torch_npu_attention
from .op import import_torch, load

__all__ = ["cann_folder", "require_npu"]


def cann_folder() -> Path | None:
    """Where CANN is installed, by its environment or its default places."""
    named = [os.environ.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    usual = ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"]
    for folder in [*filter(None, named), *usual]:
        if Path(folder).is_dir():
            return Path(folder)
    return None


def require_npu() -> Any:
    """The torch module with a working `npu` device and the op loaded.

    Raises LibraryError that names the missing piece (torch, torch_npu, CANN, a device) and how
    to get it.
    """
    for module in ("torch", "torch_npu"):
        if importlib.util.find_spec(module) is None:
            raise LibraryError(f"device npu needs {module}, which is not installed: pip install 'pagegraft[ascend]'")
    if cann_folder() is None:
        raise LibraryError(
            "device npu needs CANN, Huawei's driver and toolkit, which was not found: install CANN 9 and run "
            "'source /usr/local/Ascend/cann/set_env.sh', or use --device cpu"
        )
    torch = import_torch()
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise LibraryError(
            f"device npu: torch_npu cannot be loaded ({error}); its version must match torch {torch.__version__} and "
            "CANN, and CANN's set_env.sh must have been sourced"
        ) from error
    if not torch.npu.is_available():
        raise LibraryError("device npu: torch_npu sees no Ascend device; look at 'npu-smi info'")
    load()
    _implement(torch)
    return torch


@cache
def _implement(torch: Any) -> None:
    """The op on npu: by the operator's binding, or else by torch_npu's own operators, which do less."""
    binding = os.environ.get("PAGEGRAFT_TORCH_OPS")
    if binding is None:
        library = torch.library.Library("pagegraft", "IMPL")
        library.impl("paged_attention", torch_npu_attention(torch, sys.modules["torch_npu"]), "PrivateUse1")
        _KEPT.append(library)
        return
    try:
        torch.ops.load_library(binding)
    except OSError as error:
        raise LibraryError(f"device npu: PAGEGRAFT_TORCH_OPS={binding} cannot be loaded: {error}") from error


_KEPT: Final[list[Any]] = []
