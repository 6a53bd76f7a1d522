"""Converted models through the whole engine equal their source, run one sequence at a time in plain onnxruntime.

Eight sequences of mixed length arrive at different steps under a budget so small that every prompt is chunked, in a
pool so small that some are preempted; then each is asked for tokens sampled at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.outputs import RequestOutput
from pagegraft.runtime.sampling import Sampler, SamplingState
from plain_source import PlainSource, log_softmax

SOURCES = Path(__file__).parents[1] / "data" / "zoo"
MODELS = [
    "llama_gqa__opt",
    "llama_mha__opt",
    "llama_gqa__genai",
    "llama_gqa__mob",
    "llama_gqa__dyn18",
    "llama_gqa__hf",
    "gpt2__opt",
    "qwen2__opt",
    "qwen3__opt",
    "qwen3__genai",
    "mistral__opt",
    "phi3__opt",
    "gemma2__dyn18",
    "gpt_oss__opt",
    "opt__opt",
]
PROMPT_LENGTHS = (37, 1, 2, 21, 5, 13, 9, 34)
NEW_TOKENS = 12
#: Largest difference of logits as a fraction of their standard deviation, and of what removing the context changes.
TOLERANCE, CONTEXT_FRACTION = 1e-4, 0.01
#: Two tokens whose borders are nearer than this in probability may be drawn one for the other.
TIE = 1e-5


@dataclass(frozen=True)
class Converted:
    """A converted model beside its source."""

    folder: Path
    source: PlainSource


@pytest.fixture(scope="module", params=MODELS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    source = SOURCES / request.param
    out = tmp_path_factory.mktemp("converted") / request.param
    convert(source, out, ConvertOptions())
    return Converted(out, PlainSource(source / "model.onnx"))


def _run(folder: Path, *, poison: bool = False, alone: int | None = None) -> list[RequestOutput]:
    """All requests, or one `alone`; every logit is asked for."""
    with LLM(
        folder, num_blocks=9, block_size=16, max_num_batched_tokens=16, max_num_seqs=8, num_threads=1, debug=True
    ) as llm:
        if poison:
            for arrays in llm.engine.runner._pool._arrays:
                for array in arrays:
                    array.fill(np.nan)
        vocab = llm.model.manifest.vocab_size
        rng = np.random.default_rng(5)
        prompts = [rng.integers(3, vocab, n).tolist() for n in PROMPT_LENGTHS]
        requests = []
        for index, prompt in enumerate(prompts):
            if alone is not None and index != alone:
                continue
            params = SamplingParams(
                temperature=1.0,
                top_p=1.0,
                seed=index,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                logprobs=vocab,
                prompt_logprobs=vocab,
            )
            requests.append(llm.engine.add(RequestInput(request_id=str(index), prompt_token_ids=prompt, params=params)))
            llm.engine.step()
        while llm.engine.has_work:
            llm.engine.step()
        return [request.output() for request in requests]


def _logprobs(output: RequestOutput, vocab: int) -> NDArray[np.float64]:
    """`[tokens - 1, vocab]`: what the engine said of the token after each but the last."""
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    table = np.full((len(entries), vocab), np.nan)
    for row, entry in zip(table, entries, strict=True):
        assert entry is not None
        row[entry.top_token_ids] = entry.top_logprobs
    return table


def test_engine_equals_source(converted: Converted) -> None:
    outputs = _run(converted.folder)
    expected, actual, alone, ties = [], [], [], 0
    for index, output in enumerate(outputs):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logits = converted.source.logits(tokens)[:-1]
        expected.append(logits)
        actual.append(_logprobs(output, logits.shape[1]))
        alone.append(np.concatenate([converted.source.logits([t]) for t in tokens[:-1]]))
        ties += _check_draws(output, logits, seed=index)
    wanted = np.concatenate(expected)
    gap = np.abs(np.concatenate(actual) - log_softmax(wanted))
    assert np.isfinite(gap).all()
    assert gap.max() <= TOLERANCE * wanted.std()
    effect = np.sqrt(np.mean((log_softmax(np.concatenate(alone)) - log_softmax(wanted)) ** 2))
    assert gap.max() <= CONTEXT_FRACTION * effect
    assert ties <= 1


def _check_draws(output: RequestOutput, logits: NDArray[np.float64], *, seed: int) -> int:
    """Draws again from the source's logits with the same seed; the number of ties that fell the other way."""
    prompt, drawn = output.prompt_token_ids, output.outputs[0].token_ids
    params = SamplingParams(temperature=1.0, top_p=1.0, seed=seed, max_tokens=NEW_TOKENS, ignore_eos=True)
    state = SamplingState(
        params, vocab_size=logits.shape[1], seed=seed, sequence=0, prompt_token_ids=prompt, eos_token_ids=frozenset()
    )
    ties = 0
    for step, token in enumerate(drawn):
        row = logits[len(prompt) - 1 + step].astype(np.float32)
        again = int(Sampler().sample(row[None], [state]).token_ids[0])
        if again != token:
            # Tokens are drawn in order of their ids: only neighbours (of some probability) share a border.
            between = np.exp(log_softmax(row.astype(np.float64)))[min(again, token) + 1 : max(again, token)]
            assert between.sum() < TIE, f"step {step}: the engine drew {token}, the source's logits give {again}"
            ties += 1
        state.append(token)
    return ties


def test_batch_companions_do_not_matter(converted: Converted) -> None:
    together = _run(converted.folder)
    vocab = int(np.max(together[0].outputs[0].logprobs[0].top_token_ids)) + 1
    for index in (0, 4):
        (solo,) = _run(converted.folder, alone=index)
        assert solo.outputs[0].token_ids == together[index].outputs[0].token_ids
        gap = np.abs(_logprobs(solo, vocab) - _logprobs(together[index], vocab))
        assert gap.max() <= 1e-4


def test_poison_in_dead_slots_changes_nothing(converted: Converted) -> None:
    clean, poisoned = _run(converted.folder), _run(converted.folder, poison=True)
    for a, b in zip(clean, poisoned, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        vocab = 1 + int(np.max(a.outputs[0].logprobs[0].top_token_ids))
        assert np.array_equal(_logprobs(a, vocab), _logprobs(b, vocab))
