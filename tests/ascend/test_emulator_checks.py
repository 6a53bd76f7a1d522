"""The emulator against kernels that are wrong in one way each, and its number formats against numpy's."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from pagegraft.custom_ops.ascend.build import ROOT, STRICT_FLAGS, run_compiler

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("broken") / "libbroken.so"
    flags = [*STRICT_FLAGS, "-shared", f"-I{ROOT / 'emulator' / 'include'}"]
    run_compiler(["g++", *flags, str(HERE / "broken_kernels.cpp"), "-o", str(path)])
    library = ctypes.CDLL(str(path))
    library.pg_case_name.restype = library.pg_case_check.restype = ctypes.c_char_p
    library.pg_half_sum.restype = library.pg_half_value.restype = library.pg_device_exp.restype = ctypes.c_float
    library.pg_half_bits.restype = library.pg_bfloat_bits.restype = ctypes.c_uint16
    library.pg_half_bits.argtypes = library.pg_bfloat_bits.argtypes = library.pg_device_exp.argtypes = [ctypes.c_float]
    library.pg_half_value.argtypes = [ctypes.c_uint16]
    return library


def _run(cases: ctypes.CDLL, index: int, *, broken: bool) -> tuple[str, str]:
    check, text = ctypes.create_string_buffer(512), ctypes.create_string_buffer(512)
    cases.pg_case_run(index, int(broken), check, text)
    return check.value.decode(), text.value.decode()


def test_right_kernels_pass(cases: ctypes.CDLL) -> None:
    for i in range(cases.pg_case_count()):
        assert _run(cases, i, broken=False) == ("", ""), cases.pg_case_name(i)


def test_each_broken_kernel_trips_its_check(cases: ctypes.CDLL) -> None:
    assert cases.pg_case_count() > 40
    for i in range(cases.pg_case_count()):
        check, text = _run(cases, i, broken=True)
        assert check == cases.pg_case_check(i).decode(), (cases.pg_case_name(i), check, text)
        assert text


def test_half_rounds_after_each_operation(cases: ctypes.CDLL) -> None:
    assert cases.pg_half_sum() == 2048.0


def test_number_formats_agree_with_numpy(cases: ctypes.CDLL) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))]
    assert all(cases.pg_half_value(int(b)) == float(np.uint16(b).view(np.float16)) for b in finite[::7])
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [
            rng.standard_normal(3000) * 10.0 ** rng.integers(-9, 6, 3000),
            [0, -0.0, 65504, 65519.99, 65520, 1e9, 2**-24, 2**-25],
        ]
    ).astype(np.float32)
    with np.errstate(over="ignore"):
        half, brain = values.astype(np.float16).view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert [cases.pg_half_bits(float(v)) for v in values] == half.tolist()
    assert [cases.pg_bfloat_bits(float(v)) for v in values] == brain.tolist()


def test_device_exponential_is_close_but_not_exact(cases: ctypes.CDLL) -> None:
    values = np.linspace(-80, 20, 4001, dtype=np.float32)
    got = np.array([cases.pg_device_exp(float(v)) for v in values])
    error = np.abs(got / np.exp(values.astype(np.float64)) - 1)
    assert 2.0**-24 < error.max() < 2.0**-20
    assert cases.pg_device_exp(0.0) == 1.0


def _operands(name: str, element: str, count: int, rest: str = "1") -> str:
    return f"{name}({', '.join([f'LocalTensor<{element}>()'] * count)}, {rest});"


def _cast(to: str, source: str) -> str:
    return f"Cast(LocalTensor<{to}>(), LocalTensor<{source}>(), RoundMode::CAST_NONE, 1);"


SUPPORTED = (
    _operands("Add", "half", 3),
    _operands("Mul", "float", 3),
    _operands("Div", "float", 3),
    _operands("Exp", "half", 2),
    _cast("half", "int8_t"),
    _operands("Duplicate", "int16_t", 1, "int16_t(1), 1"),
)
UNSUPPORTED = (
    _operands("Add", "bfloat16_t", 3),
    _operands("Mul", "int8_t", 3),
    _operands("Div", "int32_t", 3),
    _operands("Exp", "int32_t", 2),
    _cast("float", "int8_t"),
    _operands("Duplicate", "int8_t", 1, "int8_t(1), 1"),
)


def _compile(statements: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    body = "\n".join(statements)
    source = f'#include "kernel_operator.h"\nusing namespace AscendC;\nvoid kernel() {{\n{body}\n}}\n'
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'emulator' / 'include'}", "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True)


def test_unsupported_types_do_not_compile() -> None:
    assert _compile(SUPPORTED).returncode == 0
    refused = _compile(UNSUPPORTED)
    assert refused.returncode != 0
    first_line = 4
    for number, statement in enumerate(UNSUPPORTED):
        assert f"<stdin>:{first_line + number}:" in refused.stderr, statement
    assert refused.stderr.count("static assertion failed") == len(UNSUPPORTED)
