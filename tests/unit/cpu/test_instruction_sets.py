"""Every instruction set that this processor has: right, bitwise independent of threads and companions, blind to NaN in
dead slots. Each runs in a process of its own, because the choice is made once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ISAS = ("avx512vbmi", "avx512", "avx2", "neon", "scalar", "naive")


def run_probe(isa: str) -> list[str]:
    environment = {**os.environ, "PAGEGRAFT_ISA": isa, "PYTHONPATH": str(HERE)}
    result = subprocess.run(
        [sys.executable, str(HERE / "isa_probe.py")], env=environment, capture_output=True, text=True, check=False
    )
    if "PAGEGRAFT_ISA: expected one of" in result.stderr:
        pytest.skip(f"this processor or build has no {isa}")
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("isa", ISAS)
def test_right_and_bitwise_invariant(isa: str) -> None:
    first, *checks = run_probe(isa)
    assert first == f"isa {isa}"
    assert len(checks) == 64
    assert [line for line in checks if not line.startswith("ok ")] == []


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "naive"])
def test_conformance_on_every_instruction_set(isa: str) -> None:
    environment = {**os.environ, "PAGEGRAFT_ISA": isa}
    code = "from pagegraft.custom_ops.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "conformance", "--backend", "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "PAGEGRAFT_ISA: expected one of" in result.stdout + result.stderr:
        pytest.skip(f"this processor or build has no {isa}")
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.slow
def test_conformance_on_neon_in_an_emulator(tmp_path: Path) -> None:
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user, cmake)")
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DPAGEGRAFT_TOOLS=ON", "-DCMAKE_SYSTEM_NAME=Linux"]
    configure += ["-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]
    subprocess.run(configure, check=True, capture_output=True)
    build = ["cmake", "--build", str(tmp_path), "--target", "pagegraft_replay"]
    subprocess.run(build, check=True, capture_output=True)
    program = tmp_path / "custom_ops" / "cpu" / "pagegraft_replay"
    command = f"qemu-aarch64 -L /usr/aarch64-linux-gnu {program}"
    environment = {**os.environ, "PAGEGRAFT_CORE_REPLAY": command, "PYTHONPATH": str(HERE)}
    code = (
        "from core_process import CoreProcess; assert CoreProcess().isa == 'neon'; "
        "from pagegraft.custom_ops.main import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "conformance", "--backend", "core_process:CoreProcess"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
