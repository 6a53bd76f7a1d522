"""Files that a user names: read as text, looked at before a command that writes them begins, named when that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import PagegraftError

__all__ = ["check_writable", "read_text", "writing"]


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


def read_text(path: Path, error: type[PagegraftError], advice: str) -> str:
    """The text of a file in UTF-8. Raises `error` with the reason and the advice when it cannot be read as that."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8"
        raise error(f"{path} cannot be read as text ({reason}); {advice}") from None


@contextmanager
def writing(path: Path, error: type[PagegraftError], advice: str) -> Iterator[None]:
    """Turns failures of the block to write `path` into `error` with the name that the user gave and not that of a
    temporary file, the reason, and the advice.
    """
    try:
        yield
    except OSError as failure:
        raise error(f"{path} cannot be written ({failure.strerror or failure}); {advice}") from None
