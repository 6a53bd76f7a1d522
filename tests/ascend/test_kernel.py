"""The unmodified Ascend kernel, run under the emulator, against the float64 reference."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ascend_calls import half_call
from pagegraft.custom_ops.ascend.backend import AscendEmulatorBackend
from pagegraft.custom_ops.ascend.build import build_library
from pagegraft.custom_ops.ascend.emulation import Device, NotClaimedError, paged_attention
from pagegraft.custom_ops.conformance.backends import unclaimed
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.conformance.cases import Case, all_cases
from pagegraft.custom_ops.conformance.check import check_outputs
from pagegraft.custom_ops.conformance.run import run_cases
from pagegraft.custom_ops.reference import paged_attention as reference


def _claimed() -> list[Case]:
    capabilities = AscendEmulatorBackend().capabilities()
    compare = [c for c in all_cases() if c.kind == "compare"]
    return [c for c in compare if unclaimed(capabilities, c.call(), c.features) is None]


CASES = _claimed()


def _check(call: Call, device: Device | None = None) -> None:
    outputs, counters = paged_attention(call.feeds, call.parsed(), device)
    check_outputs(call, outputs, reference)
    assert counters.ub_peak_bytes == counters.ub_used_bytes <= 192 * 1024


@pytest.mark.parametrize(
    ("group", "least"),
    [
        ("core", 100),
        ("masks", 80),
        ("layout", 60),
        ("quantised", 30),
        ("negative", 20),
        pytest.param("stress", 25, marks=pytest.mark.slow),
    ],
)
def test_conformance_group(group: str, least: int) -> None:
    """The suite's own runner: comparisons, chunked prefills, batches, bad ids, block ids beyond 2^31 bytes."""
    results = run_cases(AscendEmulatorBackend(), [c for c in all_cases() if c.group == group])
    assert [(r.id, r.detail) for r in results if r.status not in ("passed", "not claimed")] == []
    assert sum(r.status == "passed" for r in results) >= least


FLOAT_CASES = [c for c in CASES if c.setup.compute == "float32"]


def _as_devices_run_it(case: Case) -> Case:
    """The suite's cases are mostly float32: the same call in float16 or bfloat16, with blocks of 16 at least."""
    setup = replace(
        case.setup,
        compute="bfloat16" if case.seed % 4 == 0 else "float16",
        cache=case.setup.cache if case.setup.cache == "int8" else "",
        block_size=max(16, case.setup.block_size) if not case.setup.unmapped else case.setup.block_size,
    )
    return replace(case, setup=setup)


@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda c: c.id)
def test_conformance_case_in_16_bit_types(case: Case) -> None:
    _check(_as_devices_run_it(case).call(), Device(vector_cores=5, min_split_tokens=128))


@pytest.mark.parametrize("case", [c for c in FLOAT_CASES if c.setup.cache != "int8"], ids=lambda c: c.id)
def test_conformance_case_on_cube_and_vector_cores(case: Case) -> None:
    _check(_as_devices_run_it(case).call(), Device(vector_cores=4, cube=True))


@pytest.mark.parametrize(
    "setup",
    [
        {"new": (100, 1, 3), "past": (30, 200, 7), "head_size": 64, "query_heads": 8},
        {"new": (5, 1), "past": (100, 90), "sink": True, "head_size": 128, "value_head_size": 96},
        {"new": (9,), "past": (300,), "head_size": 256, "query_heads": 16, "kv_heads": 2},
        {"new": (3,), "past": (70,), "query_heads": 71, "kv_heads": 1, "compute": "bfloat16"},
        {"new": (9,), "past": (50,), "packed": True, "attributes": {"alibi_slopes": [0.5, 0.2, 0.1, 0.3]}},
    ],
)
def test_cube_path(setup: dict[str, Any]) -> None:
    _check(half_call(**setup), Device(vector_cores=6, cube=True))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("clang++") is None, reason="clang++ is not installed: the kernel ran as g++ compiled it"
)
@pytest.mark.parametrize("cube", [False, True])
def test_as_clang_compiles_it(cube: bool) -> None:
    library = build_library("clang++")
    call = half_call(new=(1, 30, 3), past=(300, 20, 0), head_size=64, query_heads=8, sink=True)
    outputs, _ = paged_attention(call.feeds, call.parsed(), Device(cube=cube), library=library)
    check_outputs(call, outputs, reference)


def test_cube_path_refuses_what_it_lacks() -> None:
    call = half_call(cache="int8", k_quant="PER_TENSOR")
    with pytest.raises(NotClaimedError, match="cube path"):
        paged_attention(call.feeds, call.parsed(), Device(cube=True))


@pytest.mark.parametrize("head_size", range(16, 257, 16))
@pytest.mark.parametrize("cache", ["float16", "int8"])
def test_every_head_size(head_size: int, cache: str) -> None:
    quant = "PER_CHANNEL" if cache == "int8" else "NONE"
    _check(half_call(head_size, head_size=head_size, cache=cache, k_quant=quant, new=(1, 5), past=(150, 3)))


@pytest.mark.parametrize("group", [1, 2, 3, 7, 16, 33, 71])
def test_query_heads_share_tiles_in_groups_of_any_size(group: int) -> None:
    _check(half_call(group, query_heads=2 * group, kv_heads=2, new=(1, 3), past=(70, 0), sink=True))


@pytest.mark.parametrize("cores", [1, 2, 7, 48])
def test_any_number_of_cores(cores: int) -> None:
    call = half_call(new=(1, 9, 0, 33), past=(900, 65, 5, 0), attributes={"softcap": 3.0})
    _check(call, Device(vector_cores=cores, min_split_tokens=64))


def test_splits_of_a_long_context_are_merged() -> None:
    call = half_call(new=(1,), past=(4000,), head_size=64, query_heads=8)
    outputs, counters = paged_attention(call.feeds, call.parsed(), Device(vector_cores=24))
    check_outputs(call, outputs, reference)
    assert counters.workspace_bytes > 0
    assert counters.cores == 24


def test_impossible_ids_and_slots_count_as_unmapped() -> None:
    call = half_call(new=(1, 2), past=(60, 40), slots="explicit")
    masked = call.copy()
    for bad, (row, column) in zip((-7, 10**6), ((0, 1), (1, 2)), strict=True):
        call.feeds["block_table"][row, column] = bad
        masked.feeds["block_table"][row, column] = -1
    call.feeds["slot_mapping"][0], masked.feeds["slot_mapping"][0] = 2**30, -1
    outputs, _ = paged_attention(call.feeds, call.parsed())
    check_outputs(masked, outputs, reference)


@pytest.mark.parametrize("past", [-3, 2**30])
def test_a_sequence_with_impossible_lengths_harms_nobody(past: int) -> None:
    call = half_call(new=(2, 3), past=(60, 40))
    want = reference(call.feeds, call.parsed())["output"]
    call.feeds["past_seqlens"][0] = past
    outputs, _ = paged_attention(call.feeds, call.parsed())
    assert np.all(outputs["output"][:2] == 0)
    np.testing.assert_allclose(outputs["output"][2:].astype(float), want[2:].astype(float), atol=2e-3)


@pytest.mark.parametrize("cumulative", [(0, 5, 2), (0, -4, 5), (0, 99, 5), (5, 5, 5)])
def test_malformed_cumulative_lengths_stay_inside_the_tensors(cumulative: tuple[int, ...]) -> None:
    call = half_call(new=(2, 3), past=(20, 10))
    call.feeds["cumulative_sequence_length"][:] = cumulative
    paged_attention(call.feeds, call.parsed())


@pytest.mark.parametrize(
    ("setup", "word"),
    [
        ({"head_size": 24}, "head_size"),
        ({"head_size": 272}, "head_size"),
        ({"rotary_dim": 16}, "do_rotary"),
        ({"norm": True}, "norm"),
        ({"kv_heads": 1, "latent_value_size": 16}, "LATENT"),
        ({"cache": "float8e4m3fn", "k_quant": "PER_TENSOR"}, "int8"),
        ({"cache": "int8", "k_quant": "PER_TOKEN"}, "PER_TENSOR or PER_CHANNEL"),
        ({"cache": "float32"}, "query's type or int8"),
    ],
)
def test_what_the_tiling_refuses(setup: dict[str, object], word: str) -> None:
    call = half_call(**setup)
    with pytest.raises(NotClaimedError, match=word):
        paged_attention(call.feeds, call.parsed())


def test_the_feeds_are_left_alone() -> None:
    call = half_call()
    before = call.copy()
    paged_attention(call.feeds, call.parsed())
    for name, array in call.feeds.items():
        np.testing.assert_array_equal(array, before.feeds[name])
