"""Property: over everything the contract can say, the CPU op agrees with the float64 reference.

A failing example shrinks to a setup and is printed as the source of a conformance case.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from pagegraft.custom_ops.conformance.call import Setup, build
from pagegraft.custom_ops.conformance.check import check_outputs
from pagegraft.custom_ops.conformance.cpu_backend import CpuBackend
from pagegraft.custom_ops.reference import paged_attention
from setups import as_case, setups

_CALM = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "database": None}


@cache
def _cpu(threads: int) -> CpuBackend:
    return CpuBackend(threads=threads)


def _agrees(setup: Setup, seed: int) -> None:
    note(f"add it as: {as_case(setup)}  # with data of seed {seed}")
    call = build(setup, seed)
    private = call.copy()
    outputs = _cpu(1).run(private.feeds, private.attributes)
    check_outputs(call, outputs, paged_attention)


@settings(max_examples=50, derandomize=True, **_CALM)
@given(setups(), st.integers(0, 2**32 - 1))
def test_cpu_op_agrees_with_the_reference(setup: Setup, seed: int) -> None:
    _agrees(setup, seed)


@pytest.mark.slow
@settings(max_examples=2000, derandomize=True, **_CALM)
@given(setups(), st.integers(0, 2**32 - 1))
def test_cpu_op_agrees_with_the_reference_2000(setup: Setup, seed: int) -> None:
    _agrees(setup, seed)


@settings(max_examples=15, derandomize=True, **_CALM)
@given(setups(), st.integers(0, 2**32 - 1), st.sampled_from((2, 3, 5)))
def test_results_do_not_depend_on_threads(setup: Setup, seed: int, threads: int) -> None:
    """Bitwise, caches included."""
    note(as_case(setup))
    results = []
    for count in (1, threads):
        call = build(setup, seed)
        outputs = _cpu(count).run(call.feeds, call.attributes)
        results.append({name: array.tobytes() for name, array in outputs.items()})
    assert results[0] == results[1]
