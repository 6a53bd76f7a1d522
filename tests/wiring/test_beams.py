"""Beam search through the engine against a plain beam search over the oracle's distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pagegraft.runtime import LLM, BeamSearchParams, SamplingParams
from pagegraft.runtime.sampling.beam import BeamSearch
from pagegraft.runtime.sampling.errors import SamplingParamsError

from tests.wiring.synthetic import EOS, continuation, next_logits

Build = Callable[..., Path]
Beam = tuple[float, list[int]]


def logprobs_after(tokens: list[int]) -> np.ndarray:
    logits = next_logits(tokens)
    return logits - np.log(np.exp(logits).sum())


def plain_beam_search(prompt: list[int], width: int, count: int, *, ends: set[int], penalty: float) -> list[Beam]:
    """All continuations of all beams ranked at each step; those that end leave, scored by mean log-probability."""
    live: list[Beam] = [(0.0, [])]
    finished: list[Beam] = []
    for step in range(count):
        ranked = sorted(
            ((total + p, [*ids, token]) for total, ids in live for token, p in enumerate(logprobs_after(prompt + ids))),
            key=lambda beam: -beam[0],
        )
        finished += [beam for beam in ranked[:width] if beam[1][-1] in ends]
        live = [beam for beam in ranked if beam[1][-1] not in ends][:width]
        if step == count - 1:
            finished += live
    return sorted(finished, key=lambda beam: -beam[0] / len(beam[1]) ** penalty)


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(200, 8), (10, 8), (10, 3), (200, 1)])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_are_those_of_a_plain_search(
    synthetic_model: Build, num_blocks: int, max_num_seqs: int, caching: bool, penalty: float
) -> None:
    settings = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8, "enable_prefix_caching": caching}
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7], [EOS] * 4]
    params = BeamSearchParams(beam_width=3, n=3, max_tokens=9, length_penalty=penalty)
    with LLM(synthetic_model(), num_blocks=num_blocks, debug=True, **settings) as llm:
        items = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate([*items, {"prompt_token_ids": [4]}], [params] * 3 + [SamplingParams(temperature=0)])
        for prompt, output in zip(prompts, outputs[:3], strict=True):
            expected = plain_beam_search(prompt, 3, 9, ends={EOS}, penalty=penalty)[:3]
            assert [list(c.token_ids) for c in output.outputs] == [ids for _, ids in expected]
            for choice, (total, _) in zip(output.outputs, expected, strict=True):
                assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert list(outputs[3].outputs[0].token_ids) == continuation([4], 16, eos=EOS)
        assert all(pool.num_owned == 0 for pool in llm.engine.scheduler.cache.pools)
        if num_blocks == 10:
            assert llm.engine.scheduler.counters.preemptions > 0


def test_beams_share_the_blocks_of_their_prompt(synthetic_model: Build) -> None:
    params = BeamSearchParams(beam_width=4, n=1, max_tokens=4, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=64, enable_prefix_caching=False, debug=True) as llm:
        most = 0
        for _ in llm._submit({"prompt_token_ids": list(range(40))}, params):
            while llm.engine.has_work:
                llm.engine.step()
                most = max(most, llm.engine.scheduler.cache.pools[0].num_owned)
        assert 10 < most <= 10 + 4


@pytest.mark.parametrize("steps", range(12))
def test_a_search_can_be_ended_at_any_step(synthetic_model: Build, steps: int) -> None:
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=9, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=9, max_num_seqs=3, max_num_batched_tokens=8, debug=True) as llm:
        request = llm._submit({"prompt_token_ids": [1] * 7}, params)[0]
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort(request.request_id)
        assert not llm.engine.has_work
        assert not llm.engine.scheduler.has_work
        llm.engine.check()
        assert llm.engine.scheduler.cache.pools[0].num_owned == 0


def test_a_search_that_fails_says_so_though_it_has_found_some(synthetic_model: Build) -> None:
    prompt = [1] * 7
    params = BeamSearchParams(beam_width=2, max_tokens=9, stop_token_ids=continuation(prompt, 1))
    with LLM(synthetic_model(), num_blocks=20, debug=True) as llm:
        aborted, failed = llm._submit([{"prompt_token_ids": prompt}] * 2, params)
        llm.engine.step()
        llm.engine.step()
        llm.engine.abort(aborted.request_id)
        llm.engine.abort(failed.request_id, "error", "the model failed")
        assert [list(c.token_ids) for c in aborted.output().outputs] == [continuation(prompt, 1)]
        assert [(c.finish_reason, c.error) for c in failed.output().outputs] == [("error", "the model failed")]


def test_beams_that_are_dropped_make_room_for_those_that_fork(synthetic_model: Build) -> None:
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=12, ignore_eos=True)
    computed = []
    for rows in (4, 8):
        with LLM(synthetic_model(), num_blocks=100, max_num_seqs=rows, debug=True) as llm:
            llm.generate([{"prompt_token_ids": list(range(5, 45))}], params)
            computed.append(llm.engine.scheduler.counters.computed_tokens)
    assert computed[0] == computed[1]


@pytest.mark.parametrize("penalty", [1e308, -1e308, 10.5, float("nan")])
def test_length_penalties_without_finite_scores_are_refused(penalty: float) -> None:
    with pytest.raises(SamplingParamsError, match="length_penalty"):
        BeamSearchParams(length_penalty=penalty)


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_scores_are_finite_up_to_the_longest_context(penalty: float) -> None:
    params = BeamSearchParams(length_penalty=penalty, max_tokens=1 << 20)
    search = BeamSearch(params, eos_token_ids=[0], max_output_tokens=1 << 20)
    search.advance(np.arange(8)[None], np.full((1, 8), -2.0))
    search.advance(np.tile(np.arange(8), (search.num_live, 1)), np.full((search.num_live, 8), -2.0))
    assert all(np.isfinite(found.score) for found in search.best())
