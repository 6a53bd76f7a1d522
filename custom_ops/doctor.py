"""What `pagegraft doctor` reports: versions, extras, the compiled library, and the instruction set it chose."""

from __future__ import annotations

import ctypes
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from rich.console import Console

from .errors import LibraryError
from .library import library_path, register

__all__ = ["chosen_isa", "missing_packages", "report"]

_PACKAGES = ("pagegraft", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "numpy", "ml_dtypes", "tokenizers")

_EXTRAS = ("server", "guided", "demo")


def missing_packages(extra: str) -> list[str]:
    """Packages of an extra, as this installation of pagegraft declares it, that are not installed."""
    declared = [
        re.match(r"([\w.-]+)[^;]*;.*\bextra == [\"']([\w-]+)[\"']", text) for text in requires("pagegraft") or ()
    ]
    return [match[1] for match in declared if match and match[2] == extra and not _installed(match[1])]


def _installed(package: str) -> str | None:
    """The version of a package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
        console.print(f"{package:<12} {_installed(package) or 'not installed'}")
    for extra in _EXTRAS:
        missing = missing_packages(extra)
        state = f"needs {', '.join(missing)}: pip install 'pagegraft[{extra}]'" if missing else "installed"
        console.print(f"{'extra ' + extra:<12} {state}", markup=False)
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
