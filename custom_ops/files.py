"""Files that a command writes at its end, looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import PagegraftError

__all__ = ["check_writable"]


def check_writable(path: Path, error: type[PagegraftError]) -> None:
    """Raises `error` when the file cannot be written, so that no work is done whose result would be lost."""
    existing = path if path.exists() else path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(existing, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise error(f"{path} cannot be written ({reason}); name a file in a folder of yours")
