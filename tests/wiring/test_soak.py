"""20,000 requests with aborts, a tiny pool and forced preemption: nothing leaks, nothing hangs, everything is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import Request, RequestInput

from tests.wiring.synthetic import EOS, VOCAB, continuation

Build = Callable[..., Path]


def soak(llm: LLM, count: int, rng: random.Random) -> list[float]:
    """Runs `count` requests, at most 40 at once; returns the resident memory, sampled 40 times."""
    stems = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(30)]
    live: dict[str, tuple[Request, list[int]]] = {}
    memory: list[float] = []
    added = checked = aborted = 0
    while added < count or live:
        while added < count and len(live) < 40:
            prompt = rng.choice(stems)[: rng.randint(1, 12)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
            params = SamplingParams(temperature=0, max_tokens=rng.choice([1, 2, 5, 9, 40]))
            source = RequestInput(request_id=str(added), prompt_token_ids=prompt or [1], params=params)
            request = llm.engine.add(source)
            assert isinstance(request, Request)
            live[str(added)] = request, prompt or [1]
            added += 1
            if added % (count // 40) == 0:
                memory.append(psutil.Process().memory_info().rss)
        if rng.random() < 0.05:
            aborted += llm.engine.abort(rng.choice(list(live))) is not None
        if rng.random() < 0.02 and llm.engine.scheduler.running:
            llm.engine.scheduler.preempt(rng.choice(llm.engine.scheduler.running))
        llm.engine.step()
        for name in [name for name, (request, _) in live.items() if request.is_finished]:
            request, prompt = live.pop(name)
            output = request.output().outputs[0]
            if int(name) % (count // 200) == 0:
                expected = continuation(prompt, 40, eos=EOS)[: len(output.token_ids)]
                assert list(output.token_ids) == expected
                checked += 1
    assert checked >= 200
    assert aborted > count // 1000
    return memory


@pytest.mark.slow
def test_soak(synthetic_model: Build) -> None:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 24}
    with LLM(synthetic_model(), num_blocks=48, num_threads=1, **settings) as llm:
        memory = soak(llm, 20_000, random.Random(1))
        half = memory[len(memory) // 2 :]
        assert max(half) <= 1.02 * min(half)
        llm.engine.check()
        scheduler = llm.engine.scheduler
        assert scheduler.counters.preemptions > 200
        assert not scheduler.has_work
        assert all(pool.num_owned == 0 for pool in scheduler.cache.pools)
        assert len(scheduler.cache.index) <= 48 * 16
