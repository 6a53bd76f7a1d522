"""What `pagegraft doctor` reports: versions, the compiled library, and the instruction set it chose."""

from __future__ import annotations

import ctypes
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from .errors import LibraryError
from .library import library_path, register

__all__ = ["chosen_isa", "report"]

_PACKAGES = ("pagegraft", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "numpy", "ml_dtypes", "tokenizers")


def chosen_isa(library: Path) -> str | None:
    """Name of the instruction set whose kernels the library uses on this machine, None when it does not say."""
    loaded = ctypes.CDLL(str(library))
    try:
        function = loaded.pagegraft_isa
    except AttributeError:
        return None
    function.restype = ctypes.c_char_p
    name = function()
    return name.decode() if name else None


def report() -> bool:
    """Prints the report. False when the library cannot be used."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in _PACKAGES:
        try:
            console.print(f"{package:<12} {version(package)}")
        except PackageNotFoundError:
            console.print(f"{package:<12} not installed")
    try:
        library = library_path()
        console.print(f"library      {library}")
        console.print(f"kernels      {chosen_isa(library) or 'the library does not say'}")
        import onnxruntime

        register(onnxruntime.SessionOptions())
    except LibraryError as error:
        console.print(f"problem      {error}", markup=False)
        return False
    console.print("registration works")
    return True
