"""The sequences that wait, in order of (priority, arrival). Ended ones are skipped when they come to the front."""

from __future__ import annotations

import heapq

from .sequence import Sequence, SequenceState

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap with lazy deletion: O(log n) to add and to take, O(1) to withdraw."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence at the place that its order gives it."""
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._size += 1

    def head(self) -> Sequence | None:
        """The sequence to admit next, left in the queue."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state == SequenceState.WAITING:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Takes the sequence that `head` just returned."""
        self._size -= 1
        return heapq.heappop(self._heap)[1]

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it stands; the caller changes its state."""
        self._size -= 1

    def in_order(self) -> list[Sequence]:
        """The waiting sequences in the order of admission."""
        return [s for _, s in sorted(self._heap, key=lambda item: item[0]) if s.state == SequenceState.WAITING]
