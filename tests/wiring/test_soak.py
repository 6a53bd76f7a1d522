"""20,000 requests with aborts, a tiny pool and forced preemption: nothing leaks, nothing hangs, everything is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import Request, RequestInput

from tests.wiring.synthetic import EOS, VOCAB, continuation

Build = Callable[..., Path]
#: In steps. Three of the longest requests fit into the pool at once, and 40 of them take 41 steps each.
LONGEST_LIFE = 600


@dataclass
class Counts:
    """What a soak did. Resident memory in bytes, sampled 40 times."""

    memory: list[float] = field(default_factory=list)
    aborted: int = 0
    compared: int = 0


def a_request(rng: random.Random, stems: list[list[int]]) -> tuple[list[int], int]:
    """A prompt that begins like others, and how many tokens are wanted."""
    prompt = rng.choice(stems)[: rng.randint(1, 12)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
    return prompt, rng.choice([1, 2, 5, 9, 40])


def soak(llm: LLM, count: int, rng: random.Random) -> Counts:
    """Runs `count` requests, at most 40 at once, and compares every 50th that was not aborted with the oracle."""
    stems = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(30)]
    live: dict[str, tuple[Request, int]] = {}  # with the step in which it came
    counts = Counts()
    added = step = whole = 0
    while added < count or live:
        while added < count and len(live) < 40:
            prompt, wanted = a_request(rng, stems)
            params = SamplingParams(temperature=0, max_tokens=wanted)
            request = llm.engine.add(RequestInput(request_id=str(added), prompt_token_ids=prompt, params=params))
            assert isinstance(request, Request)
            live[str(added)] = request, step
            added += 1
            if added % (count // 40) == 0:
                counts.memory.append(psutil.Process().memory_info().rss)
        if rng.random() < 0.05:
            counts.aborted += llm.engine.abort(rng.choice(list(live))) is not None
        if rng.random() < 0.02 and llm.engine.scheduler.running:
            llm.engine.scheduler.preempt(rng.choice(llm.engine.scheduler.running))
        llm.engine.step()
        step += 1
        for name in [name for name, (request, _) in live.items() if request.is_finished]:
            request, _ = live.pop(name)
            output = request.output().outputs[0]
            if output.finish_reason == "abort":
                continue
            whole += 1
            if whole % 50 == 0:
                expected = continuation(list(request.source.prompt_token_ids), request.params.max_tokens or 0, eos=EOS)
                assert list(output.token_ids) == expected
                assert output.finish_reason == ("stop" if expected[-1] == EOS else "length")
                counts.compared += 1
        assert all(step - since <= LONGEST_LIFE for _, since in live.values()), "a request is stuck"
    return counts


@pytest.mark.slow
def test_soak(synthetic_model: Build) -> None:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 24}
    with LLM(synthetic_model(), num_blocks=48, num_threads=1, **settings) as llm:
        counts = soak(llm, 20_000, random.Random(1))
        half = counts.memory[len(counts.memory) // 2 :]
        assert len(half) == 20
        assert max(half) <= 1.02 * min(half)
        assert counts.compared >= 200
        assert counts.aborted > 200
        llm.engine.check()
        scheduler = llm.engine.scheduler
        assert scheduler.counters.preemptions > 200
        assert not scheduler.has_work
        assert all(pool.num_owned == 0 for pool in scheduler.cache.pools)
        assert len(scheduler.cache.index) <= 48 * 16
