"""The kernel's source: both compilers with strict warnings, nothing in it that a device compiler lacks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from ascend_calls import half_call
from ascend_mutants import build_instrumented
from pagegraft.custom_ops.ascend.build import ROOT, STRICT_FLAGS, kernel_variants, run_compiler
from pagegraft.custom_ops.ascend.emulation import Device, DeviceRuleError, paged_attention

DEVICE_SOURCES = sorted((ROOT / "op_kernel").iterdir())
FORBIDDEN = {
    "standard library": r"\bstd::|#\s*include\s*<(?!cstdint>)",
    "exceptions": r"\b(?:throw|try|catch)\b",
    "heap": r"\b(?:new|delete|malloc|free)\b",
    "double": r"\bdouble\b|(?<![\w.])\d+\.\d*(?:e[+-]?\d+)?(?![\w.])",
    "virtual functions": r"\bvirtual\b",
    "run-time types": r"\b(?:dynamic_cast|typeid)\b",
    "the emulator": r"\bemu::|\bEmu[A-Z]",
}


@pytest.mark.parametrize("path", DEVICE_SOURCES, ids=lambda p: p.name)
def test_device_code_keeps_to_what_a_device_has(path: Path) -> None:
    code = re.sub(r"//.*|/\*.*?\*/", "", path.read_text())
    for what, pattern in FORBIDDEN.items():
        found = re.search(pattern, code)
        assert found is None, f"{path.name} uses {what}: {found[0]!r}"


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("variant", kernel_variants())
def test_kernel_compiles_without_a_warning(compiler: str, variant: str) -> None:
    if shutil.which(compiler) is None:
        assert compiler == "clang++", "g++ is needed to build the project itself"
        pytest.skip("clang++ is not installed: the kernel was compiled with g++ only")
    flags = [*STRICT_FLAGS, "-fsyntax-only", f"-I{ROOT / 'emulator' / 'include'}", *kernel_variants()[variant]]
    run_compiler([compiler, *flags, str(ROOT / "op_kernel" / "paged_attention.cpp")])


@pytest.mark.slow
def test_leaving_out_any_one_synchronisation_is_caught(tmp_path: Path) -> None:
    library, sites = build_instrumented(tmp_path)
    int8 = {"cache": "int8", "head_size": 128, "query_heads": 8, "past": (500, 129)}
    alibi = {"alibi_slopes": [0.5] * 8}
    calls = [
        (half_call(new=(1, 40, 3), past=(200, 100, 0), query_heads=8), 6),
        (half_call(new=(1, 1), k_quant="PER_CHANNEL", sink=True, attributes={"softcap": 5.0}, **int8), 6),
        (half_call(new=(1, 17), k_quant="PER_TENSOR", attributes=alibi, **int8), 6),
        (half_call(new=(1, 1, 1), past=(5, 529, 40), unmapped=((2, 0), (2, 1), (2, 2))), 6),
        (half_call(new=(1,), past=(500,), query_heads=4, kv_heads=4), 3),
    ]
    for call, cores in calls:
        paged_attention(call.feeds, call.parsed(), Device(vector_cores=cores, min_split_tokens=64), library=library)

    def caught(number: int) -> bool:
        for call, cores in calls:
            device = Device(vector_cores=cores, min_split_tokens=64)
            try:
                paged_attention(call.feeds, call.parsed(), device, library=library, mutant=number)
            except DeviceRuleError:
                return True
        return False

    assert len(sites) > 80
    kinds = (
        "EnQue",
        "DeQue",
        "FreeTensor",
        "SetFlag",
        "WaitFlag",
        "PipeBarrier<PIPE_V>",
        "PipeBarrier<PIPE_ALL>",
        "SyncAll",
    )
    assert all(any(kind in site.text for site in sites) for kind in kinds)
    survivors = [site for number, site in enumerate(sites) if not caught(number)]
    assert not survivors
