"""The demo's real model against stored logits of transformers and token ids of llama.cpp; see make_golden.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import onnxruntime as ort
import pytest
from pagegraft.runtime.demo.export import export_smollm2
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())
TOLERANCE = 5e-4  # of logits whose standard deviation is 5 to 8: two float32 programs that sum in another order


@pytest.fixture(scope="module")
def session(smollm2: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    return ort.InferenceSession(smollm2 / "model.onnx", options)


def run(session: ort.InferenceSession, ids: list[int], cache: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits `[s, V]` and the grown cache of one sequence."""
    past = cache[0].shape[2]
    feeds = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, past + len(ids)), np.int64),
        "position_ids": np.arange(past, past + len(ids))[None],
    }
    feeds |= {f"past_key_values.{i // 2}.{('key', 'value')[i % 2]}": each for i, each in enumerate(cache)}
    logits, *cache = session.run(None, feeds)
    return logits[0], cache


@pytest.mark.parametrize("name", GOLDEN["logits"])
def test_logits_equal_transformers(name: str, session: ort.InferenceSession) -> None:
    golden, probed = GOLDEN["logits"][name], GOLDEN["probed_ids"]
    ids, continuation = golden["ids"], golden["continuation"]
    logits, cache = run(session, ids, [np.zeros((1, 3, 0, 64), np.float32)] * 60)
    np.testing.assert_allclose(logits[len(ids) // 2, probed], golden["middle"], rtol=0, atol=TOLERANCE)
    rows = [logits[-1]]
    for token in continuation[:-1]:
        logits, cache = run(session, [token], cache)
        rows.append(logits[-1])
    for row, top, values, expected in zip(rows, golden["top"], golden["top_values"], golden["probed"], strict=True):
        np.testing.assert_allclose(row[top], values, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(row[probed], expected, rtol=0, atol=TOLERANCE)
        assert np.delete(row, top).max() < min(values) + TOLERANCE, "no other token may outrank the five best"


def test_token_ids_equal_llama_cpp(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for case in GOLDEN["encodings"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"], case["text"]


def test_chat_template_renders_as_in_llama_cpp(smollm2: Path) -> None:
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    template = jinja2.Template(config["chat_template"])
    for case in GOLDEN["templates"].values():
        assert template.render(messages=case["messages"], add_generation_prompt=True) == case["rendered"]


def test_second_call_reuses_the_folder(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip nor the exporter is needed again."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    before = (smollm2 / "model.onnx").stat().st_mtime_ns
    (smollm2.parent / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
    assert export_smollm2(smollm2.parent) == smollm2
    assert (smollm2 / "model.onnx").stat().st_mtime_ns == before
