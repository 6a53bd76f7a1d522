"""Folders under construction: what an interrupted process leaves of them, and how to leave nothing.

A folder that is being written is locked by its writer (the lock goes when the process does, however it ends), so that
what a killed one left can be told from what another one is still writing.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["partial_folder", "remove_abandoned", "signals_unwind"]


def _pattern(out: Path) -> str:
    return f".{out.name}.partial-"


@contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """A new locked folder beside `out`, gone when the block ends unless it was renamed. Raises OSError."""
    partial = out.parent / f"{_pattern(out)}{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def remove_abandoned(out: Path) -> None:
    """Removes what killed processes left of earlier attempts at `out`."""
    for left in out.parent.glob(glob.escape(_pattern(out)) + "*"):
        if left.is_dir() and not _in_use(left):
            shutil.rmtree(left, ignore_errors=True)


def _in_use(partial: Path) -> bool:
    """True when its process lives here, or one elsewhere (another container) holds its lock."""
    number = partial.name.rpartition("-")[2]
    if not number.isdigit() or Path("/proc", number).exists():
        return True
    lock = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP end the process by an exception, as SIGINT does, so that folders are removed.

    Only where nobody else handles them, and only in the main thread, which alone may change that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = [k for k in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(k) is signal.SIG_DFL]
    for kind in kinds:
        signal.signal(kind, _exit)
    try:
        yield
    finally:
        for kind in kinds:
            signal.signal(kind, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
