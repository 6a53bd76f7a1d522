"""Counts of a sequence's tokens, kept token by token, and what they do to its logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams

__all__ = ["BannedSequences", "TokenPenalties"]

_INITIAL_CAPACITY: Final = 64


class TokenPenalties:
    """Repetition penalty over prompt and output, frequency and presence penalty over the output.

    Holds each distinct token once (`ids`, with its number of occurrences in the output), not a count per vocabulary
    entry: the memory and time of a sequence grow with its own tokens.
    """

    __slots__ = ("_counts", "_frequency", "_ids", "_presence", "_repetition", "_slot_of", "_used")

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        # Prompt tokens matter to the repetition penalty alone.
        seen = list(dict.fromkeys(prompt_token_ids)) if params.repetition_penalty != 1.0 else []
        self._slot_of = {token_id: slot for slot, token_id in enumerate(seen)}
        self._used = len(seen)
        self._ids = np.zeros(max(_INITIAL_CAPACITY, 2 * self._used), np.int64)
        self._ids[: self._used] = seen
        self._counts = np.zeros(self._ids.size, np.float32)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether any of the three penalties does something."""
        neutral = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
        return not neutral

    def append(self, token_id: int) -> None:
        """Counts one output token."""
        slot = self._slot_of.setdefault(token_id, self._used)
        if slot == self._used:
            if slot == self._ids.size:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token_id
            self._used += 1
        self._counts[slot] += 1

    def apply(self, row_V: NDArray[np.float32]) -> None:
        """Changes the logits of seen tokens in place: first repetition, then frequency, then presence."""
        ids, counts = self._ids[: self._used], self._counts[: self._used]
        logits = row_V[ids]
        if self._repetition != 1.0:
            with np.errstate(over="ignore"):  # a mask may be the lowest float32: -inf is as good
                logits = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        if self._frequency != 0.0:
            logits -= self._frequency * counts
        if self._presence != 0.0:
            logits -= self._presence * (counts > 0)
        row_V[ids] = logits


class BannedSequences:
    """Token sequences that may not be completed by the output; one of a single token is banned always."""

    __slots__ = ("_always", "_by_prefix", "_longest", "_recent")

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self._always = [ids[0] for ids in sequences if len(ids) == 1]
        self._by_prefix: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in sequences:
            if prefix:
                self._by_prefix.setdefault(tuple(prefix), []).append(last)
        self._longest = max(map(len, self._by_prefix), default=0)
        self._recent: tuple[int, ...] = ()

    def append(self, token_id: int) -> None:
        """Takes up one output token."""
        self._recent = (*self._recent, token_id)[-self._longest :] if self._longest else ()

    def next_banned(self) -> list[int]:
        """Token ids that may not come next."""
        banned = list(self._always)
        for start in range(len(self._recent)):
            banned += self._by_prefix.get(self._recent[start:], [])
        return banned
