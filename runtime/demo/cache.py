"""The demo's cache folder: where it is, and folders that appear in it complete or not at all.

Posix only in one respect: `exclusive` keeps two demos from building the same folder at once by a file lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...custom_ops.files import writing
from .errors import DemoError

__all__ = ["ELSEWHERE", "default_cache_dir", "exclusive", "new_folder"]

#: What to do where the cache folder cannot be used.
ELSEWHERE = "set PAGEGRAFT_CACHE to another folder"


def default_cache_dir() -> Path:
    """`$PAGEGRAFT_CACHE`, else `$XDG_CACHE_HOME/pagegraft`, else `~/.cache/pagegraft`."""
    if own := os.environ.get("PAGEGRAFT_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagegraft"


@contextmanager
def exclusive(cache_dir: Path) -> Iterator[None]:
    """Hold the cache folder (made if absent) against other processes; leftovers of killed ones are removed.

    Raises:
        DemoError: the folder cannot be made or written.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / ".lock").open("w")
    except OSError as error:
        raise DemoError(f"cache folder {cache_dir} is not writable ({error.strerror}): {ELSEWHERE}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in cache_dir.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextmanager
def new_folder(target: Path, *, advice: str) -> Iterator[Path]:
    """A path that the block makes a folder at; it takes the place of `target` when the block ends well, else vanishes.

    Call it within `exclusive(target.parent)`.

    Raises:
        DemoError: `target` cannot be written, in the block or at its end; `advice` says what to do then.
    """
    with writing(target, DemoError, advice):
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        try:
            built = partial / target.name
            yield built
            if target.exists():
                target.rename(partial / "replaced")
            built.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
