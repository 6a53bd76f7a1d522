"""Files that a command writes: looked at before it begins, and named as the user did when writing fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import PagegraftError

__all__ = ["check_writable", "writing"]


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


@contextmanager
def writing(path: Path, error: type[PagegraftError], advice: str) -> Iterator[None]:
    """Turns failures of the block to write `path` into `error` with the name that the user gave and not that of a
    temporary file, the reason, and the advice.
    """
    try:
        yield
    except OSError as failure:
        raise error(f"{path} cannot be written ({failure.strerror or failure}); {advice}") from None
