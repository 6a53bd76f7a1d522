"""Speculation changes the number of steps and nothing else: right, wrong and half-right guesses, everywhere."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.engine.sequence import Sequence

from tests.wiring.synthetic import EOS, VOCAB, continuation, next_token

Build = Callable[..., Path]
WINDOWS = [(None,), (None, 6)]
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 14, "max_num_seqs": 4, "debug": True, "block_size": 4}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 2], [5, 5], [9] * 13]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=17, logprobs=2),
    SamplingParams(temperature=1.0, seed=2, max_tokens=19, ignore_eos=True, presence_penalty=0.7, logprobs=0),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=9, min_tokens=3),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[3, 30]),
]


def hostile(windows: tuple[int | None, ...], seed: int, right: float) -> Callable[[Sequence, int], array[int]]:
    """Guesses up to five tokens, each the greedy one with the given probability, else any."""
    rng = random.Random(seed)

    def guess(sequence: Sequence, limit: int) -> array[int]:
        if not sequence.owner.request.forked or sequence.num_tokens == sequence.num_prompt_tokens:
            return array("i")
        tokens = sequence.tokens.tolist()
        for _ in range(min(limit, rng.randint(0, 5))):
            tokens.append(next_token(tokens, windows) if rng.random() < right else rng.randrange(VOCAB))
        return array("i", tokens[sequence.num_tokens :])

    return guess


def run(llm: LLM, between: Callable[[int], None] = lambda step: None) -> tuple[list[Any], int]:
    requests = []
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        requests.append(llm.engine.add(RequestInput(request_id=str(i), prompt_token_ids=prompt, params=params)))
    steps = 0
    while llm.engine.has_work:
        between(steps)
        llm.engine.step()
        steps += 1
    assert all(pool.num_owned == 0 for pool in llm.engine.scheduler.cache.pools)
    return [
        [
            (list(c.token_ids), c.finish_reason, c.stop_reason, [round(e.logprob, 4) for e in c.logprobs or ()])
            for c in request.output().outputs
        ]
        for request in requests
    ], steps


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_blocks", [8, 60])
@pytest.mark.parametrize("caching", [True, False])
def test_guesses_change_nothing(
    synthetic_model: Build, windows: tuple[int | None, ...], right: float, num_blocks: int, caching: bool
) -> None:
    settings = {**SETTINGS, "num_blocks": num_blocks, "enable_prefix_caching": caching}
    with LLM(synthetic_model(*windows), **settings) as llm:
        expected, plain_steps = run(llm)
    with LLM(synthetic_model(*windows), num_speculative_tokens=5, **settings) as llm:
        for seed in range(4):
            llm.engine.scheduler.guess = hostile(windows, seed, right)
            outcome, steps = run(llm)
            assert outcome == expected
            if right == 1.0 and num_blocks == 60:
                assert steps < plain_steps


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_preempting_and_failing_amid_guesses(synthetic_model: Build, windows: tuple[int | None, ...]) -> None:
    settings = {**SETTINGS, "num_blocks": 40, "num_speculative_tokens": 5}
    with LLM(synthetic_model(*windows), **settings) as llm:
        guess = hostile(windows, 1, 0.7)
        llm.engine.scheduler.guess = None
        expected, _ = run(llm)
        for at in range(1, 24, 2):

            def preempt(step: int, at: int = at) -> None:
                llm.engine.scheduler.guess = guess
                if step == at:
                    for sequence in list(llm.engine.scheduler.running):
                        llm.engine.scheduler.preempt(sequence)
                if step == at + 1:  # a plan with guesses that never runs
                    llm.engine.scheduler.rollback(llm.engine.scheduler.schedule())

            assert run(llm, preempt)[0] == expected


def test_a_step_names_a_request_once_whose_choices_were_guessed_for(synthetic_model: Build) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=60, num_speculative_tokens=4, debug=True) as llm:
        llm.engine.scheduler.guess = hostile((None,), 1, 0.9)
        llm._submit({"prompt_token_ids": [4, 8, 15]}, params)
        while llm.engine.has_work:
            assert len(llm.engine.step()) == 1


def test_what_repeats_itself_takes_fewer_steps(synthetic_model: Build) -> None:
    """Once more the same question, with the answer in its context: prompt lookup finds it."""
    prompt = [4, 8, 15, 16, 23, 42]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=60, num_speculative_tokens=4, debug=True) as llm:
        output = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
        assert list(output.token_ids) == continuation(prompt, 20)
        # Only [7, 7, 7, ...] may be said, so every guess from the context is right.
        repeated = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, allowed_token_ids=[EOS])
        before = llm.engine.scheduler.counters.steps
        output = llm.generate({"prompt_token_ids": prompt}, repeated)[0].outputs[0]
        assert list(output.token_ids) == [EOS] * 20
        assert llm.engine.scheduler.counters.steps - before <= 9
