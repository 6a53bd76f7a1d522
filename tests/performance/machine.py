"""What this machine can do at most: read bandwidth and multiply-adds, by machine.cc compiled for it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

__all__ = ["Machine"]

_ROUNDS = 3_000_000


class Machine:
    """Measures limits with `threads` threads; each measurement is a callable that does the work once."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="pagegraft-bench-"))
        library = folder / "machine.so"
        source = Path(__file__).with_name("machine.cc")
        compiler = os.environ.get("CXX", "g++")
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.read_seconds.restype = ctypes.c_double
        self._library.read_seconds.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.fma_seconds.restype = ctypes.c_double
        self._library.fma_seconds.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_double)]
        self._pool = ThreadPoolExecutor(16)

    def reader(self, size: int, threads: int) -> Callable[[], None]:
        """Reads `size` bytes once, shared out to the threads; the memory is allocated as caches are."""
        memory = np.full(size // 4, 1.0, np.float32)
        share = size // threads

        def run() -> None:
            base = memory.ctypes.data
            jobs = [self._pool.submit(self._library.read_seconds, base + i * share, share) for i in range(threads)]
            for job in jobs:
                job.result()

        return run

    def multiplier(self, threads: int) -> tuple[Callable[[], None], float]:
        """A run of independent float32 multiply-adds on all threads, and the number of its operations."""
        flops = ctypes.c_double()
        self._library.fma_seconds(1, ctypes.byref(flops))

        def work() -> None:
            self._library.fma_seconds(_ROUNDS, ctypes.byref(ctypes.c_double()))

        def run() -> None:
            for job in [self._pool.submit(work) for _ in range(threads)]:
                job.result()

        return run, flops.value * _ROUNDS * threads
