"""Incremental detokenisation against the `tokenizers` library's decoding of the whole list."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagegraft.runtime.text import Tokenizer
from pagegraft.runtime.text.detokenizer import MAX_HELD_BYTES
from small_tokenizers import CORPUS, MAKERS, WINDOWED


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)  # type: ignore[arg-type]
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def random_ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Ids of the vocabulary and a few that do not exist, with runs of byte tokens no longer than are held."""
    ids: list[int] = []
    run = 0
    for _ in range(length):
        token_id = rng.randrange(tokenizer.vocab_size + 3)
        is_byte = (tokenizer.id_to_token(token_id) or "").startswith("<0x")
        keeps_run = is_byte or tokenizer.id_to_token(token_id) is None or token_id in tokenizer.special_token_ids
        run = run + 1 if keeps_run else 0
        if run < MAX_HELD_BYTES:
            ids.append(token_id)
    return ids


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_ids_add_up_to_the_whole_decoding(tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
    rng = random.Random(7)
    for _ in range(150):
        ids = random_ids(tokenizer, rng, rng.randrange(40))
        parts = stream(tokenizer, ids, skip_special_tokens=skip_special_tokens)
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MAKERS))
@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_any_ids_add_up_to_the_whole_decoding(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=MAX_HELD_BYTES))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", CORPUS[:6])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    whole_characters = [part for part in parts[:-1] if "\ufffd" in part]
    assert not whole_characters, "half a character was shown"


def test_output_continues_its_prompt(tokenizer: Tokenizer) -> None:
    """Whatever the cut between prompt and output: the prompt's text and the output's add up; no space is lost."""
    rng = random.Random(3)
    for _ in range(60):
        ids = random_ids(tokenizer, rng, 24)
        cut = rng.randrange(len(ids) + 1)
        whole = tokenizer.decode(ids)
        before = tokenizer.detokenizer()
        shown_of_prompt = "".join(before.push(token_id) for token_id in ids[:cut])
        held = before.end_prompt()
        if held and "\ufffd" in whole:
            continue  # with the output's bytes, the library takes the prompt's characters back
        shown_of_prompt += held
        output = "".join(stream(tokenizer, ids[cut:], prompt_token_ids=ids[:cut]))
        assert shown_of_prompt + output == whole


@pytest.mark.parametrize("kind", ["llama", "gemma", "byte_level"])
def test_the_prompts_last_character_is_no_output(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    """Also where the prompt ends in byte tokens, and where a character is cut in two."""
    tokenizer = tokenizers_by_kind[kind]
    prompt = tokenizer.encode("the 😀", add_special_tokens=False)
    both = tokenizer.encode("the 😀😃", add_special_tokens=False)
    assert both[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, both[len(prompt) :], prompt_token_ids=prompt)) == "😃"
    assert "".join(stream(tokenizer, [], prompt_token_ids=prompt)) == ""
    assert "".join(stream(tokenizer, prompt[-1:], prompt_token_ids=prompt[:-1])) == "😀"


def test_a_continuation_keeps_its_leading_space(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "llama", "unigram", "word_piece"):
        tokenizer = tokenizers_by_kind[kind]
        prompt = tokenizer.encode("the dog", add_special_tokens=False)
        both = tokenizer.encode("the dog and", add_special_tokens=False)
        assert both[: len(prompt)] == prompt
        assert "".join(stream(tokenizer, both[len(prompt) :], prompt_token_ids=prompt)) == " and", kind


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("llama", ["▁", "▁", "▁the"]),  # one space goes from the start, not all
        ("llama", ["<0x20>", "<0x20>", "▁the"]),
        ("unigram_bytes", ["<0xE2>", "<0x96>", "<0x81>", "<0x41>", "▁the"]),  # a spelled-out mark at the start
        ("unigram_bytes", ["▁the", "<0xE2>", "<0x96>", "<0x81>", "<0x41>"]),
        ("unigram_bytes", ["<0xFF>", "▁the"]),
        ("word_piece", ["n't", ".", "do not", "'s", "##e"]),
    ],
)
def test_beginnings_that_chance_seldom_finds(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, tokens: list[str]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    known = [tokenizer.token_to_id(token) for token in tokens]
    ids = [token_id for token_id in known if token_id is not None]
    assert len(ids) >= len(tokens) - 1
    for end in range(len(ids) + 1):
        assert "".join(stream(tokenizer, ids[:end])) == tokenizer.decode(ids[:end])


@pytest.mark.parametrize(("kind", "most"), [("byte_level", 3), ("llama", MAX_HELD_BYTES), ("gemma", MAX_HELD_BYTES)])
def test_what_is_held_is_bounded(tokenizers_by_kind: dict[str, Tokenizer], kind: str, most: int) -> None:
    """A long text of nothing but byte tokens comes out all along."""
    tokenizer = tokenizers_by_kind[kind]
    text = "😀你好한국🎉" * 20
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False) if (tokenizer.id_to_token(i) or "")[0] != "▁"]
    detokenizer = tokenizer.detokenizer()
    shown = pushed = 0
    for token_id in ids:
        spelled = tokenizer.id_to_token(token_id) or ""
        pushed += 1 if spelled.startswith("<0x") else len(spelled)
        shown += len(detokenizer.push(token_id).encode())
        assert pushed - shown <= most
    assert shown + len(detokenizer.finish().encode()) == len(text.encode())


def test_a_long_run_of_bytes_that_goes_bad_keeps_what_was_shown(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["gemma"]
    byte = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in ("é" * 40).encode() + b"\xff"]
    shown = "".join(stream(tokenizer, ids))
    assert shown.startswith("é" * ((81 - MAX_HELD_BYTES) // 2))
    assert shown.endswith("\ufffd")
    assert len(shown.replace("é", "")) <= MAX_HELD_BYTES


def test_an_unfinished_character_is_one_replacement_at_the_end(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = [tokenizer.token_to_id(token) for token in ("a", "ð", "Ł", "ĺ")]
    assert None not in ids
    assert stream(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("kind", list(WINDOWED))
def test_other_decoders_go_by_a_window(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(3, tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "unigram_bytes", "word_piece", "bpe_suffix"])
def test_bytes_of_tokens_add_up_to_the_text(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    for text in ["the dog", *CORPUS[:6]] if kind != "bpe_suffix" else ["a", "b"]:
        ids = tokenizer.encode("a " + text, add_special_tokens=False)
        first = tokenizer.decode(ids[:1]).encode()
        rest = b"".join(map(tokenizer.token_bytes, ids[1:]))
        assert first + rest == tokenizer.decode(ids, skip_special_tokens=False).encode()


def test_bytes_of_a_part_of_a_character(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    for kind, token in (("byte_level", "ð"), ("llama", "<0xF0>")):
        tokenizer = tokenizers_by_kind[kind]
        token_id = tokenizer.token_to_id(token)
        assert token_id is not None
        assert tokenizer.token_bytes(token_id) == b"\xf0"
        assert tokenizer.token_bytes(tokenizer.vocab_size + 1) == b""
