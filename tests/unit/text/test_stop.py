"""Stop strings against a brute-force reading of the whole text, and stop tokens."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from pagegraft.runtime.sampling import SamplingParams
from pagegraft.runtime.text import StopChecker, StopHit, StopStrings, TextStream, Tokenizer


def brute_force(text: str, stops: tuple[str, ...], *, counts_from: int = 0) -> tuple[str, str, str] | None:
    """(text before the stop string, the stop string, text with it); looks at every prefix of the text in turn."""
    for end in range(counts_from + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest, text[:end]
    return None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string without being all of it."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(1, len(text) + 1) if text[-length:] in beginnings), default=0)


def random_case(rng: random.Random) -> tuple[str, tuple[str, ...], list[str]]:
    alphabet = "ab" if rng.random() < 0.7 else "ab\n😀"
    text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
    stops = tuple("".join(rng.choices(alphabet, k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 5)))
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
    bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
    return text, stops, [text[start:end] for start, end in bounds]


def test_agrees_with_brute_force_however_the_text_is_cut() -> None:
    rng = random.Random(1)
    matches = 0
    for _ in range(6000):
        text, stops, pieces = random_case(rng)
        expected = brute_force(text, stops)
        matches += expected is not None
        for include in (False, True):
            strings = StopStrings(stops, include=include)
            shown = "".join(strings.push(piece) for piece in pieces) + strings.finish()
            assert strings.matched == (expected[1] if expected else None)
            assert shown == (expected[2 if include else 0] if expected else text), (text, stops, pieces)
    assert 1000 < matches < 5500, "the cases should hold both outcomes"


def test_holds_the_longest_beginning_of_a_stop_string_and_nothing_more() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        _, stops, pieces = random_case(rng)
        strings = StopStrings(stops)
        read = shown = ""
        counts = rng.random() < 0.7
        for piece in pieces:
            read += piece
            shown += strings.push(piece, counts=counts)
            if strings.matched is not None:
                break
            assert len(read) - len(shown) == longest_beginning(read, stops), (read, stops)
            assert read.startswith(shown)


def test_before_min_tokens_a_stop_string_is_text() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        text, stops, pieces = random_case(rng)
        first = rng.randrange(len(pieces) + 1)
        expected = brute_force(text, stops, counts_from=len("".join(pieces[:first])))
        strings = StopStrings(stops)
        shown = "".join(strings.push(piece, counts=i >= first) for i, piece in enumerate(pieces)) + strings.finish()
        assert strings.matched == (expected[1] if expected else None), (text, stops, pieces, first)
        assert shown == (expected[0] if expected else text)


def test_memory_grows_with_the_length_of_the_stop_strings() -> None:
    strings = tuple(chr(0x4E00 + i) + "a" * 99 for i in range(100))
    tracemalloc.start()
    try:
        StopStrings(strings)
        assert tracemalloc.get_traced_memory()[1] < 1000 * sum(map(len, strings))
    finally:
        tracemalloc.stop()


def test_nothing_is_shown_after_a_match() -> None:
    strings = StopStrings(("END",))
    assert [strings.push(piece) for piece in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert strings.finish() == ""
    assert strings.matched == "END"


@pytest.mark.parametrize("kind", ["byte_level", "llama", "unigram_bytes", "word_piece"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_token_borders(tokenizers_by_kind: dict[str, Tokenizer], kind: str, include: bool) -> None:
    """Every substring of a text as the stop string, through the tokenizer."""
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the quick brown fox, and 你好 the end", add_special_tokens=False)
    text = tokenizer.decode(ids)
    for start in range(0, len(text), 2):
        for length in (1, 2, 5, 9):
            stop = text[start : start + length]
            params = SamplingParams(stop=stop, include_stop_str_in_output=include, max_tokens=None)
            stream = TextStream(tokenizer, params)
            shown = ""
            for token_id in ids:
                shown += stream.push(token_id)
                if stream.hit:
                    break
            shown += stream.finish()
            expected = text[: text.index(stop) + (len(stop) if include else 0)]
            assert shown == stream.text == expected
            assert stream.hit == StopHit("stop", stop)


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "unigram", "word_piece"])
def test_any_tokens_and_any_stop_strings(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    """Random ids and random pieces of their text as stop strings, against a reading of the whole decoding."""
    tokenizer = tokenizers_by_kind[kind]
    rng = random.Random(4)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        text = tokenizer.decode(ids)
        starts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 4))]
        stops = tuple(filter(None, (text[start : start + rng.randrange(1, 6)] for start in starts))) or ("zzz",)
        stream = TextStream(tokenizer, SamplingParams(stop=stops))
        shown = ""
        for token_id in ids:
            shown += stream.push(token_id)
            if stream.hit:
                break
        shown += stream.finish()
        expected = brute_force(text, stops)
        assert shown == stream.text == (expected[0] if expected else text), (ids, stops)
        assert stream.hit == (StopHit("stop", expected[1]) if expected else None)


def check(token_id: int, count: int, *, max_output_tokens: int = 100, **params: object) -> StopHit | None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    checker = StopChecker(sampling, eos_token_ids=[2, 9], max_output_tokens=max_output_tokens)
    return checker.check(token_id, count)


def test_stop_tokens_and_limits() -> None:
    assert check(5, 1) is None
    assert check(2, 1) == StopHit("stop")
    assert check(9, 16) == StopHit("stop"), "a stop at the limit is a stop"
    assert check(5, 16) == StopHit("length")
    assert check(5, 40, max_tokens=None, max_output_tokens=40) == StopHit("length")
    assert check(5, 39, max_tokens=None, max_output_tokens=40) is None
    assert check(5, 7, max_output_tokens=7) == StopHit("length"), "the context is a limit too"
    assert check(2, 3, ignore_eos=True) is None
    assert check(7, 3, stop_token_ids=[7]) == StopHit("stop", 7)
    assert check(7, 3, stop_token_ids=[7], min_tokens=3) is None
    assert check(7, 4, stop_token_ids=[7], min_tokens=3) == StopHit("stop", 7)
    assert check(2, 3, min_tokens=3) is None


def test_a_stop_string_counts_from_the_token_after_min_tokens(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["no_decoder"]
    ids = [tokenizer.token_to_id("a")] * 5
    for min_tokens, text in ((0, ""), (1, "a "), (2, "a a ")):
        stream = TextStream(tokenizer, SamplingParams(stop="a", min_tokens=min_tokens))
        for token_id in ids:
            assert token_id is not None
            stream.push(token_id)
            if stream.hit:
                break
        assert stream.text == text
        assert stream.hit == StopHit("stop", "a")


@pytest.mark.parametrize(("include", "text"), [(False, "the dog"), (True, "the dog and")])
def test_the_text_of_a_stop_token(tokenizers_by_kind: dict[str, Tokenizer], include: bool, text: str) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    *ids, last = tokenizer.encode("the dog and", add_special_tokens=False)
    params = SamplingParams(stop_token_ids=[last], include_stop_str_in_output=include)
    stream = TextStream(tokenizer, params)
    shown = "".join(map(stream.push, ids)) + stream.finish(last, StopHit("stop", last))
    assert shown == stream.text == text


def test_a_stop_string_completed_by_the_last_token_goes_before_the_limit(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    *ids, last = tokenizer.encode("the dog and", add_special_tokens=False)
    stream = TextStream(tokenizer, SamplingParams(stop="g a"))
    shown = "".join(map(stream.push, ids)) + stream.finish(last, StopHit("length"))
    assert (shown, stream.hit) == ("the do", StopHit("stop", "g a"))


def test_a_string_that_did_not_become_a_stop_string_is_shown_at_the_end(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    stream = TextStream(tokenizer, SamplingParams(stop="dog!"))
    assert "".join(map(stream.push, ids)) == "the "
    assert stream.finish() == "dog"
    assert stream.text == "the dog"
    assert stream.hit is None
