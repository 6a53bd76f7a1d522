"""Cache memory in a named POSIX shared memory region: other processes can map and read it while its engine runs.

A region belongs to one engine at a time, by a lock that the kernel drops when the process ends, however it ends: after
`kill -9` the next engine that is started with any shared region takes over or removes what was left behind. The region
begins with a header that names every cache tensor, so that a reader needs nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import CacheMemoryError, ConfigurationError
from .memory import format_bytes

__all__ = ["SharedRegion", "SharedView", "attach"]

_FOLDER: Final = Path("/dev/shm")
_PREFIX: Final = "pagegraft-"
_MAGIC: Final = b"PAGEGRAF"
_PAGE: Final = 4096
#: Somebody who looks for stale regions holds a lock for an instant; an engine holds it for good.
_LOCK_TRIES: Final = 50
_LOCK_PAUSE: Final = 0.01


@dataclass(frozen=True, slots=True)
class SharedView:
    """What another process sees: the cache tensors by input name, read-only, `[N, B, heads, size]`."""

    tensors: Mapping[str, NDArray[Any]]


class SharedRegion:
    """A region made for one engine. `buffer` is its memory behind the header.

    Raises ConfigurationError when the name is unusable or in use, or the memory is not there.
    """

    def __init__(self, name: str, num_bytes: int, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """`tensors` maps each tensor to its offset in `buffer`, shape and numpy type, for readers."""
        self.path = _path(name)
        _remove_stale(self.path)
        header = _header(tensors)
        self._file = _own(self.path, name)
        try:
            size = len(header) + num_bytes
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, size)
            # Without this, running out of memory later would end the process by SIGBUS.
            os.posix_fallocate(self._file, 0, size)
            self._map = mmap.mmap(self._file, size)
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise CacheMemoryError(
                f"shared memory has no room for {format_bytes(num_bytes)} of caches: give less --kv-memory, or enlarge "
                f"{_FOLDER}"
            ) from error
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[len(header) :]
        self._map[: len(header)] = header

    def close(self) -> None:
        """Removes the region; whoever has it mapped keeps the memory until they let go."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def attach(name: str) -> SharedView:
    """Maps the region of a running engine for reading. Raises ConfigurationError when there is none."""
    path = _path(name)
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise ConfigurationError(f"no engine runs with shared memory '{name}' ({path} does not exist)") from None
    except PermissionError:
        raise ConfigurationError(
            f"shared memory '{name}' belongs to another user ({path}): read it as the user of the engine"
        ) from None
    try:
        if _try_lock(file, fcntl.LOCK_SH):
            raise ConfigurationError(f"the engine of shared memory '{name}' has ended; start it again")
        data = mmap.mmap(file, 0, prot=mmap.PROT_READ) if os.fstat(file).st_size else None
    finally:
        os.close(file)
    if data is None or data[:8] != _MAGIC:
        raise ConfigurationError(f"shared memory '{name}' is not ready yet, or is not pagegraft's; try again")
    length = int.from_bytes(data[8:16], "little")
    tensors = json.loads(data[16 : 16 + length])
    start = _pages(16 + length)
    views = {}
    for tensor, facts in tensors.items():
        dtype, shape = np.dtype(facts["dtype"]), tuple(facts["shape"])
        count = int(np.prod(shape))
        views[tensor] = np.frombuffer(data, dtype, count, start + facts["offset"]).reshape(shape)
    return SharedView(views)


def _path(name: str) -> Path:
    if not _FOLDER.is_dir():
        raise ConfigurationError(f"shared memory needs {_FOLDER}, which this system has not; leave it out")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigurationError(f"'{name}' is no name for shared memory: use letters, digits, '.', '_' and '-'")
    return _FOLDER / f"{_PREFIX}{name}"


def _header(tensors: Mapping[str, Mapping[str, Any]]) -> bytes:
    text = json.dumps(tensors).encode()
    header = _MAGIC + len(text).to_bytes(8, "little") + text
    return header.ljust(_pages(len(header)), b"\0")


def _pages(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _own(path: Path, name: str) -> int:
    """A descriptor of the region's file, locked for this process."""
    for _ in range(_LOCK_TRIES):
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except PermissionError:
            raise ConfigurationError(
                f"shared memory '{name}' belongs to another user ({path}): choose another name"
            ) from None
        if _try_lock(file, fcntl.LOCK_EX):
            try:
                if os.stat(path).st_ino == os.fstat(file).st_ino:
                    return file
            except FileNotFoundError:
                pass  # somebody took it for stale before it was locked
        os.close(file)
        time.sleep(_LOCK_PAUSE)
    raise ConfigurationError(f"shared memory '{name}' is in use by another engine: choose another name")


def _remove_stale(own: Path) -> None:
    """Removes regions whose engines ended without doing so."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        if path == own:
            continue
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # gone by now, or another user's
            continue
        try:
            if _try_lock(file, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
        finally:
            os.close(file)
