"""Preempting and ending at every step of a run, every order of arrival: tokens, text, log-probabilities and usage are
those of the undisturbed run. Greedy, sampled, with stop strings, with several choices, with penalties."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import RequestInput

from tests.wiring import synthetic

Build = Callable[..., Path]

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7, 8, 9], "b": [1, 2, 3, 4, 5, 6, 7, 8, 2, 2], "c": [5] * 3, "d": [1, 2, 3, 4]}
PARAMS = {
    "a": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    "b": SamplingParams(temperature=1.3, seed=3, max_tokens=14, ignore_eos=True),
    "c": SamplingParams(temperature=0.9, seed=4, top_k=9, top_p=0.9, n=2, max_tokens=9, ignore_eos=True),
    "d": SamplingParams(
        temperature=1.0, seed=9, max_tokens=10, presence_penalty=1.0, repetition_penalty=1.2, min_tokens=4, logprobs=0
    ),
}
SETTINGS: dict[str, Any] = {"num_blocks": 40, "max_num_batched_tokens": 9, "max_num_seqs": 5, "debug": True}


@pytest.fixture(scope="module", params=[(None,), (None, 6)], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With text of one letter or two a token."""
    folder = synthetic.build(tmp_path_factory.mktemp("text"), request.param)
    return synthetic.add_text(folder)


def outcome(requests: dict[str, Any]) -> dict[str, Any]:
    """What callers see of finished requests, but for times."""
    out = {}
    for name, request in requests.items():
        output = request.output()
        out[name] = [
            (
                list(c.token_ids),
                c.text,
                c.finish_reason,
                c.stop_reason,
                [(e.token_id, round(e.logprob, 4)) for e in c.logprobs or ()],
            )
            for c in output.outputs
        ]
    return out


Params = dict[str, SamplingParams]


def run(
    llm: LLM, params: Params, order: str = "abcd", between: Callable[[int], None] = lambda step: None
) -> tuple[dict[str, Any], int]:
    """Runs the requests, added one a step; `between` is called before each step."""
    requests, steps = {}, 0
    left = list(order)
    while left or llm.engine.has_work:
        if left:
            name = left.pop(0)
            source = RequestInput(request_id=name, prompt_token_ids=PROMPTS[name], params=params[name])
            requests[name] = llm.engine.add(source)
        between(steps)
        llm.engine.step()
        steps += 1
    assert all(pool.num_owned == 0 for pool in llm.engine.scheduler.cache.pools)
    return outcome(requests), steps


@pytest.fixture(scope="module")
def params(model: Path) -> Params:
    """The parameters, and for one request a stop string of three characters from the middle of what it would say."""
    with LLM(model, **SETTINGS) as llm:
        text = run(llm, PARAMS, "b")[0]["b"][0][1]
    return {**PARAMS, "b": replace(PARAMS["b"], stop=(text[6:9], "zzzz"))}


@pytest.fixture(scope="module")
def undisturbed(model: Path, params: Params) -> dict[str, Any]:
    """Each request alone, without any sharing."""
    alone: dict[str, Any] = {}
    for name in PROMPTS:
        with LLM(model, **{**SETTINGS, "enable_prefix_caching": False}) as llm:
            alone |= run(llm, params, name)[0]
    assert alone["b"][0][2:4] == ("stop", params["b"].stop[0])
    return alone


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("abcd")])
def test_every_order_of_arrival(model: Path, params: Params, undisturbed: dict[str, Any], order: str) -> None:
    with LLM(model, **SETTINGS) as llm:
        assert run(llm, params, order)[0] == undisturbed


@pytest.mark.parametrize("num_blocks", [6, 8, 11])
def test_pools_so_small_that_the_engine_preempts_by_itself(
    model: Path, params: Params, undisturbed: dict[str, Any], num_blocks: int
) -> None:
    with LLM(model, **{**SETTINGS, "num_blocks": num_blocks}) as llm:
        assert run(llm, params)[0] == undisturbed
        assert llm.engine.scheduler.counters.preemptions > 0


def preempting(llm: LLM, at: int, victims: str) -> Callable[[int], None]:
    """Preempts what runs of some requests before one step."""

    def preempt(step: int) -> None:
        if step == at:
            for sequence in list(llm.engine.scheduler.running):
                if sequence.request_id in victims:
                    llm.engine.scheduler.preempt(sequence)

    return preempt


@pytest.mark.parametrize("victims", ["abcd", *(pytest.param(v, marks=pytest.mark.slow) for v in "abcd")])
def test_preempting_at_every_step(model: Path, params: Params, undisturbed: dict[str, Any], victims: str) -> None:
    with LLM(model, **SETTINGS) as llm:
        _, steps = run(llm, params)
        for at in range(1, steps):
            assert run(llm, params, between=preempting(llm, at, victims))[0] == undisturbed
        counters = llm.engine.scheduler.counters
        assert counters.preemptions >= (steps if victims == "abcd" else 5)
        assert counters.prefix_hits <= counters.prefix_queries


def test_ending_each_request_at_every_step(model: Path, params: Params, undisturbed: dict[str, Any]) -> None:
    with LLM(model, **SETTINGS) as llm:
        _, steps = run(llm, params)
        for at, victim in itertools.product(range(1, steps), "abcd"):

            def end(step: int, at: int = at, victim: str = victim) -> None:
                if step == at:
                    llm.engine.abort(victim)

            result = run(llm, params, between=end)[0]
            for name in set("abcd") - {victim}:
                assert result[name] == undisturbed[name]
            for choice, whole in zip(result[victim], undisturbed[victim], strict=True):
                assert whole[0][: len(choice[0])] == choice[0]
                assert whole[1].startswith(choice[1]) or choice[2] == "abort"


def test_usage_counts_what_the_first_admission_found(model: Path, params: Params) -> None:
    with LLM(model, **SETTINGS) as llm:
        seen: dict[str, Any] = {}

        def watch(step: int) -> None:
            for sequence in list(llm.engine.scheduler.running):
                if step == 6:
                    llm.engine.scheduler.preempt(sequence)
                seen[sequence.request_id] = sequence

        run(llm, params, between=watch)
        assert {name: s.num_cached_tokens for name, s in seen.items()} == {"a": 0, "b": 8, "c": 0, "d": 0}
