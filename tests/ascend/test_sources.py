"""The kernel's source: both compilers with strict warnings, nothing in it that a device compiler lacks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ascend_calls import half_call
from ascend_mutants import build_instrumented
from pagegraft.custom_ops.ascend.build import ROOT, STRICT_FLAGS, kernel_variants, run_compiler
from pagegraft.custom_ops.ascend.emulation import Device, DeviceRuleError, paged_attention
from pagegraft.custom_ops.conformance.call import Call

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


SOME = ("half_int8", "cube_half")


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed: g++ alone compiled the kernel")
@pytest.mark.parametrize(
    "variant", [v if v in SOME else pytest.param(v, marks=pytest.mark.slow) for v in kernel_variants()]
)
def test_clang_compiles_the_kernel_without_a_warning(variant: str) -> None:
    """g++ does so with the same flags when the emulator library is built: every other test here needs that."""
    source, macros = kernel_variants()[variant]
    flags = [*STRICT_FLAGS, "-fsyntax-only", f"-I{ROOT / 'emulator' / 'include'}", *macros]
    assert {"-Wall", "-Wextra", "-Werror"} <= set(flags)
    run_compiler(["clang++", *flags, str(ROOT / "op_kernel" / source)])


@pytest.mark.slow
def test_leaving_out_any_one_synchronisation_is_caught(tmp_path: Path) -> None:
    library, sites = build_instrumented(tmp_path)
    runs = [(call, Device(vector_cores=cores, min_split_tokens=64, cube=cube)) for call, cores, cube in _mutant_calls()]
    for call, device in runs:
        paged_attention(call.feeds, call.parsed(), device, library=library)

    def caught(number: int) -> bool:
        for call, device in runs:
            try:
                paged_attention(call.feeds, call.parsed(), device, library=library, mutant=number)
            except DeviceRuleError:
                return True
        return False

    kinds = ("EnQue", "DeQue", "FreeTensor", "PipeBarrier<PIPE_V>", "PIPE_ALL", "SyncAll()", "SyncAll<false>")
    flags = ("SetFlag<HardEvent", "WaitFlag<HardEvent", "CrossCoreSetFlag", "CrossCoreWaitFlag")
    assert all(any(kind in site.text for site in sites) for kind in (*kinds, *flags))
    assert len(sites) > 120
    survivors = {site.text for number, site in enumerate(sites) if not caught(number)}
    # Two queues of one pipe pair are filled one after the other: the wait for the second covers the first.
    assert survivors <= {"the wait of queryL1_.template DeQue<T>()", "the wait of left_.template DeQue<T>()"}


def _mutant_calls() -> list[tuple[Call, int, bool]]:
    """Calls that together run every synchronisation call: with the number of vector cores, and whether on cubes too."""
    int8: dict[str, Any] = {"cache": "int8", "head_size": 128, "query_heads": 8, "past": (500, 129)}
    alibi = {"alibi_slopes": [0.5] * 8}
    return [
        (half_call(new=(1, 40, 3), past=(200, 100, 0), query_heads=8), 6, False),
        (half_call(new=(1, 1), k_quant="PER_CHANNEL", sink=True, attributes={"softcap": 5.0}, **int8), 6, False),
        (half_call(new=(1, 17), k_quant="PER_TENSOR", attributes=alibi, **int8), 6, False),
        (half_call(new=(1, 1, 1), past=(5, 529, 40), unmapped=((2, 0), (2, 1), (2, 2))), 6, False),
        (half_call(new=(1,), past=(500,), query_heads=4, kv_heads=4), 3, False),
        (half_call(new=(70, 3), past=(200, 40), sink=True, kv_heads=4, head_size=64), 2, True),
        (half_call(new=(70, 3), past=(200, 40), query_heads=8, kv_heads=8, attributes=alibi), 4, True),
    ]
