"""Finds the compiled custom-op library and hands it to onnxruntime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import LibraryError

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["MINIMUM_ONNXRUNTIME", "library_path", "register"]

#: The library asks for API version 18 of the C interface; older onnxruntimes than this are not tested.
MINIMUM_ONNXRUNTIME = (1, 24)

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_NAME = f"libpagegraft_ops{_SUFFIX}"


def library_path() -> Path:
    """Path of the compiled library. Raises LibraryError when this installation has none."""
    from pagegraft import custom_ops

    # An editable install keeps the compiled file in site-packages while the sources stay in the tree.
    for folder in custom_ops.__path__:
        candidate = Path(folder) / _NAME
        if candidate.is_file():
            return candidate
    raise LibraryError(f"{_NAME} is missing from this installation of pagegraft; install it again with: pip install .")


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Registers `com.microsoft::PagedAttention` and `pagegraft::PagedAttention` for CPU in a session.

    Raises LibraryError when the library is missing or the installed onnxruntime is too old for it.
    """
    import onnxruntime

    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if version < MINIMUM_ONNXRUNTIME:
        wanted = ".".join(map(str, MINIMUM_ONNXRUNTIME))
        raise LibraryError(
            f"onnxruntime {onnxruntime.__version__} is too old for pagegraft's custom op, which needs {wanted} or "
            f"newer; run: pip install 'onnxruntime>={wanted}'"
        )
    path = library_path()
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime raises its own untyped exceptions here
        raise LibraryError(
            f"onnxruntime {onnxruntime.__version__} could not load {path}: {error}; install pagegraft again with: "
            "pip install ."
        ) from error
