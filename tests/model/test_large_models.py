"""Models that are large beside the memory they may take: a conversion holds little of them at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from large_source import SHAPE_7B, write_large

SMALL = replace(SHAPE_7B, num_layers=4, hidden_size=256, intermediate_size=512, num_heads=2, num_kv_heads=2)
LARGE = replace(SHAPE_7B, num_layers=4, hidden_size=2048, intermediate_size=5504, num_heads=16, num_kv_heads=16)
#: The command line, told that models are too large to be run as a whole.
CONVERT = """
from pagegraft.graphpass import pipeline
pipeline.too_large_to_run = lambda _: True
from pagegraft.custom_ops.main import main
main()
"""


def _peak(source: Path, out: Path, *options: str) -> int:
    """Bytes that a process converting `source` holds at most."""
    command = [sys.executable, "-c", CONVERT, "convert", str(source), str(out), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.slow
def test_memory_of_a_conversion_does_not_follow_the_model(tmp_path: Path) -> None:
    """Slices of one layer are verified at a time, and files are copied as files."""
    write_large(tmp_path / "small", replace(SMALL, vocab_size=256))
    size = write_large(tmp_path / "large", LARGE)
    assert size > 600e6
    least = _peak(tmp_path / "small", tmp_path / "small-out")
    for name, options in (("copied", []), ("linked", ["--link"])):
        peak = _peak(tmp_path / "large", tmp_path / name, *options)
        assert peak - least < size / 2, name
        recorded = json.loads((tmp_path / name / "pagegraft.json").read_text())["verification"]
        assert recorded["verified"]
        assert "layer slices" in recorded["scope"]
        assert recorded["layers"] == LARGE.num_layers
    linked = tmp_path / "linked" / "model.onnx.data"
    assert os.path.samefile(linked, tmp_path / "large" / "model.onnx.data")
    assert (tmp_path / "copied" / "model.onnx.data").stat().st_size == size
