"""The pool's three states, its errors, and the order of eviction."""

from __future__ import annotations

import pytest
from pagegraft.runtime.engine.block_pool import BlockAccountingError, BlockPool


def make(num_blocks: int = 3) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    pool, _ = make()
    block = pool.allocate()
    pool.release(block)
    before = (pool.free_blocks(), pool.cached_blocks(), pool.ref_counts())
    with pytest.raises(BlockAccountingError, match="no reference"):
        pool.release(block)
    assert before == (pool.free_blocks(), pool.cached_blocks(), pool.ref_counts())


def test_a_free_block_cannot_be_acquired() -> None:
    pool, _ = make()
    with pytest.raises(BlockAccountingError, match="is free"):
        pool.acquire(0)


def test_an_unowned_block_cannot_become_findable() -> None:
    pool, _ = make()
    with pytest.raises(BlockAccountingError, match="no owner"):
        pool.set_findable(1)


def test_allocating_from_a_pool_that_is_all_owned_fails() -> None:
    pool, _ = make(1)
    pool.allocate()
    with pytest.raises(BlockAccountingError, match="all 1 blocks"):
        pool.allocate()


def test_findable_blocks_stay_cached_and_are_evicted_least_recently_used_first() -> None:
    pool, evicted = make(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.set_findable(block)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.acquire(blocks[1])  # used again: now the most recent
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]
    assert evicted == [blocks[0], blocks[2], blocks[1]]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool, evicted = make(2)
    cached, other = pool.allocate(), pool.allocate()
    pool.set_findable(cached)
    pool.release(cached)
    pool.release(other)
    assert pool.allocate() == other
    assert evicted == []


def test_a_shared_block_is_held_until_the_last_release() -> None:
    pool, _ = make()
    block = pool.allocate()
    pool.acquire(block)
    pool.release(block)
    assert pool.num_owned == 1
    pool.release(block)
    assert pool.num_owned == 0
    assert pool.num_available == 3


def test_a_forgotten_cached_block_is_free() -> None:
    pool, evicted = make()
    block = pool.allocate()
    pool.set_findable(block)
    pool.release(block)
    pool.forget(block)
    assert block in pool.free_blocks()
    assert pool.num_cached == 0
    assert evicted == []
