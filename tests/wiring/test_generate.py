"""LLM on the synthetic model: every token is the one that the oracle works out by hand."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagegraft.custom_ops.errors import ManifestError
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime import LLM, BeamSearchParams, EngineConfig, SamplingParams
from pagegraft.runtime.config import Settings
from pagegraft.runtime.engine.errors import ConfigurationError, RequestError, StepError
from pagegraft.runtime.engine.request import Choice, RequestInput
from pagegraft.runtime.model import session
from pagegraft.runtime.model.runner import Feeds
from pagegraft.runtime.model.session import OnnxRunner
from pagegraft.runtime.sampling.beam import BeamSearch
from pagegraft.runtime.sampling.errors import SamplingParamsError

from tests.wiring.synthetic import EOS, VOCAB, continuation, next_logits

Build = Callable[..., Path]
WINDOWS = [(None,), (5,), (None, 6), (3, None, 9)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def ask(llm: LLM, items: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": p} for p in items], params)]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("num_blocks", [24, 400])
@pytest.mark.parametrize("caching", [True, False])
def test_batched_chunked_and_preempted_output_is_the_oracles(
    synthetic_model: Build, windows: tuple[int | None, ...], num_blocks: int, caching: bool
) -> None:
    settings = {"max_num_batched_tokens": 12, "max_num_seqs": 6, "enable_prefix_caching": caching, "debug": True}
    with LLM(synthetic_model(*windows), num_blocks=num_blocks, **settings) as llm:
        items = prompts(16, 7)
        items += [items[0] + [1], items[0] + [2], items[1][:5] + items[2]]
        assert ask(llm, items) == [continuation(p, 24, windows, eos=EOS) for p in items]
        preempted = llm.engine.scheduler.counters.preemptions
        assert bool(preempted) == (num_blocks == 24 and None in windows)
        assert ask(llm, items[:3]) == [continuation(p, 24, windows, eos=EOS) for p in items[:3]]
        assert all(pool.num_owned == 0 for pool in llm.engine.scheduler.cache.pools)


def test_cached_tokens_are_reported(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=64) as llm:
        prompt = {"prompt_token_ids": list(range(18))}
        first = llm.generate(prompt, GREEDY)[0]
        second = llm.generate(prompt, GREEDY)[0]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
        assert list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids)


def test_stream_yields_growing_prefixes_and_leaving_it_aborts(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        seen = [list(o.outputs[0].token_ids) for o in llm.stream({"prompt_token_ids": [1, 2]}, params)]
        expected = continuation([1, 2], 9)
        assert seen == [expected[: i + 1] for i in range(9)]
        stream = llm.stream({"prompt_token_ids": [1, 2]}, params)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert not llm.engine.has_work


def test_choices_share_the_prompt_and_differ_by_their_own_seed(synthetic_model: Build) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=12, ignore_eos=True)
    prompt = {"prompt_token_ids": [3, 1, 4, 1, 5, 9]}
    results = []
    for num_blocks, seqs, caching in ((200, 8, True), (7, 3, True), (7, 8, False), (200, 1, True)):
        settings = {"max_num_seqs": seqs, "max_num_batched_tokens": 8, "enable_prefix_caching": caching, "debug": True}
        with LLM(synthetic_model(), num_blocks=num_blocks, **settings) as llm:
            outputs = llm.generate([prompt, {"prompt_token_ids": [2] * 9}], params)
            results.append([[list(c.token_ids) for c in o.outputs] for o in outputs])
            if num_blocks == 200 and seqs == 8:
                assert llm.engine.scheduler.counters.computed_tokens == 6 + 9 + 8 * 11
    assert all(r == results[0] for r in results)
    assert len({tuple(c) for c in results[0][0]}) == 4
    alone = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=200) as llm:
        assert ask(llm, [[3, 1, 4, 1, 5, 9]], alone)[0] == results[0][0][0]


def test_best_of_returns_the_likeliest_choices(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=200) as llm:
        wide = SamplingParams(temperature=1.0, seed=1, n=6, max_tokens=5, ignore_eos=True, logprobs=0)
        every = llm.generate({"prompt_token_ids": [5, 6]}, wide)[0].outputs
        best = SamplingParams(temperature=1.0, seed=1, n=2, best_of=6, max_tokens=5, ignore_eos=True)
        chosen = llm.generate({"prompt_token_ids": [5, 6]}, best)[0].outputs
        ranked = sorted(every, key=lambda c: c.cumulative_logprob or 0.0, reverse=True)
        assert [list(c.token_ids) for c in chosen] == [list(c.token_ids) for c in ranked[:2]]
        assert [c.index for c in chosen] == [0, 1]


def test_best_of_tells_of_a_choice_that_failed(synthetic_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = SamplingParams(temperature=1.0, seed=1, n=6, max_tokens=5, ignore_eos=True, logprobs=0)
    best = SamplingParams(temperature=1.0, seed=1, n=2, best_of=6, max_tokens=5, ignore_eos=True)
    take = Choice.take
    with LLM(synthetic_model(), num_blocks=200) as llm:
        every = llm.generate({"prompt_token_ids": [5, 6]}, wide)[0].outputs
        worst = min(every, key=lambda c: c.cumulative_logprob or 0.0).index

        def fragile(choice: Choice, token: int) -> Any:
            if choice.sequence.index == worst and choice.sampling.num_output_tokens == 4:
                raise ValueError("its own")
            return take(choice, token)

        monkeypatch.setattr(Choice, "take", fragile)
        chosen = llm.generate({"prompt_token_ids": [5, 6]}, best)[0].outputs
        assert [c.finish_reason for c in chosen] == ["error", "length"]


@pytest.mark.parametrize(("length", "live", "slots"), [(1, 1, 4), (5, 5, 8), (8, 8, 8)])
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_slots_that_forks_share_count_once(
    synthetic_model: Build, windows: tuple[int | None, ...], length: int, live: int, slots: int
) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=3, ignore_eos=True)
    with LLM(synthetic_model(*windows), num_blocks=40, block_size=4, debug=True) as llm:
        llm._submit({"prompt_token_ids": [3] * length}, params)
        llm.engine.step()
        assert llm.engine.kv_utilisation() == live / slots
        llm.engine.step()  # each has a last block of its own now
        shared = length // 4 * 4
        assert llm.engine.kv_utilisation() == pytest.approx((shared + 4 * (length + 1 - shared)) / (shared + 4 * 4))


def log_softmax_after(tokens: list[int]) -> np.ndarray:
    logits = next_logits(tokens)
    return logits - np.log(np.exp(logits).sum())


def test_prompt_logprobs_cover_every_chunk_in_spite_of_the_cache_and_preemption(synthetic_model: Build) -> None:
    items = prompts(6, 11, longest=30)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=10, max_num_batched_tokens=7, max_num_seqs=4, debug=True) as llm:
        for output in llm.generate([{"prompt_token_ids": p} for p in items * 2], params):
            tokens = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
            reported = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
            assert len(reported) == len(tokens)
            assert reported[0] is None
            for position in range(1, len(tokens)):
                entry, expected = reported[position], log_softmax_after(tokens[:position])
                assert entry is not None
                assert entry.token_id == tokens[position]
                assert entry.logprob == pytest.approx(expected[tokens[position]], abs=1e-4)
                assert entry.top_token_ids[0] == expected.argmax()
        assert llm.engine.scheduler.counters.preemptions > 0


def test_ends_by_length_stop_token_and_end_of_sequence(synthetic_model: Build) -> None:
    prompt = next(p for p in prompts(200, 3) if EOS in continuation(p, 20))
    free = continuation(prompt, 20)
    with LLM(synthetic_model(), num_blocks=64) as llm:
        output = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
        assert list(output.token_ids) == free[: free.index(EOS) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[free[2]])
        output = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
        assert list(output.token_ids) == free[: free.index(free[2]) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", free[2])
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
        assert (list(output.token_ids), output.finish_reason) == (free[:3], "length")


def test_the_context_ends_an_output(synthetic_model: Build) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with LLM(synthetic_model(max_positions=20), num_blocks=64) as llm:
        output = llm.generate({"prompt_token_ids": [1] * 15}, params)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (5, "length")
    with LLM(synthetic_model(), num_blocks=4) as llm:  # 16 slots: the 17th token is never computed
        output = llm.generate({"prompt_token_ids": [1] * 10}, params)[0].outputs[0]
        assert list(output.token_ids) == continuation([1] * 10, 7)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1, VOCAB], GREEDY, f"token id {VOCAB}"),
        ([-1], GREEDY, "token id -1"),
        ([1] * 4096, GREEDY, "4096 tokens"),
        ([1] * 257, GREEDY, "at most 256"),
        ([1], SamplingParams(stop="x"), "need a tokenizer"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "vocabulary"),
    ],
)
def test_a_request_that_can_never_run_is_refused_before_any_other_runs(
    synthetic_model: Build, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with LLM(synthetic_model(), num_blocks=64) as llm:
        good = {"prompt_token_ids": [1]}
        with pytest.raises((RequestError, SamplingParamsError), match=message):
            llm.generate([good, {"prompt_token_ids": prompt}], [GREEDY, params])
        assert not llm.engine.has_work
        assert llm.engine.scheduler.counters.steps == 0
        assert ask(llm, [[1]]) == [continuation([1], 24, eos=EOS)]


def test_text_without_a_tokenizer_says_so(synthetic_model: Build) -> None:
    says = r"no tokenizer\.json.*Python's LLM and the server take prompts as token ids"
    with LLM(synthetic_model(), num_blocks=8) as llm, pytest.raises(ValueError, match=says):
        llm.generate("hello")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": 15}, "hold no sequence"),
        ({"kv_memory": "much"}, "no amount of memory"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"block_size": 3, "num_blocks": 8}, "power of two"),
        ({"num_blocks": 8, "kv_memory": "1MB"}, "give one of them"),
        ({"num_blocks": 8, "max_num_seqs": 600}, "max_num_seqs=600"),
        ({"device": "gpu"}, "device 'gpu' is unknown"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    synthetic_model: Build, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(synthetic_model(), **settings)  # type: ignore[arg-type]


def test_caches_that_do_not_fit_are_named_with_what_was_given(synthetic_model: Build) -> None:
    model = synthetic_model(max_positions=None)
    with pytest.raises(ConfigurationError, match=r"^kv_memory=900000TB: .* TiB of caches cannot be allocated"):
        LLM(model, kv_memory="900000TB")
    with pytest.raises(ConfigurationError, match=rf"^num_blocks={1 << 50}: .* TiB of caches cannot be allocated"):
        LLM(model, num_blocks=1 << 50)


def test_a_small_budget_runs_and_shrinks_the_chunk_beside_a_window(synthetic_model: Build) -> None:
    # 24 bytes a token over both layers; a window of 6 and 512-token chunks would want more than 130 blocks.
    with LLM(synthetic_model(None, 6), kv_memory="1KB", debug=True) as llm:
        items = prompts(4, 2, longest=60)
        assert ask(llm, items) == [continuation(p, 24, (None, 6), eos=EOS) for p in items]


def test_an_altered_graph_is_refused(synthetic_model: Build, tmp_path: Path) -> None:
    source = synthetic_model()
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = tmp_path / "model.onnx"
    model.write_bytes(model.read_bytes() + b"\x00")
    with pytest.raises(ManifestError, match="altered"):
        LLM(tmp_path)


def test_memory_is_shared_out_between_groups(synthetic_model: Build) -> None:
    with LLM(synthetic_model(None, 6), kv_memory=100_000, max_num_seqs=2, max_num_batched_tokens=8) as llm:
        full, windowed = llm.engine.scheduler.cache.groups
        assert windowed.num_blocks == 2 * 5  # the bound for two sequences
        assert full.num_blocks == 2 * 1024  # what two sequences of the model's context can use
        assert llm.model.kv_bytes == (full.num_blocks + windowed.num_blocks) * 16


class Fragile(OnnxRunner):
    """Fails on every step that computes token 60."""

    def execute(self, feeds: Feeds) -> np.ndarray:
        if 60 in feeds["input_ids"].tolist():
            raise StepError("token 60")
        return super().execute(feeds)


def test_a_step_that_fails_for_one_request_fails_that_one_alone(synthetic_model: Build) -> None:
    folder = synthetic_model()
    runner = Fragile(folder, Manifest.load(folder))
    with LLM(folder, num_blocks=40, runner=runner, max_num_batched_tokens=16, max_num_seqs=4, debug=True) as llm:
        items = prompts(8, 5, longest=20)
        items[3] = [*items[3], 60]
        outputs = llm.generate([{"prompt_token_ids": p} for p in items], GREEDY)
        failed = 0
        for prompt, output in zip(items, outputs, strict=True):
            choice, expected = output.outputs[0], continuation(prompt, 24, eos=EOS)
            if 60 in (*prompt, *expected[:-1]):
                failed += 1
                assert choice.finish_reason == "error"
                assert "token 60" in (choice.error or "")
                expected = expected[: expected.index(60) + 1] if 60 not in prompt else []
            else:
                assert choice.error is None
            assert list(choice.token_ids) == expected
        assert 0 < failed < 8
        assert all(pool.num_owned == 0 for pool in llm.engine.scheduler.cache.pools)


def test_inputs_too_large_for_a_buffer_that_is_kept(synthetic_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LARGEST_BUFFER", 100)
    with LLM(synthetic_model(), num_blocks=900, block_size=1, max_num_batched_tokens=30) as llm:
        items = prompts(8, 4, longest=60)
        assert ask(llm, items) == [continuation(p, 24, eos=EOS) for p in items]
        kept = {name for name, _ in llm.engine.runner._buffers}  # type: ignore[attr-defined]
        assert "past_sequence_lengths" in kept
        assert "block_table" not in kept  # a row of 26 blocks is too large already
        assert all(buffer.nbytes <= 100 for buffer, _ in llm.engine.runner._buffers.values())  # type: ignore[attr-defined]


def test_a_small_budget_alone_lowers_the_number_of_sequences(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=64, max_num_batched_tokens=5) as llm:
        assert llm.engine.scheduler.max_sequences == 5


def test_every_setting_can_be_given_by_name() -> None:
    assert set(Settings.__annotations__) == {field.name for field in fields(EngineConfig)}


class FailingOn(OnnxRunner):
    """Fails on every step with a given token."""

    token = 60

    def execute(self, feeds: Feeds) -> np.ndarray:
        if self.token in feeds["input_ids"].tolist():
            raise StepError("this token")
        return super().execute(feeds)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("reported", [None, 0])
def test_the_request_of_a_failing_later_chunk_is_found(
    synthetic_model: Build, caching: bool, reported: int | None
) -> None:
    folder = synthetic_model()
    runner = FailingOn(folder, Manifest.load(folder))
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "enable_prefix_caching": caching, "debug": True}
    with LLM(folder, num_blocks=100, runner=runner, **settings) as llm:
        never = {"temperature": 0, "ignore_eos": True, "logit_bias": {60: -100}}
        bad = RequestInput(
            request_id="bad",
            prompt_token_ids=[*[5 + i for i in range(40)], 60, 3, 3],
            params=SamplingParams(max_tokens=4, prompt_logprobs=reported, **never),
        )
        request, live, ended = llm.engine.add(bad), [], 0
        for step in range(200):
            ended += sum(other.is_finished for other in live)
            live = [other for other in live if not other.is_finished]
            while len(live) < 2:
                params = SamplingParams(max_tokens=20, **never)
                source = RequestInput(request_id=f"{step}-{len(live)}", prompt_token_ids=[step % 50], params=params)
                live.append(llm.engine.add(source))
            llm.engine.step()
            if request.is_finished:
                break
        assert request.is_finished
        assert request.output().outputs[0].finish_reason == "error"
        assert all(other.error is None for companion in live for other in companion.choices)


@pytest.mark.parametrize("guesses", [0, 3])
def test_a_failure_with_one_requests_token_is_that_ones_alone(
    synthetic_model: Build, guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Choice.take

    def fragile(choice: Choice, token: int) -> Any:
        if choice.request.source.prompt == "bad" and choice.sampling.num_output_tokens == 3:
            raise ValueError("its own")
        return take(choice, token)

    monkeypatch.setattr(Choice, "take", fragile)
    with LLM(synthetic_model(), num_blocks=40, debug=True, num_speculative_tokens=guesses) as llm:
        bad = RequestInput(request_id="bad", prompt_token_ids=[1, 1, 1], params=GREEDY, prompt="bad")
        request = llm.engine.add(bad)
        assert ask(llm, [[1, 2]]) == [continuation([1, 2], 24, eos=EOS)]
        choice = request.output().outputs[0]
        assert (choice.finish_reason, len(choice.token_ids)) == ("error", 3)
        assert "ValueError: its own" in (choice.error or "")


def test_the_failure_of_a_search_is_its_own(synthetic_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OverflowError("a score")

    monkeypatch.setattr(BeamSearch, "advance", fail)
    with LLM(synthetic_model(), num_blocks=40, debug=True) as llm:
        items = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1, 2]}]
        search, other = llm.generate(items, [BeamSearchParams(max_tokens=4), GREEDY])
        assert search.outputs[0].finish_reason == "error"
        assert "OverflowError: a score" in (search.outputs[0].error or "")
        assert list(other.outputs[0].token_ids) == continuation([1, 2], 24, eos=EOS)


def test_a_stream_gets_its_end_though_another_call_made_it(synthetic_model: Build) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(synthetic_model(), num_blocks=40) as llm:
        last = None
        for last in llm.stream([{"prompt_token_ids": [1, 2, 3]}], params):
            if len(last.outputs[0].token_ids) == 2:
                llm.generate([{"prompt_token_ids": [4]}], SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
        assert last is not None
        assert last.finished
        assert list(last.outputs[0].token_ids) == continuation([1, 2, 3], 6)


def test_a_stream_that_nobody_reads_ends_its_requests(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=40) as llm:
        stream = llm.stream([{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}])
        assert llm.engine.num_requests == 2
        del stream
        gc.collect()
        assert llm.engine.num_requests == 0


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2, 3],
        5,
        {"prompt": "a"},
        [{"prompt_token_ids": ["a"]}],
        [{"prompt_token_ids": [1.5]}],
        [{"prompt_token_ids": [True]}],
        [{"prompt_token_ids": "12"}],
        [{"prompt_token_ids": 7}],
        [None],
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(synthetic_model: Build, bad: Any) -> None:
    with LLM(synthetic_model(), num_blocks=40) as llm:
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(bad, GREEDY)
        assert llm.engine.num_requests == 0


def test_token_ids_of_numpy_are_token_ids(synthetic_model: Build) -> None:
    with LLM(synthetic_model(), num_blocks=40) as llm:
        output = llm.generate([{"prompt_token_ids": np.array([1, 2, 3])}], GREEDY)[0]  # type: ignore[typeddict-item]
        assert list(output.outputs[0].token_ids) == continuation([1, 2, 3], 24, eos=EOS)
