"""`pagegraft chat`: what Ctrl-C does in the middle of an answer, a second time, and at the prompt."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagegraft.custom_ops import main
from pagegraft.runtime import LLM, cli

from tests.wiring.synthetic import add_text, build, continuation, letters, spell


class Terminal:
    """Standard output that a user watches: presses Ctrl-C at every piece from number `first` up to `last`."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.pieces = first, last, [""]

    def write(self, text: str) -> None:
        self.pieces.append(text)
        if text.strip() and self.first <= len(self.pieces) - 1 <= self.last:
            signal.raise_signal(signal.SIGINT)

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LLM]]:
    """The models that the command has loaded, with an engine that checks itself."""
    models: list[LLM] = []

    def load(model: Path, **settings: Any) -> LLM:
        models.append(LLM(model, num_blocks=80, debug=True))
        return models[-1]

    monkeypatch.setattr(cli, "_load", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    yield models
    signal.signal(signal.SIGINT, before)


def chat(folder: Path, lines: list[str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> int:
    """Talks; returns the exit status."""
    turns = iter([*lines, ""])
    arguments = ["pagegraft", "chat", str(folder), "--temperature", "0", "--max-tokens", "30"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(cli, "_read_line", lambda: next(turns))
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


def test_an_interrupt_ends_the_answer_and_the_chat_goes_on(
    tmp_path: Path, loaded: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_text(build(tmp_path))
    terminal = Terminal(4, 4)
    assert chat(folder, ["hi", "on"], terminal, monkeypatch) == 0
    told, again = "".join(terminal.pieces).split("\n")[:2]
    whole = spell(continuation(letters("uhia"), 30))
    assert told != whole
    assert whole.startswith(told)
    assert again == spell(continuation(letters(f"uhia{told}uona"), 30)), "the second turn knows what was said"
    assert not loaded[0].engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_the_chat(tmp_path: Path, loaded: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_text(build(tmp_path))
    terminal = Terminal(4, 4)
    write = terminal.write

    def twice(text: str) -> None:
        write(text)
        if len(terminal.pieces) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "write", twice)
    assert chat(folder, ["hi", "on"], terminal, monkeypatch) == 130
    assert len(terminal.pieces) == 5
