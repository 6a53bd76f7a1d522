"""One stream of tokens and where the engine stands with it. There are no phases: `num_computed` tokens have their keys
and values in the cache, and the sequence wants `num_tokens`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from .prefix_index import PrefixNode

__all__ = ["NO_ROW", "Sequence", "SequenceState"]

NO_ROW = -1


class SequenceState(IntEnum):
    """WAITING holds no block and no row; RUNNING holds a row; FINISHED is left to its reader.

    PARKED holds nothing and waits for nothing: it was preempted when it wanted no token (a beam ahead of the others).
    """

    WAITING = 0
    RUNNING = 1
    PARKED = 2
    FINISHED = 3


class Sequence:
    """Integers of one sequence. Owned by the scheduler; `owner` is the engine's and is never looked at here.

    `max_tokens` is the length, prompt included, at which it ends; lower `priority` values run first.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cache_salt",
        "capacity",
        "finish_reason",
        "index",
        "matched",
        "max_tokens",
        "next_full",
        "num_cached_tokens",
        "num_computed",
        "num_guesses",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "order",
        "owner",
        "prefix",
        "priority",
        "read_cache",
        "released",
        "request_id",
        "row",
        "shares_tail",
        "state",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Iterable[int],
        max_tokens: int,
        *,
        index: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        read_cache: bool = True,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.priority = priority
        self.arrival = 0
        self.order: tuple[int, int, int] = (priority, 0, index)
        self.tokens: array[int] = array("i", prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.num_tokens = self.num_prompt_tokens
        self.max_tokens = max_tokens
        self.num_computed = 0
        self.num_guesses = 0  # tokens at the end that the running step is to verify; none between steps
        self.num_cached_tokens = -1  # -1: never admitted yet
        self.num_preemptions = 0
        self.cache_salt = cache_salt
        self.read_cache = read_cache
        self.state = SequenceState.WAITING
        self.finish_reason: str | None = None
        self.owner: Any = None
        # What the cache manager keeps: blocks by group (-1 where freed behind a window), how many of them were freed,
        # tokens that fit into the blocks, the newest full block's node and the length at which the next one is full.
        self.row = NO_ROW
        self.blocks: tuple[list[int], ...] = ()
        self.released: list[int] = []
        self.capacity = 0
        self.prefix: PrefixNode | None = None
        self.next_full = 0
        self.shares_tail = False
        # While it waits, the nodes that its tokens were found under when last looked for.
        self.matched: list[PrefixNode] = []

    def append(self, token: int) -> None:
        """Adds a sampled token."""
        self.tokens.append(token)
        self.num_tokens += 1

    def guess(self, tokens: array[int]) -> None:
        """Adds guessed tokens for one step."""
        self.tokens.extend(tokens)
        self.num_tokens += len(tokens)
        self.num_guesses = len(tokens)

    def take_guesses(self) -> array[int]:
        """Removes the guessed tokens and returns them."""
        known = self.num_tokens - self.num_guesses
        guesses = self.tokens[known:]
        del self.tokens[known:]
        self.num_tokens, self.num_guesses = known, 0
        return guesses

    def discard(self, reason: str) -> None:
        """Ends a sequence that was never given to a scheduler."""
        self.state = SequenceState.FINISHED
        self.finish_reason = reason

    @property
    def is_finished(self) -> bool:
        """True once a reason to finish is known."""
        return self.state == SequenceState.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, index={self.index}, {self.state.name}, "
            f"computed={self.num_computed}/{self.num_tokens})"
        )
