"""Properties of the C++ sources: the generated header is fresh, onnxruntime's interface is declared as it is,
and no code compiled for one instruction set can be linked in for another."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from pagegraft.custom_ops import generate

ROOT = Path(__file__).resolve().parents[3]
CPU = ROOT / "custom_ops" / "cpu"
HEADERS = "@siteed/sherpa-onnx.rn@1.3.1"  # carries onnxruntime's C header, API 22


def test_contract_header_is_what_the_contract_says() -> None:
    assert (CPU / "contract.h").read_text(encoding="utf-8") == generate.cpu_header()


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512vbmi"])
def test_leaf_has_no_symbols_that_a_linker_may_merge(isa: str, tmp_path: Path) -> None:
    objects = sorted(ROOT.glob(f"build/*/custom_ops/cpu/CMakeFiles/pagegraft_ops.dir/isa/{isa}.cc.o"))
    if not objects or shutil.which("nm") is None:
        pytest.skip("no objects of a build in this tree, or no nm")
    symbols = subprocess.run(["nm", "-C", str(objects[-1])], capture_output=True, text=True, check=True).stdout
    weak = [line for line in symbols.splitlines() if len(line.split()) > 2 and line.split()[1] in "WVu"]
    assert weak == []


@pytest.mark.slow
def test_interface_has_the_official_layout(tmp_path: Path) -> None:
    for tool in ("npm", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    packed = subprocess.run(["npm", "pack", HEADERS], cwd=tmp_path, capture_output=True, text=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"npm could not fetch {HEADERS}: {packed.stderr[-200:]}")
    with tarfile.open(tmp_path / packed.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    header = next(tmp_path.rglob("onnxruntime_c_api.h"))
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{header.parent}", str(CPU / "ort_abi_check.cc")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    # The check must be able to fail: with one member moved it does.
    moved = (CPU / "ort_abi.h").read_text(encoding="utf-8").replace("void* unused_66[19];", "void* unused_66[20];")
    (tmp_path / "ort_abi.h").write_text(moved, encoding="utf-8")
    (tmp_path / "ort_abi_check.cc").write_text((CPU / "ort_abi_check.cc").read_text(encoding="utf-8"), encoding="utf-8")
    command[-1] = str(tmp_path / "ort_abi_check.cc")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
