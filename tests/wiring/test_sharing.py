"""What sharing saves, in tokens and steps: bursts of requests with one prefix, cold and warm; a long context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import Request, RequestInput

from tests.wiring.synthetic import VOCAB, continuation

Build = Callable[..., Path]
PREFIX = [(7 * i * i + 3) % VOCAB for i in range(512)]


def submit(llm: LLM, name: str, prompt: list[int], count: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    request = llm.engine.add(RequestInput(request_id=name, prompt_token_ids=prompt, params=params))
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("budget", [64, 512, 2048])
def test_sixteen_requests_compute_their_prefix_once_though_they_arrive_together(
    synthetic_model: Build, budget: int
) -> None:
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 16, "block_size": 16}
    with LLM(synthetic_model(), num_blocks=400, **settings) as llm:
        requests = [submit(llm, str(i), [*PREFIX, i, i + 1, i + 2], 4) for i in range(16)]
        while llm.engine.has_work:
            llm.engine.step()
        assert llm.engine.scheduler.counters.computed_tokens == 512 + 16 * (3 + 3)
        assert [r.output().num_cached_tokens for r in requests] == [0] + [512] * 15
        for i, request in enumerate(requests):
            assert list(request.output().outputs[0].token_ids) == continuation([*PREFIX, i, i + 1, i + 2], 4)


def test_512_requests_behind_a_shared_prefix_start_as_soon_as_there_is_room(synthetic_model: Build) -> None:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 64, "block_size": 16}
    with LLM(synthetic_model(), num_blocks=400, **settings) as llm:
        first = submit(llm, "first", [*PREFIX, 1], 2)
        steps_of_first = 0
        while first.first_token_time is None:
            llm.engine.step()
            steps_of_first += 1
        assert steps_of_first == 9
        others = [submit(llm, str(i), [*PREFIX, i % VOCAB], 1) for i in range(511)]
        steps = 0
        while llm.engine.has_work:
            llm.engine.step()
            steps += 1
        # One token each: as many as rows a step, so each waits for its turn and for nothing else.
        assert steps <= 511 // 63 + 2
        for i in (0, 100, 510):
            expected = continuation([*PREFIX, i % VOCAB], 1)
            assert list(others[i].output().outputs[0].token_ids) == expected


def test_a_conversation_finds_its_earlier_turns(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=64, debug=True) as llm:
        tokens = list(range(10))
        for _ in range(4):
            cached = len(tokens) - 3 if len(tokens) > 10 else 0
            request = submit(llm, "turn", tokens, 9)
            while llm.engine.has_work:
                llm.engine.step()
            output = request.output()
            # The last output token was sampled and never computed; a block that is not full is not found.
            assert output.num_cached_tokens == max(0, (cached - 1) // 4 * 4)
            tokens = [*tokens, *output.outputs[0].token_ids, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None,), (None, 64)], ids=str)
def test_a_long_context_beside_short_requests(synthetic_model: Build, windows: tuple[int | None, ...]) -> None:
    length, budget = 16_384, 256
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 8, "block_size": 16}
    with LLM(synthetic_model(*windows, max_positions=20_000), num_blocks=1100, **settings) as llm:
        prompt = [(5 * i + i // 7) % VOCAB for i in range(length)]
        long = submit(llm, "long", prompt, 3)
        streaming = submit(llm, "streaming", [1, 2, 3], 40)
        llm.engine.step()
        late = [submit(llm, f"late{i}", [i] * 20, 10) for i in range(5)]
        for step in range(40):
            before = streaming.choices[0].sampling.num_output_tokens
            llm.engine.step()
            after = streaming.choices[0].sampling.num_output_tokens
            assert streaming.is_finished or step < 1 or after == before + 1
        assert streaming.is_finished
        assert all(request.is_finished for request in late)
        assert not long.is_finished
        while llm.engine.has_work:
            llm.engine.step()
            for group, blocks in zip(
                llm.engine.scheduler.cache.groups, long.choices[0].sequence.blocks or (), strict=False
            ):
                held = sum(block >= 0 for block in blocks)
                assert held <= (-(-(length + 3) // 16) if group.window is None else -(-(63 + budget) // 16) + 1)
        assert list(long.output().outputs[0].token_ids) == continuation(prompt, 3, windows)
