"""Guesses from the context against a plain search."""

from __future__ import annotations

from array import array
from itertools import cycle, islice

from hypothesis import given
from hypothesis import strategies as st
from pagegraft.runtime.engine.speculation import guess_from_context


def plain(tokens: list[int], limit: int) -> list[int]:
    """The longest run of newest tokens (4 down to 2) that occurred before; the latest such place."""
    for length in (4, 3, 2):
        newest = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(newest) == length and tokens[start : start + length] == newest:
                return list(islice(cycle(tokens[start + length :]), limit))
    return []


# Ids whose bytes run into one another: 1, 256, 65536 and their sums.
IDS = st.sampled_from([0, 1, 256, 257, 65536, 65537, 16777216])


@given(st.lists(IDS, max_size=40), st.integers(1, 6))
def test_the_latest_longest_match_is_continued(tokens: list[int], limit: int) -> None:
    assert guess_from_context(array("i", tokens), limit).tolist() == plain(tokens, limit)


def test_a_repetition_is_seen_from_its_third_token() -> None:
    assert guess_from_context(array("i", [5, 6, 7, 8, 5, 6]), 9).tolist() == [7, 8, 5, 6, 7, 8, 5, 6, 7]
    assert guess_from_context(array("i", [5, 6, 7, 8, 5]), 9).tolist() == []
