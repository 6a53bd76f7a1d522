"""Compiles the Ascend kernel, unmodified, against the emulator into a shared library of the host.

The library is kept under `build/` in the source tree (or `$PAGEGRAFT_BUILD_DIR`), named by a digest of the sources and
flags, so that it is compiled once per change.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import LibraryError

__all__ = ["ROOT", "STRICT_FLAGS", "build_library", "compile_sources", "kernel_variants", "run_compiler"]

ROOT: Final = Path(__file__).resolve().parent
STRICT_FLAGS: Final = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wdouble-promotion")


def kernel_variants() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Each compiled variant of the kernels: its source file and the macros that the operator project would define."""
    types = {"half": "half", "bf16": "bfloat16_t", "float": "float", "int8": "int8_t"}
    variants: dict[str, tuple[str, tuple[str, ...]]] = {}
    for query in ("half", "bf16", "float"):
        for cache in (query, "int8"):
            name = f"{query}_{cache}"
            macros = (f"-DDTYPE_QUERY={types[query]}", f"-DDTYPE_KEY_CACHE={types[cache]}")
            variants[name] = ("paged_attention.cpp", (*macros, f"-Dpaged_attention=paged_attention_{name}"))
    for query in ("half", "bf16"):
        macros = (f"-DDTYPE_QUERY={types[query]}", f"-Dpaged_attention_cube=paged_attention_cube_{query}")
        variants[f"cube_{query}"] = ("paged_attention_cube.cpp", macros)
    return variants


def run_compiler(command: Sequence[str]) -> None:
    """Runs a compiler. Raises LibraryError with its first messages when it fails or is missing."""
    if shutil.which(command[0]) is None:
        raise LibraryError(f"the Ascend emulator needs the compiler '{command[0]}', which is not installed: install it")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LibraryError(f"compiling the Ascend emulator failed: {' '.join(command)}\n{done.stderr[:4000]}")


def compile_sources(sources: Path, out: Path, compiler: str, flags: Sequence[str]) -> Path:
    """Builds `out`/libpagegraft_ascend.so from a folder laid out as this one (op_kernel, op_host, emulator)."""
    base = [compiler, *flags, f"-I{sources / 'emulator' / 'include'}", "-c"]
    jobs = [(out / "driver.o", [str(sources / "emulator" / "driver.cpp")])]
    for name, (source, macros) in kernel_variants().items():
        jobs.append((out / f"{name}.o", [*macros, str(sources / "op_kernel" / source)]))
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda job: run_compiler([*base, *job[1], "-o", str(job[0])]), jobs))
    library = out / "libpagegraft_ascend.so"
    run_compiler([compiler, "-shared", "-o", str(library), *[str(job[0]) for job in jobs]])
    return library


def build_library(compiler: str = "g++", flags: Sequence[str] = STRICT_FLAGS) -> Path:
    """Path of the emulator library, compiled when the sources or flags have changed. Raises LibraryError."""
    digest = hashlib.sha256(" ".join([compiler, *flags]).encode())
    for path in _sources():
        digest.update(path.read_bytes())
    where = os.environ.get("PAGEGRAFT_BUILD_DIR")
    folder = Path(where) if where else ROOT.parents[1] / "build"
    out = folder / "ascend-emulator" / digest.hexdigest()[:16]
    library = out / "libpagegraft_ascend.so"
    if not library.exists():
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out / "lock"):
            if not library.exists():
                scratch = out / "objects"
                scratch.mkdir(exist_ok=True)
                compile_sources(ROOT, scratch, compiler, flags).replace(library)
    return library


def _sources() -> list[Path]:
    folders = ("op_kernel", "op_host", "emulator")
    found = sorted(p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".h", ".cpp"))
    if not found:
        raise LibraryError(
            "the Ascend sources are not part of an installed wheel: run the emulator from a checkout of pagegraft"
        )
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
