"""Sharing, preemption, choices and long contexts on converted models: as the undisturbed run, and as the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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


def run(llm: LLM, between: Callable[[int], None] = lambda step: None) -> tuple[list[RequestOutput], int]:
    live: list[Request] = []
    for i, (prompt, params) in enumerate(requests(llm.model.manifest.vocab_size)):
        request = llm.engine.add(RequestInput(request_id=str(i), prompt_token_ids=prompt, params=params))
        assert isinstance(request, Request)
        live.append(request)
    steps = 0
    while llm.engine.has_work:
        between(steps)
        llm.engine.step()
        steps += 1
    return [request.output() for request in live], steps


def ties_between(outputs: list[RequestOutput], expected: list[RequestOutput]) -> int:
    """Compares tokens and log-probabilities; returns how many outputs part at a tie."""
    ties = 0
    for output, wanted in zip(outputs, expected, strict=True):
        for choice, other in zip(output.outputs, wanted.outputs, strict=True):
            assert len(choice.token_ids) == len(other.token_ids)
            for mine, theirs in zip(choice.logprobs or (), other.logprobs or (), strict=True):
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

            def preempt(step: int, at: int = at) -> None:
                if step == at:
                    for sequence in list(llm.engine.scheduler.running):
                        llm.engine.scheduler.preempt(sequence)

            ties += ties_between(run(llm, preempt)[0], undisturbed)
        assert llm.engine.scheduler.counters.preemptions >= steps // 3
        assert ties <= steps // 3


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
