"""The demo's second half: conversion by the command, answers through the engine, display and figures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jinja2
import numpy as np
import onnxruntime as ort
import pytest
from pagegraft.runtime import LLM
from pagegraft.runtime.demo.board import Board
from pagegraft.runtime.demo.conversion import conversion_summary, convert_once
from pagegraft.runtime.demo.demo import answer, run_demo, where
from pagegraft.runtime.demo.errors import DemoError
from pagegraft.runtime.demo.export import export_gguf
from pagegraft.runtime.demo.prompts import DEMO_PROMPTS, DemoPrompt
from rich.console import Console
from tiny_llama import TinyLlama
from tokenizers import Tokenizer


def silent() -> Console:
    return Console(file=io.StringIO(), width=80)


def test_six_prompts_of_different_length() -> None:
    assert len(DEMO_PROMPTS) == 6
    assert len({prompt.content for prompt in DEMO_PROMPTS}) == 6
    lengths = [len(prompt.content) for prompt in DEMO_PROMPTS]
    assert max(lengths) > 20 * min(lengths)


def test_tiny_model_from_gguf_to_answers(tmp_path: Path) -> None:
    """Greedy answers through the engine are those of float64 numpy; the conversion is made once for each source."""
    model = TinyLlama()
    model.write(tmp_path / "tiny.gguf")
    source, target = export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx"), tmp_path / "paged"
    assert convert_once(source, target, silent())
    assert not convert_once(source, target, silent())
    summary = dict(conversion_summary(target))
    assert summary["found"].startswith("2 attentions")
    assert summary["mask"].startswith("causal")

    texts = ("the cat 12", "a", "the the a 7\nthe end")
    prompts = [DemoPrompt(title=text, content=text, max_tokens=12) for text in texts]
    with LLM(target, num_blocks=40, num_threads=1) as llm:
        requests = [list(llm.chat_prompt(prompt.messages)["prompt_token_ids"]) for prompt in prompts]
        board = answer(llm, prompts, silent())
    for ids, grown in zip(requests, board.answers, strict=True):
        assert grown.num_prompt_tokens == len(ids)
        assert grown.finish_reason in ("stop", "length")
        logits = model.logits([*ids, *grown.token_ids])[len(ids) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(grown.token_ids)[:, None], axis=1)[:, 0]
        assert (chosen > logits.max(axis=1) - 1e-4 * logits.std()).all()
    assert 0 < board.peak_blocks <= 40

    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"bos_token_id": 0}))
    (source / "model.onnx").write_bytes((source / "model.onnx").read_bytes() + b"\x12\x01x")  # another producer name
    assert convert_once(source, target, silent()), "another source is converted anew"
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".partial-")]


def test_failed_conversion_leaves_the_old_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "onnx", tmp_path / "paged"
    source.mkdir()
    (source / "model.onnx").write_bytes(b"not ONNX")
    target.mkdir()
    (target / "kept").touch()
    with pytest.raises(DemoError, match="could not be converted"):
        convert_once(source, target, silent())
    assert "pagegraft:" in capfd.readouterr().err
    assert [each.name for each in target.iterdir()] == ["kept"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "onnx", "paged"]


def test_where_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="run pagegraft demo"):
        where(tmp_path)
    (tmp_path / "smollm2-135m-instruct-paged").mkdir()
    with pytest.raises(DemoError, match=r"not intact.*run pagegraft demo"):
        where(tmp_path)


def test_board_shows_tails_and_figures() -> None:
    seconds = iter([10.0, *[14.0] * 20])
    board = Board(DEMO_PROMPTS, pool_use=lambda: (3, 12), utilisation=lambda: 0.9, clock=lambda: next(seconds))
    for number, each in enumerate(board.answers):
        each.text, each.token_ids = " ".join(f"word{i}" for i in range(40)), range(10)
        each.finish_reason = "stop" if number else None
        board.observe()
    console = silent()
    console.print(board)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 running | 60 tokens, 15/s | 3 of 12 blocks (25%)" in shown
    assert "word39" in shown
    assert "word1 " not in shown
    assert len(shown.splitlines()) == 6 * 2 + 1, "it must fit a terminal of 24 lines"
    assert board.finished is None
    board.answers[0].finish_reason = "length"
    board.observe()
    assert board.finished == 14.0
    board.print_answers(console)
    assert "What is the capital of France?" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_real_demo_answers_as_the_source_model_does(smollm2: Path) -> None:
    """Each of the six answers is greedy under the source ONNX in plain onnxruntime, token by token, ties excepted."""
    console = silent()
    board = run_demo(smollm2.parent, console=console)
    assert "Paris" in board.answers[0].text
    assert sum(each.num_cached_tokens for each in board.answers) > 256, "the two chats about one text share it"
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "30 attentions" in printed
    assert "tokens/s" in printed
    assert where(smollm2.parent) == smollm2.with_name("smollm2-135m-instruct-paged")

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(smollm2 / "model.onnx", options)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    template = jinja2.Template(json.loads((smollm2 / "tokenizer_config.json").read_text())["chat_template"])
    empty = {
        each.name: np.zeros((1, 3, 0, 64), np.float32) for each in session.get_inputs() if each.name.startswith("past_")
    }
    for grown in board.answers:
        text = template.render(messages=grown.prompt.messages, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = [*ids, *grown.token_ids]
        feeds = {"input_ids": np.array([whole]), "attention_mask": np.ones((1, len(whole)), np.int64)}
        feeds["position_ids"] = np.arange(len(whole))[None]
        logits = session.run(["logits"], feeds | empty)[0][0, len(ids) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(grown.token_ids)[:, None], axis=1)[:, 0]
        assert (chosen >= logits.max(axis=1) - 2e-3).all()
        assert grown.token_ids[-1] == 2 or len(grown.token_ids) == grown.prompt.max_tokens
