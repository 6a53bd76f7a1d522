"""Text that cannot fit is refused by its length, without being encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from pagegraft.runtime import LLM
from pagegraft.runtime.engine.errors import RequestError
from pagegraft.runtime.text import Tokenizer

from tests.wiring.synthetic import add_text, build


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A context of 33 tokens of one or two characters, and a tokenizer that may not be used."""
    folder = add_text(build(tmp_path))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ab"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(folder / "tokenizer.json"))
    llm = LLM(folder, num_blocks=8, block_size=4)
    assert llm.tokenizer.encode("ab" * 40) == [256] * 40

    def encode(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        raise TimeoutError

    monkeypatch.setattr(Tokenizer, "encode", encode)
    return llm


def test_what_cannot_fit_is_not_encoded(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"66 characters, which are 33 tokens or more, and at most 32 fit"):
        llm.generate("ab" * 33)
    with pytest.raises(RequestError, match="5000002 characters"):
        llm.chat([{"role": "user", "content": "a" * 5_000_000}])


def test_what_may_fit_is_encoded(llm: LLM) -> None:
    with pytest.raises(TimeoutError):
        llm.generate("ab" * 32)
    with pytest.raises(TimeoutError):
        llm.chat([{"role": "user", "content": "ab" * 31}])
