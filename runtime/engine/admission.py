"""Which waiting sequence may start beside those that run. Takes no block and no row; integers only."""

from __future__ import annotations

from math import isqrt

from .cache_manager import PrefixHit
from .lifecycle import Lifecycle
from .sequence import Sequence

__all__ = ["Admission"]


def _spare_blocks(num_running: int) -> int:
    """Blocks that are kept free for the growth of running sequences: min(n, 4 sqrt(n)).

    While some grow others end, so that what they hold together wanders like a sum of n independent terms. Measured on
    prompts of 16 to 512 and outputs of 16 to 256 tokens, blocks of 16: without spare ones a fifth of all requests is
    preempted; with these as few as with one for each sequence, which costs 4 % of the concurrency at n = 75.
    """
    return min(num_running, isqrt(16 * num_running))


class Admission(Lifecycle):
    """Looks through the waiting sequences in their order."""

    def next_admissible(self, promised: list[int]) -> tuple[Sequence, PrefixHit] | None:
        """The next sequence that fits beside what is promised, and its shared prefix; None when nobody may start.

        Sequences whose prefix a running one is computing are set aside on the way. Rows are kept for those that stand
        aside, because they come earlier.
        """
        while len(self._rows) > self.waiting.num_aside:
            head = self.waiting.head()
            if head is None:
                return None
            writer = self._writer(head)
            if writer is None:
                hit = self.cache.lookup(head)
                return (head, hit) if self.cache.fits(head, hit, promised) else None
            self.waiting.set_aside(writer, self._common_end(head, writer))
        return None

    def promised(self) -> list[int]:
        """By group, blocks kept for running sequences: for the tokens they have and, in full groups, to grow."""
        spare = _spare_blocks(len(self.running))
        promised = [0 if shape.window else spare for shape in self.cache.groups]
        for sequence in self.running:
            if sequence.num_tokens > sequence.capacity:
                for g, blocks in enumerate(self.cache.outstanding(sequence)):
                    promised[g] += blocks
        return promised

    def promise(self, promised: list[int], started: Sequence) -> None:
        """Adds to `promised` what a sequence that was just started makes of it."""
        more = _spare_blocks(len(self.running)) - _spare_blocks(len(self.running) - 1)
        for g, blocks in enumerate(self.cache.outstanding(started)):
            promised[g] += blocks + (0 if self.cache.groups[g].window else more)

    def _writer(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that is about to compute the very block behind a waiting one's known prefix."""
        node = self.cache.follow(sequence)
        start = len(sequence.matched) * self.cache.block_size
        end = start + self.cache.block_size
        if node is None or end >= sequence.num_tokens:
            return None
        # A node stands for all tokens up to it, so that only the next block is compared.
        for other in self.running:
            if (
                other.prefix is node
                and other.next_full == end <= other.num_tokens
                and other.tokens[start:end] == sequence.tokens[start:end]
            ):
                return other
        return None

    def _common_end(self, sequence: Sequence, writer: Sequence) -> int:
        """Length of the full blocks that a waiting sequence will be able to share with its writer, at least one more.

        Until the writer has offered them, or stops running, nobody need look at the waiting one.
        """
        size = self.cache.block_size
        mine, its = sequence.tokens.tobytes(), writer.tokens.tobytes()  # compared faster than arrays or memoryviews
        stride = size * sequence.tokens.itemsize
        equal = len(sequence.matched) + 1
        low, high = equal, min(sequence.num_tokens - 1, writer.num_tokens) // size
        while low < high:
            middle = (low + high + 1) // 2
            if mine[equal * stride : middle * stride] == its[equal * stride : middle * stride]:
                low = middle
            else:
                high = middle - 1
        return low * size
