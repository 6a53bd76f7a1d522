"""onnxruntime-genai's own continuous-batching engine runs a model converted for stock onnxruntime, here on CPU.

Its engine is made for CUDA; with pagegraft's library as `custom_ops_library` the same model and the same engine run on
a CPU. Three things are changed in the `genai_config.json` that the conversion writes: no execution provider, the
library (which must lie in the model's folder), and a number of blocks (its own budget asks the GPU).
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import decoder as d
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from pagegraft.custom_ops import library_path
from pagegraft.graphpass import ConvertOptions, convert
from test_element_types import in_type

PROMPTS = [[3, 5, 9, 11], [7, 7, 1], [40, 2, 33, 8, 21, 60]]
NEW = 12


def greedy(source: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens of the source in plain onnxruntime, without a cache, and the lead of each over the second best."""
    session = onnxruntime.InferenceSession(source / "model.onnx")
    tokens, leads = list(prompt), []
    for _ in range(NEW):
        feeds: dict[str, Any] = {"input_ids": np.array([tokens]), "position_ids": np.arange(len(tokens))[None]}
        for layer in range(2):
            for part in ("key", "value"):
                feeds[f"past.{layer}.{part}"] = np.zeros((1, d.HEADS, 0, d.SIZE), np.float16)
        feeds = {i.name: feeds.get(i.name, np.ones((1, len(tokens)), np.int64)) for i in session.get_inputs()}
        logits = session.run(["logits"], feeds)[0][0, -1].astype(np.float64)
        second, best = np.sort(logits)[-2:]
        leads.append(float((best - second) / logits.std()))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], leads


def run_engine(og: Any, folder: Path) -> list[list[int]]:
    """All prompts at once through the other project's engine."""
    engine = og.Engine(og.Model(str(folder)))
    buffer = engine.create_event_buffer(32)
    requests, found = [], []
    for prompt in PROMPTS:
        options = og.RequestOptions()
        options.set_max_session_tokens(64)
        request = engine.create_request(options=options)
        turn = og.TurnOptions(request)
        turn.set_do_sample(False)
        turn.set_max_generated_tokens(NEW)
        request.begin_turn(np.array(prompt, np.int32), turn)
        requests.append(request)
        found.append([])
    for _ in range(20 * NEW):
        if not engine.has_pending_requests():
            break
        for event in engine.run(buffer) or []:
            if int(event.flags) & int(og.EngineEventFlags.TOKEN):
                found[requests.index(event.request)].append(int(event.token))
    return found


@pytest.mark.slow
def test_engine_of_another_project(tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    if not hasattr(og, "Engine"):
        pytest.skip("this onnxruntime-genai has no engine")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    model = d.Decoder(rotate=partial(d.rotary), learned_positions=False).model()
    onnx.save(in_type(model, TensorProto.FLOAT16), source / "model.onnx")
    ids = {"bos_token_id": 0, "eos_token_id": 63, "pad_token_id": 0}
    (source / "config.json").write_text(json.dumps({"model_type": "llama", **ids}))
    convert(source, out, ConvertOptions(target="ort-cuda", max_positions=96))
    shutil.copy(library_path(), out / library_path().name)
    config = json.loads((out / "genai_config.json").read_text())
    session = {"custom_ops_library": library_path().name, "provider_options": [], "intra_op_num_threads": 1}
    config["model"]["decoder"]["session_options"] = session
    config["engine"]["dynamic_batching"] = {"block_size": 16, "max_batch_size": 8, "num_blocks": 64}
    (out / "genai_config.json").write_text(json.dumps(config))

    compared = 0
    for prompt, actual in zip(PROMPTS, run_engine(og, out), strict=True):
        expected, leads = greedy(source, prompt)
        stop = next((i for i, token in enumerate(expected) if token == 63), NEW - 1) + 1
        # Half precision may break a near tie the other way; what follows is then another text.
        tie = next((i for i, lead in enumerate(leads) if lead < 0.005), NEW)
        assert actual[: min(tie, stop)] == expected[: min(tie, stop)]
        compared += min(tie, stop)
    assert compared >= NEW
