"""The tiling over the whole grid that the kernel claims: it always fits, and bounds what the kernel may ask for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from pagegraft.custom_ops.ascend.emulation import Device, tiling_of

UB_BYTES = 192 * 1024
HEAD_SIZES = range(16, 257, 16)


def _problem(**fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "numTokens": 8, "numSeqs": 8, "numBlocks": 1024, "blockSize": 16, "tableWidth": 128, "numHeads": 8,
        "kvHeads": 2, "headSize": 128, "vHeadSize": 128, "inputBytes": 2, "cacheBytes": 2, "isCausal": 1,
        "windowSize": -1,
    }  # fmt: skip
    base.update(fields)
    if base["cacheBytes"] == 1:
        base.update(keyQuant=1, valueQuant=2)
    return base


def test_unified_buffer_suffices_for_every_claimed_shape() -> None:
    groups = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 64, 71)
    largest = 0
    for key, value, group, (inputs, cache) in product(HEAD_SIZES, HEAD_SIZES, groups, ((2, 2), (2, 1), (4, 4), (4, 1))):
        shape = {"headSize": key, "vHeadSize": value, "numHeads": group, "kvHeads": 1}
        tiling = tiling_of(_problem(**shape, inputBytes=inputs, cacheBytes=cache))
        assert not tiling.refusal, (shape, tiling)
        largest = max(largest, tiling.ub_used_bytes)
    assert 160 * 1024 < largest <= UB_BYTES


def test_a_smaller_buffer_is_refused_instead_of_overrun() -> None:
    assert "unified buffer" in tiling_of(_problem(), Device(ub_bytes=64 * 1024)).refusal


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"headSize": 8}, "head_size"),
        ({"vHeadSize": 300}, "v_head_size"),
        ({"numHeads": 7}, "divide"),
        ({"alibiCount": 3}, "alibi_slopes"),
        ({"numHeads": 130, "alibiCount": 130}, "128 heads"),
        ({"blockSize": 48}, "block_size"),
        ({"blockSize": 1024}, "block_size"),
        ({"numBlocks": 2**28}, "31 bits"),
        ({"tableWidth": 2**28}, "31 bits"),
        ({"cacheBytes": 4}, "query's type"),
        ({"keyQuant": 1}, "int8"),
        ({"numHeads": 8192, "kvHeads": 8192}, "1048560"),
    ],
)
def test_refusals_name_what_is_wrong(fields: dict[str, int], word: str) -> None:
    assert word in tiling_of(_problem(**fields)).refusal


def test_few_sequences_are_split_over_the_cores_and_many_are_not() -> None:
    device = Device(vector_cores=48)
    few = tiling_of(_problem(numTokens=1, numSeqs=1), device)
    many = tiling_of(_problem(numTokens=256, numSeqs=256), device)
    assert few.workspace_bytes > 0
    assert many.workspace_bytes == 0
    # Bounded by two units a core, whatever the context: 2 * 48 partial results (and at most one more round of units).
    assert few.workspace_bytes <= 4 * 48 * (32 * 128 + 64) * 4
