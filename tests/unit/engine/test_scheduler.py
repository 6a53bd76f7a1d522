"""What a step computes: budget, chunks, fairness, priorities, preemption, admission, sharing, windows."""

from __future__ import annotations

import random

import pytest
from engine_driver import Driver, undisturbed
from pagegraft.runtime.engine.cache_manager import CacheManager, GroupShape
from pagegraft.runtime.engine.errors import ConfigurationError, RequestError
from pagegraft.runtime.engine.positions import blocks_for, window_block_bound
from pagegraft.runtime.engine.prefix_index import chained_digest
from pagegraft.runtime.engine.scheduler import Scheduler
from pagegraft.runtime.engine.sequence import Sequence, SequenceState
from pagegraft.runtime.engine.waiting_queue import WaitingQueue


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    driver = Driver(budget=8)
    driver.add(range(20), 1)
    assert [driver.step().num_tokens for _ in range(3)] == [8, 8, 4]


def test_every_sequence_that_wants_one_token_gets_it_in_every_step_beside_a_long_prompt() -> None:
    driver = Driver(groups=[GroupShape(None, 200)], budget=8, max_sequences=6, share=False)
    short = [driver.add([i], 30) for i in range(3)]
    driver.step()
    long = driver.add([1] * 100, 1)
    for _ in range(15):
        plan = driver.step()
        counts = dict(zip(plan.sequences, plan.counts, strict=True))
        assert all(counts[s] == 1 for s in short)
        assert counts[long] == 5


def test_short_prompts_pass_beside_a_long_one_and_the_long_one_keeps_half() -> None:
    driver = Driver(groups=[GroupShape(None, 400)], budget=16, max_sequences=8, share=False)
    long = driver.add([1] * 600, 1)
    driver.step()
    shorts = [driver.add([2] * 12, 1) for _ in range(6)]
    while any(not s.is_finished for s in shorts):
        before, decoding = long.num_computed, sum(s.num_tokens - s.num_computed == 1 for s in driver.scheduler.running)
        driver.step()
        assert long.num_computed - before >= -(-(16 - decoding) // 2)
        assert driver.scheduler.counters.steps < 20


def test_what_a_long_prompt_leaves_and_nobody_takes_is_its_own() -> None:
    driver = Driver(groups=[GroupShape(None, 30)], budget=16, max_sequences=2, share=False)
    driver.add([1] * 64, 1)
    driver.add([2] * 100, 1)  # cannot be admitted beside the first
    assert driver.step().num_tokens == 16


def test_first_come_first_served() -> None:
    driver = Driver(max_sequences=1)
    order: list[str] = []
    driver.on_finish = lambda s: order.append(s.request_id)
    for i in range(4):
        driver.add([i], 2)
    driver.run()
    assert order == ["0", "1", "2", "3"]


def test_lower_priority_values_run_first_and_displace_running_ones() -> None:
    driver = Driver(max_sequences=1)
    order: list[str] = []
    driver.on_finish = lambda s: order.append(s.request_id)
    driver.add([1], 20, priority=5)
    driver.step()
    driver.add([2], 2, priority=5)
    driver.add([3], 2, priority=-1)
    driver.run()
    assert order == ["2", "0", "1"]


def test_the_victim_is_the_latest_of_the_lowest_priority() -> None:
    driver = Driver(groups=[GroupShape(None, 9)], budget=24, max_sequences=3, share=False)
    first = driver.add([1] * 7, 8)
    low = driver.add([2] * 7, 8, priority=1)
    last = driver.add([3] * 7, 8)
    while not any(s.num_preemptions for s in driver.sequences):
        driver.step()
    assert (first.num_preemptions, low.num_preemptions, last.num_preemptions) == (0, 1, 0)
    driver.run()


def test_the_first_sequence_is_never_preempted_and_every_queue_drains() -> None:
    rng = random.Random(3)
    driver = Driver(groups=[GroupShape(None, 9)], budget=6, max_sequences=5)
    for _ in range(30):
        driver.add([rng.randrange(5) for _ in range(rng.randint(1, 20))], rng.randint(1, 15))
    while driver.scheduler.has_work:
        first = driver.scheduler.running[0] if driver.scheduler.running else None
        before = first.num_preemptions if first else 0
        plan = driver.step()
        if first is not None:
            assert first.num_preemptions == before
            assert first.is_finished or first in plan.sequences
    assert driver.scheduler.counters.preemptions > 0
    driver.check_drained()


@pytest.mark.parametrize("length", [0, 33, 40])
def test_what_can_never_run_is_refused_and_leaves_no_trace(length: int) -> None:
    driver = Driver(groups=[GroupShape(None, 8)])
    with pytest.raises(RequestError):
        driver.add([1] * length, 1 if length != 33 else 2)
    assert not driver.scheduler.has_work
    driver.check()


def test_the_largest_sequence_that_fits_runs() -> None:
    driver = Driver(groups=[GroupShape(None, 8)])
    driver.add([1] * 20, 13)  # 33 tokens, the last of which is never computed
    driver.run()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_num_seqs=9"):
        Driver(max_sequences=9)
    cache = CacheManager([GroupShape(10, 4)], 4, max_chunk=8)
    with pytest.raises(ConfigurationError, match="window of 10"):
        Scheduler(cache, max_step_tokens=8, max_sequences=2)


def test_a_prefix_is_shared_in_the_very_step_that_computes_it() -> None:
    driver = Driver(groups=[GroupShape(None, 64)], budget=64, max_sequences=16)
    prompt = [i % 5 for i in range(17)]
    for i in range(4):
        driver.add([*prompt, i], 1)
    plan = driver.step()
    assert plan.counts == (18, 2, 2, 2)
    assert [s.num_cached_tokens for s in driver.sequences] == [0, 16, 16, 16]
    assert driver.scheduler.counters.prefix_hits == 48


def test_a_prefix_longer_than_the_budget_is_computed_once() -> None:
    driver = Driver(groups=[GroupShape(None, 64)], budget=16, max_sequences=8)
    prompt = [i % 5 for i in range(40)]
    for i in range(8):
        driver.add([*prompt, i, i], 1)
    driver.run()
    assert driver.scheduler.counters.computed_tokens == 42 + 7 * 2


def test_a_whole_prompt_in_the_cache_still_computes_one_token() -> None:
    driver = Driver()
    driver.add([1, 2, 3, 4, 1, 2, 3, 4], 1)
    driver.run()
    again = driver.add([1, 2, 3, 4, 1, 2, 3, 4], 1)
    assert driver.step().counts == (4,)
    assert again.num_cached_tokens == 4


def test_hits_survive_preemption_and_are_counted_once() -> None:
    driver = Driver(groups=[GroupShape(None, 8)], budget=16, max_sequences=2)
    sequence = driver.add(range(12), 8)
    driver.step()
    driver.step()
    driver.scheduler.preempt(sequence)
    computed = driver.scheduler.counters.computed_tokens
    plan = driver.step()
    assert plan.num_tokens == 2  # 12 of 14 tokens were still in the cache
    driver.run()
    counters = driver.scheduler.counters
    assert counters.prefix_hits == 0
    assert counters.prefix_queries == 12
    assert counters.computed_tokens > computed
    assert sequence.num_cached_tokens == 0


def test_salts_and_sharing_switched_off_keep_prefixes_apart() -> None:
    for share, salts in ((True, ("a", "b")), (False, ("", ""))):
        driver = Driver(budget=16, share=share)
        for salt in salts:
            driver.add([1] * 8, 1, cache_salt=salt)
        assert driver.step().counts == (8, 8)


def test_an_evicted_block_is_no_longer_found() -> None:
    driver = Driver(groups=[GroupShape(None, 4)], budget=16)
    driver.add([1] * 8, 1)
    driver.run()
    driver.add([2] * 15, 1)
    driver.run()
    again = driver.add([1] * 8, 1)
    driver.run()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("beside_full", [False, True])
def test_a_windowed_group_stays_within_its_bound(window: int, beside_full: bool) -> None:
    shapes = [GroupShape(window, 12)] + ([GroupShape(None, 64)] if beside_full else [])
    driver = Driver(groups=shapes, budget=6, max_sequences=2)
    driver.add([1, 2, 3, 0] * 20, 30)
    bound = window_block_bound(window, 6, 4)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        for sequence in driver.scheduler.running:
            held = len(sequence.blocks[0]) - sequence.released[0]
            most = max(most, held)
            assert held <= bound
            assert len(sequence.blocks[-1]) == blocks_for(sequence.num_computed, 4) or not beside_full
    assert most >= bound - 1
    driver.check_drained()


def test_a_windowed_hit_needs_only_the_window_and_a_full_group_needs_all() -> None:
    prompt = [i % 5 for i in range(40)]
    windowed = Driver(groups=[GroupShape(6, 16)], budget=8)
    windowed.add(prompt, 1)
    windowed.run()
    # 10 blocks of which a window of 6 keeps few; those behind it are cached while nobody needs them.
    pool = windowed.scheduler.cache.pools[0]
    for _ in range(pool.num_available - 5):
        pool.allocate()  # evicts the least recently used: the beginning of the prompt
    sequence = windowed.add([*prompt, 1], 1)
    hit = windowed.scheduler.cache.lookup(sequence)
    assert len(hit.nodes) == 10
    assert hit.nodes[0].blocks[0] == -1


def test_forks_share_blocks_until_they_write() -> None:
    driver = Driver(groups=[GroupShape(None, 32)], budget=16)
    parent = driver.add([1, 2, 3, 4, 0, 1], 6)
    driver.step(sample=False)
    children = [driver.fork(parent) for _ in range(2)]
    assert driver.scheduler.cache.pools[0].num_owned == 2
    for sequence in (parent, *children):
        driver.sampled(sequence)
    plan = driver.step()
    assert len(plan.copies) == 2  # the last writer keeps the original
    driver.run()
    for sequence in (parent, *children):
        assert sequence.tokens.tolist() == undisturbed([1, 2, 3, 4, 0, 1], 12, sequence.index)


def test_a_fork_without_a_free_row_waits_and_comes_out_the_same() -> None:
    driver = Driver(groups=[GroupShape(None, 32)], budget=16, max_sequences=1)
    parent = driver.add([1, 2, 3], 4)
    driver.step(sample=False)
    child = driver.fork(parent)
    driver.sampled(parent)
    driver.sampled(child)
    driver.run()
    assert child.tokens.tolist() == undisturbed([1, 2, 3], 7, child.index)


def test_a_failed_step_leaves_no_offer_behind() -> None:
    driver = Driver(budget=32)
    driver.add([1] * 9, 2)
    driver.add([1] * 9, 2)
    driver.step(fail=True)
    assert len(driver.scheduler.cache.index) == 0
    assert all(s.state == SequenceState.WAITING for s in driver.sequences)
    driver.run()


@pytest.mark.parametrize("state", ["waiting", "running", "mid-prompt", "preempted", "finished"])
def test_ending_in_every_state_frees_everything(state: str) -> None:
    driver = Driver(budget=8)
    other = driver.add([4] * 6, 3)
    sequence = driver.add([1] * 30, 5)
    if state != "waiting":
        driver.step()
    if state == "running":
        while sequence.num_computed < 30:
            driver.step()
    if state == "preempted":
        driver.scheduler.preempt(sequence)
    if state == "finished":
        driver.scheduler.finish(sequence, "abort")
    driver.scheduler.finish(sequence, "abort")
    driver.check()
    driver.run()
    assert sequence.finish_reason == "abort"
    assert other.finish_reason == "length"


@pytest.mark.parametrize("where", ["lookup", "admit", "grow", "register"])
def test_a_plan_that_cannot_be_made_leaves_the_accounting_whole(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(budget=16)
    cache = driver.scheduler.cache
    driver.add([1] * 9, 6)
    driver.step()
    driver.add([1] * 8 + [2] * 5, 5)
    driver.add([1] * 8 + [3] * 10, 5)

    def fail(*arguments: object) -> None:
        raise MemoryError("no more")

    work = getattr(cache, where)
    calls = iter([work, fail] if where in ("grow", "register") else [fail])
    with monkeypatch.context() as patch:
        patch.setattr(cache, where, lambda *arguments: next(calls, fail)(*arguments))
        with pytest.raises(MemoryError):
            driver.scheduler.schedule()
    driver.check()
    assert len(driver.scheduler.waiting) + len(driver.scheduler.running) == 3
    driver.run()  # checks what every token saw, and that nothing is left


def test_a_sequence_that_does_not_wait_can_be_withdrawn() -> None:
    queue = WaitingQueue()
    first, second = Sequence("a", [1], 2), Sequence("b", [1], 2)
    queue.withdraw(first)
    assert len(queue) == 0
    first.order, second.order = (0, 1, 0), (0, 2, 0)
    queue.push(first)
    queue.push(second)
    queue.take(second)
    assert len(queue) == 1
    queue.push(second)
    for sequence in (first, second):
        assert queue.head() is sequence
        queue.take(sequence)
    assert len(queue) == 0


@pytest.mark.parametrize("window", [None, 8])
def test_looking_again_for_a_waiting_sequences_prefix_hashes_nothing_anew(window: int | None) -> None:
    hashed = 0

    def digest(parent: bytes, tokens: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return chained_digest(parent, tokens)

    driver = Driver(groups=[GroupShape(window, 40)], budget=8, max_sequences=4, digest=digest)
    driver.add([1] * 80, 40)
    while driver.sequences[0].num_computed < 80:
        driver.step()
    waiting = driver.add([1] * 72 + [2] * 80, 2)
    cache = driver.scheduler.cache
    first = cache.lookup(waiting)
    hashed = 0
    assert cache.lookup(waiting) == first
    assert hashed <= 1  # the block behind the hit


def test_a_prefix_found_earlier_is_what_a_fresh_search_finds() -> None:
    """Whatever was evicted, computed anew or computed further between two looks."""
    rng = random.Random(3)
    for groups in ([GroupShape(None, 24)], [GroupShape(None, 24), GroupShape(9, 20)]):
        driver = Driver(groups=groups, budget=8, max_sequences=3)
        cache = driver.scheduler.cache
        lookers = [Sequence(str(i), [i % 2] * 30 + [3] * 9, 50) for i in range(4)]
        found = set()
        for _ in range(300):
            if rng.random() < 0.3:
                driver.add([rng.randrange(2)] * rng.randrange(1, 40) + [3] * rng.randrange(9), rng.randrange(1, 6))
            if driver.scheduler.has_work:
                driver.step()
            for looker in lookers:
                fresh = Sequence("fresh", looker.tokens, 50)
                assert cache.lookup(looker) == cache.lookup(fresh)
                found.add(len(cache.lookup(looker).nodes))
        assert len(found) > 3  # prefixes came and went


def test_those_who_share_what_is_being_computed_are_looked_at_when_it_is_there() -> None:
    """Not in every step between, and without hashing what their writer has hashed."""
    hashed = 0

    def digest(parent: bytes, tokens: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return chained_digest(parent, tokens)

    driver = Driver(groups=[GroupShape(None, 80)], budget=8, max_sequences=6, digest=digest)
    shared = [1, 2, 3] * 20
    writer = driver.add([*shared, 4], 3)
    sharers = [driver.add([*shared, 5, i], 2) for i in range(4)]
    shorter = driver.add([*shared[:22], 6, 6, 6], 2)
    queue = driver.scheduler.waiting
    driver.step()
    assert queue.num_aside == 5
    before = hashed
    while writer.num_computed < 20:
        driver.step()
    assert shorter.num_cached_tokens == 20, "one that shares less goes on earlier"
    while writer.num_computed < 60:
        assert queue.num_aside == 4
        driver.step()
    assert hashed - before < 30, "the writer's own blocks, and the first that differs of each"
    driver.run()
    assert {s.num_cached_tokens for s in sharers} == {60}


@pytest.mark.parametrize("end", ["finish", "preempt", "rollback"])
def test_those_who_stand_aside_go_on_when_their_writer_does_not(end: str) -> None:
    driver = Driver(groups=[GroupShape(None, 80)], budget=8, max_sequences=6)
    writer = driver.add([1, 2, 3] * 20, 3)
    driver.step()
    sharers = [driver.add([1, 2, 3] * 18 + [4, i], 2, priority=i % 2) for i in range(4)]
    aborted = driver.add([1, 2, 3] * 18, 3)
    driver.step()
    scheduler = driver.scheduler
    assert scheduler.waiting.num_aside == 5
    assert len(scheduler.waiting) == 5
    assert scheduler.waiting.in_order()[:2] == [sharers[0], sharers[2]]
    scheduler.finish(aborted, "abort")
    assert scheduler.waiting.num_aside == 4
    if end == "finish":
        scheduler.finish(writer, "abort")
    elif end == "preempt":
        scheduler.preempt(writer)
    else:
        driver.step(fail=True)
    assert scheduler.waiting.num_aside == 0
    driver.run()
    assert all(s.finish_reason == "length" for s in sharers)
