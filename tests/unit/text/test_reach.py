"""The least number of tokens of a text: never above what the library makes of it, and known where it should be."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagegraft.runtime.text.reach import Reach
from small_tokenizers import CORPUS, MAKERS
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

Change = Callable[[Backend], None]


def reach(backend: Backend) -> Reach | None:
    return Reach.of(json.loads(backend.to_str()))


def tokens(backend: Backend, text: str) -> int:
    return len(backend.encode(text, add_special_tokens=False).ids)


def byte_level(change: Change | None = None, *, without: str = "") -> Backend:
    """A byte-level tokenizer, with a change, or without tokens of some bytes."""
    if not without:
        backend = MAKERS["byte_level"]()
    else:
        alphabet = [piece for piece in pre_tokenizers.ByteLevel.alphabet() if piece not in without]
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        text = [line.encode("ascii", "ignore").decode() for line in CORPUS]
        backend.train_from_iterator(text, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    if change is not None:
        change(backend)
    return backend


def put(name: str, value: object) -> Change:
    return lambda backend: setattr(backend, name, value)


def byte_level_nfc() -> Backend:
    """As Qwen's, with an added token that its normaliser shortens."""
    backend = byte_level(put("normalizer", normalizers.NFC()))
    backend.add_tokens([AddedToken("e\u0301e\u0301e\u0301", normalized=True)])
    return backend


def byte_level_digits() -> Backend:
    """As SmolLM2's: without tokens of some control characters."""
    cuts = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return byte_level(put("pre_tokenizer", cuts), without="ĄĆēñ")


KNOWN: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "nfc": byte_level_nfc,
    "digits": byte_level_digits,
    "llama": MAKERS["llama"],
    "gemma": MAKERS["gemma"],
}

#: What comes to few tokens: long pieces, what composes, white space, control characters, rare ones.
PIECES = ["the ", "  ", "\n", "\x04", "\x06", "<tool call>", "<|im_end|>", "→é€", "e\u0301", "\u1100\u1161\u11a8", "K"]
PIECES += ["\u03b1\u0313\u0300\u0345", "\u212b", "\ufb03", "你", "😀", "\U000e0041", "</s>", "<0x41>", "▁", "Ġ", "1"]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KNOWN)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    backend = KNOWN[kind]()
    known = reach(backend)
    assert known is not None

    @settings(max_examples=150, deadline=None)
    @given(text=TEXTS, times=st.sampled_from([1, 2, 50, 1000]))
    def check(text: str, times: int) -> None:
        assert known.least_tokens(text * times) <= tokens(backend, text * times)

    check()
    for piece in [*PIECES, *backend.get_vocab()]:
        assert known.least_tokens(piece * 40) <= tokens(backend, piece * 40), piece
    assert known.least_tokens("x, y? " * 1000) > 10


def test_characters_without_a_token_do_not_count() -> None:
    backend = byte_level_digits()
    known = reach(backend)
    assert known is not None
    assert known.silent == "\x04\x06\x13"
    assert tokens(backend, "\x04\x06" * 5000) == 0
    assert known.least_tokens("\x04\x06" * 5000) == 0


def test_no_character_composes_more_than_four() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1))
    assert longest == 4


UNKNOWN: dict[str, Callable[[], Backend]] = {
    "strips": lambda: byte_level(put("normalizer", normalizers.Strip())),
    "deletes": lambda: byte_level(put("normalizer", normalizers.Replace("x", ""))),
    "shortens": lambda: byte_level(put("normalizer", normalizers.Replace("ab", "c"))),
    "pattern": lambda: byte_level(put("normalizer", normalizers.Replace(Regex("x+"), "y"))),
    "nested": lambda: byte_level(
        put("normalizer", normalizers.Sequence([normalizers.Sequence([normalizers.Strip()])]))
    ),
    "removes": lambda: byte_level(
        put(
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()]),
        )
    ),
    "white space": lambda: byte_level(
        put("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]))
    ),
    "no bytes": lambda: byte_level(put("pre_tokenizer", None)),
    "greedy token": lambda: byte_level(lambda b: b.add_tokens([AddedToken("<mask>", lstrip=True)])),
    "silent and normalised": lambda: byte_level(put("normalizer", normalizers.NFC()), without="ĄĆ"),
    "no continuation": lambda: byte_level(without="Ģ"),
    "unigram": MAKERS["unigram"],
    "word_piece": MAKERS["word_piece"],
    "word_level": MAKERS["no_decoder"],
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_nothing_is_claimed_of_what_leaves_out_text(kind: str) -> None:
    assert reach(UNKNOWN[kind]()) is None
