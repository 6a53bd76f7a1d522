"""Sharing, preemption, choices and long contexts on converted models: as the undisturbed run, and as the source."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.runtime import LLM, RequestOutput, SamplingParams
from pagegraft.runtime.engine.request import Request, RequestInput

SOURCES = Path(__file__).parents[1] / "data" / "zoo"
#: Largest difference of log-probabilities; two tokens nearer than this may be drawn one for the other.
TOLERANCE = 1e-4
#: Of all outputs compared in a long test.
MOST_TIES = 0.01
SETTINGS: dict[str, Any] = {"num_threads": 1, "max_num_batched_tokens": 24, "max_num_seqs": 8, "debug": True}


@pytest.fixture(scope="module", params=["llama_gqa__opt", "mistral__opt", "gemma2__dyn18"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tokens, a window everywhere, and both in turn with softcap."""
    out = tmp_path_factory.mktemp("converted") / request.param
    convert(SOURCES / request.param, out, ConvertOptions(verify=False))
    return out


def requests(vocab: int) -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(3)
    stem = rng.integers(3, vocab, 40).tolist()
    out = []
    for i, own in enumerate([0, 3, 17, 5, 1]):
        prompt = stem[: 40 - 8 * (i % 2)] + rng.integers(3, vocab, own).tolist()
        params = SamplingParams(
            temperature=0.0 if i % 2 else 1.0, seed=i, n=2 if i == 2 else 1, max_tokens=14, ignore_eos=True, logprobs=4
        )
        out.append((prompt, params))
    return out


def run(
    llm: LLM, between: Callable[[int], None] = lambda step: None, order: Sequence[int] = (), every: int = 0
) -> tuple[list[RequestOutput], int]:
    """Runs the requests (those of `order`), one every so many steps, or all at once; `between` goes before each step.

    Afterwards nothing of the pool is owned.
    """
    asked = requests(llm.model.manifest.vocab_size)
    order = order or range(len(asked))
    live: dict[int, Request] = {}
    steps = 0
    while len(live) < len(order) or llm.engine.has_work:
        while len(live) < len(order) and len(live) * every <= steps:
            i = order[len(live)]
            prompt, params = asked[i]
            request = llm.engine.add(RequestInput(request_id=str(i), prompt_token_ids=prompt, params=params))
            assert isinstance(request, Request)
            live[i] = request
        between(steps)
        llm.engine.step()
        steps += 1
    assert not llm.engine.scheduler.has_work
    assert all(pool.num_owned == 0 for pool in llm.engine.scheduler.cache.pools)
    return [live[i].output() for i in sorted(live)], steps


def preempting(llm: LLM, at: int) -> Callable[[int], None]:
    """Preempts everything before one step."""

    def preempt(step: int) -> None:
        if step == at:
            for sequence in list(llm.engine.scheduler.running):
                llm.engine.scheduler.preempt(sequence)

    return preempt


def ties_between(outputs: list[RequestOutput], expected: list[RequestOutput], *, cut: str = "") -> int:
    """Compares tokens and log-probabilities; returns how many outputs part at a tie. Those of request `cut` may end
    early."""
    ties = 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.request_id == wanted.request_id
        for choice, other in zip(output.outputs, wanted.outputs, strict=True):
            count = len(choice.token_ids)
            assert count == len(other.token_ids) or (output.request_id == cut and count < len(other.token_ids))
            assert len(choice.logprobs or ()) == count
            for mine, theirs in zip(choice.logprobs or (), (other.logprobs or ())[:count], strict=True):
                if mine.token_id != theirs.token_id:
                    assert abs(mine.logprob - theirs.logprob) < TOLERANCE
                    ties += 1
                    break
                assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
                np.testing.assert_allclose(mine.top_logprobs, theirs.top_logprobs, atol=TOLERANCE)
    return ties


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[RequestOutput]:
    with LLM(model, num_blocks=64, block_size=8, enable_prefix_caching=False, **SETTINGS) as llm:
        outputs, _ = run(llm)
        assert llm.engine.scheduler.counters.preemptions == 0
    return outputs


def test_sharing_changes_nothing(model: Path, undisturbed: list[RequestOutput]) -> None:
    with LLM(model, num_blocks=64, block_size=8, **SETTINGS) as llm:
        outputs, _ = run(llm)
        assert sum(output.num_cached_tokens for output in outputs) >= 32
        assert ties_between(outputs, undisturbed) <= 1
        again, _ = run(llm)
        assert min(output.num_cached_tokens for output in again) >= 24
        assert ties_between(again, undisturbed) <= 1


@pytest.mark.parametrize("caching", [True, False])
def test_preempting_everything_at_every_third_step(
    model: Path, undisturbed: list[RequestOutput], caching: bool
) -> None:
    with LLM(model, num_blocks=64, block_size=8, enable_prefix_caching=caching, **SETTINGS) as llm:
        _, steps = run(llm)
        ties = 0
        for at in range(1, steps, 3):
            ties += ties_between(run(llm, preempting(llm, at))[0], undisturbed)
        assert llm.engine.scheduler.counters.preemptions >= steps // 3
        assert ties <= steps // 3


@pytest.mark.slow
def test_preempting_everything_at_every_step_while_requests_arrive(
    model: Path, undisturbed: list[RequestOutput]
) -> None:
    with LLM(model, num_blocks=64, block_size=8, **SETTINGS) as llm:
        _, steps = run(llm, every=2)
        ties = sum(ties_between(run(llm, preempting(llm, at), every=2)[0], undisturbed) for at in range(1, steps))
        assert llm.engine.scheduler.counters.preemptions >= steps
        assert ties <= MOST_TIES * steps * len(undisturbed)


@pytest.mark.slow
def test_every_order_of_arrival(model: Path, undisturbed: list[RequestOutput]) -> None:
    orders = list(itertools.permutations(range(len(undisturbed))))
    ties = 0
    for caching in (True, False):
        for order in orders[:: 1 if caching else 7]:
            with LLM(model, num_blocks=64, block_size=8, enable_prefix_caching=caching, **SETTINGS) as llm:
                ties += ties_between(run(llm, order=order, every=1)[0], undisturbed)
    assert ties <= MOST_TIES * len(orders) * len(undisturbed)


@pytest.mark.slow
def test_ending_each_request_at_every_step(model: Path, undisturbed: list[RequestOutput]) -> None:
    """The others are as if it had never been there, and what it had said by then is the beginning of what it says."""
    with LLM(model, num_blocks=64, block_size=8, **SETTINGS) as llm:
        _, steps = run(llm, every=2)
        ties, ended = 0, 0
        for victim, at in itertools.product(range(len(undisturbed)), range(1, steps)):

            def end(step: int, victim: int = victim, at: int = at) -> None:
                if step == at:
                    llm.engine.abort(str(victim))

            outputs, _ = run(llm, end, every=2)
            aborted = {c.finish_reason for c in outputs[victim].outputs} == {"abort"}
            ended += aborted
            ties += ties_between(outputs, undisturbed, cut=str(victim))
        assert ended > len(undisturbed)
        assert ties <= MOST_TIES * steps * len(undisturbed) ** 2


def test_a_tiny_pool_changes_nothing(model: Path, undisturbed: list[RequestOutput]) -> None:
    with LLM(model, num_blocks=14, block_size=8, **SETTINGS) as llm:
        assert ties_between(run(llm)[0], undisturbed) <= 1


def source_logits(model: Path, tokens: list[int], chunk: int) -> NDArray[np.float32]:
    """The source's logits after the last token, computed with its own past in chunks."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs() if i.name.startswith("past")]
    past = {name: np.zeros((1, 2, 0, 16), np.float32) for name in names}
    logits = np.zeros(0, np.float32)
    for start in range(0, len(tokens), chunk):
        ids = np.array([tokens[start : start + chunk]], np.int64)
        end = start + ids.shape[1]
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, end), np.int64)}
        feeds["position_ids"] = np.arange(start, end, dtype=np.int64)[None]
        logits, *present = session.run(None, {**feeds, **past})
        past = dict(zip(names, present, strict=True))
        logits = logits[0, -1]
    return logits


@pytest.mark.slow
def test_a_long_context_gives_the_sources_logits(tmp_path: Path) -> None:
    length = 12_288
    source = tmp_path / "source"
    shutil.copytree(SOURCES / "llama_gqa__opt", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16_384}))
    convert(source, tmp_path / "paged", ConvertOptions(verify=False))
    tokens = np.random.default_rng(1).integers(3, 256, length).tolist()
    wanted = source_logits(source / "model.onnx", tokens, 512)
    without = source_logits(
        source / "model.onnx", [*tokens[: length // 2], *tokens[: length // 2 - 1], tokens[-1]], 512
    )
    settings = {"num_blocks": 800, "block_size": 16, "max_num_batched_tokens": 512, "num_threads": 1}
    with LLM(tmp_path / "paged", **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=256, ignore_eos=True)
        short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        items = [{"prompt_token_ids": tokens}, {"prompt_token_ids": tokens[:9]}]
        entry = (llm.generate(items, [params, short])[0].outputs[0].logprobs or [])[0]
    ours = np.empty(256)
    ours[entry.top_token_ids] = entry.top_logprobs
    expected = wanted - wanted.max() - np.log(np.exp(wanted - wanted.max()).sum())
    assert np.abs(ours - expected).max() < 1e-4 * wanted.std()
    assert np.abs(ours - expected).max() < 0.01 * np.abs(wanted - without).max()
