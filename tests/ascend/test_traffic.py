"""Bytes that the kernel moves, counted by the emulator, against the least that the step needs."""

from __future__ import annotations

import pytest
from ascend_calls import half_call
from pagegraft.custom_ops.ascend.emulation import Counters, Device, paged_attention
from pagegraft.custom_ops.ascend.roofline import ATLAS_A2, estimate
from pagegraft.custom_ops.conformance.check import check_outputs
from pagegraft.custom_ops.reference import paged_attention as reference


def _counted(*, batch: int, length: int, kv_heads: int, cores: int) -> tuple[Counters, int]:
    """Counters of a decode step (H=32, D=128, float16) and the bytes of reading K and V of all its contexts once."""
    call = half_call(
        new=(1,) * batch,
        past=(length - 1,) * batch,
        query_heads=32,
        kv_heads=kv_heads,
        head_size=128,
        block_size=128,
        slots="explicit",
    )
    outputs, counters = paged_attention(call.feeds, call.parsed(), Device(vector_cores=cores), in_place=True)
    if batch == 1:
        check_outputs(call, outputs, reference)
    return counters, 2 * batch * length * kv_heads * 128 * 2


def test_grouped_heads_read_keys_and_values_once() -> None:
    counters, least = _counted(batch=1, length=2048, kv_heads=4, cores=48)
    assert least <= counters.gm_to_ub_bytes <= 1.05 * least


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [32, 8])
def test_decode_at_2048_positions_reads_keys_and_values_once(kv_heads: int) -> None:
    counters, least = _counted(batch=8, length=2048, kv_heads=kv_heads, cores=48)
    assert least <= counters.gm_to_ub_bytes <= 1.05 * least
    assert counters.ub_to_gm_bytes <= 0.05 * least
    model = estimate(counters)
    assert model.memory_seconds == pytest.approx(least / ATLAS_A2.memory_bandwidth, rel=0.06)
    assert model.seconds == max(model.memory_seconds, model.vector_seconds)
