"""The sequences that wait, in order of (priority, arrival). Ended ones are skipped when they come to the front."""

from __future__ import annotations

import heapq

from .sequence import Sequence, SequenceState

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap with lazy deletion: O(log n) to add and to take, O(1) to withdraw."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._queued: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._queued)

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

    def pop(self) -> Sequence:
        """Takes the sequence that `head` just returned."""
        sequence = heapq.heappop(self._heap)[1]
        self._queued.discard(sequence)
        return sequence

    def take(self, sequence: Sequence) -> None:
        """Takes a sequence out for good or not, wherever it stands; O(n) unless it is the head."""
        if self.head() is sequence:
            self.pop()
            return
        self._heap.remove((sequence.order, sequence))
        heapq.heapify(self._heap)
        self._queued.discard(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it stands, if it does; the caller changes its state for good."""
        self._queued.discard(sequence)

    def in_order(self) -> list[Sequence]:
        """The waiting sequences in the order of admission."""
        return [s for _, s in sorted(self._heap, key=lambda item: item[0]) if s in self._queued]
