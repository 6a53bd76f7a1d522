"""Conversions that end before their time: signals, a killed process, a full disk. No half-made folder stays."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import decoder as d
import onnx
import pytest
from pagegraft.graphpass import ConvertOptions, convert

OPTIONS = ConvertOptions(max_positions=64)
#: Converts like the command line, but waits inside the verification until it is ended.
WAITING = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # both are ignored where the tests run in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pagegraft.graphpass import pipeline
def wait(*_, **__):
    print("verifying", flush=True)
    time.sleep(600)
pipeline.compare = wait
from pagegraft.custom_ops.main import main
main()
"""


def _source(folder: Path) -> Path:
    folder.mkdir()
    model = d.Decoder(rotate=d.rotary, learned_positions=False).model()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    return folder


def _start(source: Path, out: Path) -> subprocess.Popen[str]:
    """A conversion in another process, in the middle of its work."""
    command = [sys.executable, "-c", WAITING, "convert", str(source), str(out), "--max-positions", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "verifying\n"
    return process


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(kind: signal.Signals, tmp_path: Path) -> None:
    process = _start(_source(tmp_path / "source"), tmp_path / "out")
    assert [p for p in tmp_path.iterdir() if ".partial-" in p.name]
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + kind
    assert "Traceback" not in errors
    assert ("pagegraft: interrupted; nothing was written" in errors) == (kind == signal.SIGINT)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_what_a_killed_conversion_left_goes_with_the_next(tmp_path: Path) -> None:
    """But not what another process is still writing."""
    source = _source(tmp_path / "source")
    killed, alive = _start(source, tmp_path / "out"), _start(source, tmp_path / "out")
    try:
        killed.kill()
        killed.communicate()
        assert len([p for p in tmp_path.iterdir() if ".partial-" in p.name]) == 2
        convert(source, tmp_path / "out", OPTIONS)
        assert sorted(p.name for p in tmp_path.iterdir()) == [f".out.partial-{alive.pid}", "out", "source"]
    finally:
        alive.terminate()
        alive.communicate()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_folder_of_a_process_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """Its number says nothing here, its lock does."""
    import fcntl

    source, foreign = _source(tmp_path / "source"), tmp_path / ".out.partial-999999999"
    foreign.mkdir()
    lock = os.open(foreign, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    convert(source, tmp_path / "out", OPTIONS)
    assert foreign.is_dir()
    os.close(lock)
    convert(source, tmp_path / "out", OPTIONS)
    assert not foreign.exists()


@pytest.mark.parametrize("external", [True, False], ids=["data", "graph"])
def test_no_room_for_a_file(external: bool, tmp_path: Path) -> None:
    """The operating system refuses to write on, as a full disk does."""
    source = _source(tmp_path / "source") if external else d.Decoder().save(tmp_path / "source")
    room = 8192
    assert max(p.stat().st_size for p in source.iterdir()) > room
    main = "from pagegraft.custom_ops.main import main; main()"
    command = [sys.executable, "-c", main, "convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--max-positions", "64", "--no-verify"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )
    assert done.returncode == 1
    assert "cannot be written (File too large); free space" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
