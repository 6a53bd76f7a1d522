"""When a sequence ends: by its tokens (`StopChecker`) and by strings in its text (`StopStrings`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..sampling.params import SamplingParams

__all__ = ["FinishReason", "StopChecker", "StopHit", "StopStrings"]

#: "stop": end-of-sequence, a stop token or a stop string; "length": a limit on tokens.
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class StopHit:
    """Why a sequence ended.

    finish_reason: see `FinishReason`.
    stop_reason: the stop token id or stop string; None for end-of-sequence and for a limit.
    """

    finish_reason: FinishReason
    stop_reason: int | str | None = None


_EOS = StopHit("stop")
_LENGTH = StopHit("length")


class StopChecker:
    """Ends by token ids and token counts, of one request; holds no state, so its sequences share it.

    max_output_tokens: what the model's context leaves after the prompt; `params.max_tokens` may be lower.
    """

    __slots__ = ("_eos", "_max_tokens", "_min_tokens", "_stop_ids")

    def __init__(self, params: SamplingParams, *, eos_token_ids: Iterable[int], max_output_tokens: int) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = max_output_tokens if params.max_tokens is None else min(params.max_tokens, max_output_tokens)

    def check(self, token_id: int, num_output_tokens: int) -> StopHit | None:
        """Whether the sequence ends with `token_id`, its `num_output_tokens`-th output token (that one included).

        A stop token counts from `min_tokens` on (with the token itself); the limit is looked at last, so a stop token
        at the limit is a stop.
        """
        if num_output_tokens > self._min_tokens:
            if token_id in self._eos:
                return _EOS
            if token_id in self._stop_ids:
                return StopHit("stop", token_id)
        return _LENGTH if num_output_tokens >= self._max_tokens else None


class _Automaton:
    """Aho-Corasick over the stop strings: after any text, the state is the longest end of it that begins one of them.

    Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.

    step: state -> character -> next state, along the stop strings alone: memory grows with their length.
    fallback: state -> the one to go on from with a character that has no step: the longest proper end that has a state.
    longest_end: state -> the longest stop string that ends there.
    hold: state -> length of the longest end of the text that could still grow into a stop string.
    """

    __slots__ = ("fallback", "hold", "longest_end", "step")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.step: list[dict[str, int]] = [{}]
        self.longest_end: list[str | None] = [None]
        self.hold = [0]
        for string in strings:
            state = 0
            for depth, character in enumerate(string, start=1):
                if character not in self.step[state]:
                    self.step[state][character] = len(self.step)
                    self.step.append({})
                    self.longest_end.append(None)
                    self.hold.append(depth)
                state = self.step[state][character]
            self.longest_end[state] = string
        self.fallback = [0] * len(self.step)
        self._complete()

    def next(self, state: int, character: str) -> int:
        """The state after one more character: no more steps back, all in all, than steps forward."""
        while (following := self.step[state].get(character)) is None and state:
            state = self.fallback[state]
        return following or 0

    def _complete(self) -> None:
        """Fills in what happens at a mismatch, breadth first."""
        queue = deque(self.step[0].values())
        while queue:
            state = queue.popleft()
            suffix = self.fallback[state]
            self.longest_end[state] = self.longest_end[state] or self.longest_end[suffix]
            if not self.step[state]:  # a whole stop string, and no beginning of a longer one
                self.hold[state] = self.hold[suffix]
            for character, child in self.step[state].items():
                self.fallback[child] = self.next(suffix, character)
                queue.append(child)


@lru_cache(maxsize=64)
def _automaton(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)


class StopStrings:
    """Looks for stop strings in one sequence's text as it comes, in pieces of any size.

    The string that is complete first ends the text; of several complete at the same character, the longest. The outcome
    does not depend on how the text was cut into pieces. Held back is the longest end of the text that could become a
    stop string, and no more.

    matched: the stop string found, or None.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._automaton = _automaton(stop)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Takes more text, returns what may be shown. After a match everything is dropped.

        counts: False while `min_tokens` is not reached; a stop string completed meanwhile is text like any other.
        """
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        for position, character in enumerate(text):
            state = automaton.next(state, character)
            if counts and (found := automaton.longest_end[state]) is not None:
                self.matched = found
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(found)]
        self._state = state
        shown = self._held + text
        keep = len(shown) - automaton.hold[state]
        self._held = shown[keep:]
        return shown[:keep]

    def finish(self) -> str:
        """The sequence ended otherwise: returns what was held back."""
        held, self._held = self._held, ""
        return held
