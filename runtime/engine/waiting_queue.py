"""The sequences that wait, in order of (priority, arrival). Ended ones are skipped when they come to the front."""

from __future__ import annotations

import heapq

from .sequence import Sequence, SequenceState

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap with lazy deletion: O(log n) to add and to take, O(1) to withdraw.

    A sequence that waits for a running one to compute what they share stands aside: it has its place in the order, but
    `head` does not return it before `recall`, so that nobody looks at it in vain.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._queued: set[Sequence] = set()
        self._aside: dict[Sequence, Sequence] = {}  # who stands aside -> for whom
        self._awaited: dict[Sequence, list[tuple[int, tuple[int, int, int], Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._queued) + len(self._aside)

    @property
    def num_aside(self) -> int:
        """Sequences that stand aside."""
        return len(self._aside)

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence at the place that its order gives it."""
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._queued.add(sequence)

    def head(self) -> Sequence | None:
        """The sequence to admit next, left in the queue."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence in self._queued:
                return sequence
            heapq.heappop(self._heap)
        return None

    def set_aside(self, awaited: Sequence, until: int) -> None:
        """Puts the sequence that `head` just returned aside, until the awaited one offers its tokens up to `until`."""
        sequence = heapq.heappop(self._heap)[1]
        self._queued.discard(sequence)
        self._aside[sequence] = awaited
        heapq.heappush(self._awaited.setdefault(awaited, []), (until, sequence.order, sequence))

    def recall(self, awaited: Sequence, reached: int | None = None) -> list[tuple[Sequence, int]]:
        """Brings back those that stand aside for a sequence: until at most `reached`, or all because it stops running.

        Returns them, each with its `until`.
        """
        recalled: list[tuple[Sequence, int]] = []
        entries = self._awaited.get(awaited)
        if entries is None:
            return recalled
        while entries and (reached is None or entries[0][0] <= reached):
            until, _, sequence = heapq.heappop(entries)
            if self._aside.get(sequence) is awaited:
                del self._aside[sequence]
                self.push(sequence)
                recalled.append((sequence, until))
        if not entries:
            del self._awaited[awaited]
        return recalled

    def take(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands; O(n) unless it is the head or stands aside."""
        if self.head() is sequence:
            heapq.heappop(self._heap)
        elif sequence in self._queued:
            self._heap.remove((sequence.order, sequence))
            heapq.heapify(self._heap)
        self.withdraw(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it stands, if it does; the caller changes its state for good."""
        self._queued.discard(sequence)
        self._aside.pop(sequence, None)

    def in_order(self) -> list[Sequence]:
        """The waiting sequences in the order of admission."""
        queued = [(order, s) for order, s in self._heap if s in self._queued]
        aside = [(s.order, s) for s in self._aside]
        return [s for _, s in sorted(queued + aside, key=lambda item: item[0])]

    def awaited(self) -> list[Sequence]:
        """For whom others stand aside, for snapshots."""
        return list(self._aside.values())
