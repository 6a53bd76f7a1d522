"""The states of sequences: who waits, who runs and in which row, who ended. Decides nothing; integers only."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from .cache_manager import CacheManager, PrefixHit
from .errors import RequestError
from .positions import blocks_for
from .sequence import NO_ROW, Sequence, SequenceState
from .waiting_queue import WaitingQueue

__all__ = ["Lifecycle", "SchedulerCounters"]

_ORDER = attrgetter("order")


@dataclass(slots=True)
class SchedulerCounters:
    """Monotone counts since the start. Recomputation after preemption never counts as query or hit."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens of first admissions
    prefix_hits: int = 0  # of these, tokens found in the cache
    computed_tokens: int = 0
    steps: int = 0


class Lifecycle:
    """Queue, rows and blocks of all unfinished sequences; every transition leaves the accounting whole."""

    def __init__(self, cache: CacheManager, max_sequences: int) -> None:
        self.cache = cache
        self.max_sequences = max_sequences
        self.running: list[Sequence] = []  # in order of (priority, arrival)
        self.waiting = WaitingQueue()
        self.counters = SchedulerCounters()
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """True while any sequence is unfinished."""
        return bool(self.running) or len(self.waiting) > 0

    def free_rows(self) -> tuple[int, ...]:
        """Rows of the block tables that no sequence has, for snapshots."""
        return tuple(self._rows)

    def check(self, sequence: Sequence) -> None:
        """Raises RequestError when the sequence could never finish, however empty the pools."""
        if sequence.num_tokens == 0:
            raise RequestError("the prompt is empty: it needs at least one token")
        # The last token is sampled but never computed.
        needed = max(sequence.max_tokens - 1, sequence.num_tokens)
        for shape in self.cache.groups:
            if shape.window is None and blocks_for(needed, self.cache.block_size) > shape.num_blocks:
                raise RequestError(
                    f"the request needs {needed} tokens of cache ({sequence.num_tokens} of prompt) and the pool holds "
                    f"{shape.num_blocks * self.cache.block_size}: shorten it, or give more --kv-memory"
                )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises RequestError, and queues nothing, when it can never run."""
        self.check(sequence)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.order = (sequence.priority, self._arrivals, sequence.index)
        self.waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence in whatever state it is and frees what it holds. Ending it again changes nothing."""
        if sequence.state == SequenceState.RUNNING:
            self._leave(sequence)
        elif sequence.state == SequenceState.WAITING:
            self.waiting.withdraw(sequence)
            sequence.matched = []
        elif sequence.state == SequenceState.FINISHED:
            return
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts `child` as a copy of `parent` that shares its blocks; without a free row it waits to be recomputed.

        `child.tokens` begin with the parent's computed tokens, and `child.index` is unique in the request.
        """
        child.arrival = parent.arrival
        child.order = (child.priority, child.arrival, child.index)
        child.num_cached_tokens = parent.num_cached_tokens
        if parent.state != SequenceState.RUNNING or not self._rows:
            self.waiting.push(child)
            return
        self.cache.fork(parent, child, self._rows.pop())
        child.state = SequenceState.RUNNING
        insort(self.running, child, key=_ORDER)

    def offer(self, sequence: Sequence, end: int) -> None:
        """Offers the blocks that are full once a running sequence has computed tokens up to `end` to all others."""
        if end >= sequence.next_full:
            self.cache.register(sequence, end)
            self._recall(sequence, self.waiting.recall(sequence, sequence.next_full - self.cache.block_size))

    def _recall(self, writer: Sequence, recalled: list[tuple[Sequence, int]]) -> None:
        """Tells those that stood aside for `writer` what it has computed of what they share: no need to look for it."""
        if recalled:
            chain = self.cache.chain_of(writer)
            for sequence, until in recalled:
                sequence.matched = chain[: until // self.cache.block_size]

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._recall(sequence, self.waiting.recall(sequence))
        self.cache.release(sequence)
        self._rows.append(sequence.row)
        sequence.row = NO_ROW

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence but its tokens, and queues it again at its old place.

        One that wants no token is parked instead.
        """
        self._leave(sequence)
        sequence.take_guesses()
        wanted = sequence.num_tokens - sequence.num_computed
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        if wanted:
            self.waiting.push(sequence)
        else:
            sequence.state = SequenceState.PARKED

    def resume(self, sequence: Sequence) -> None:
        """Queues a sequence that was parked, now that it wants a token; leaves any other as it is."""
        if sequence.state == SequenceState.PARKED:
            self.waiting.push(sequence)

    def start(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Gives a waiting sequence a row and the blocks of its shared prefix."""
        self.cache.admit(sequence, self._rows[-1], hit)
        self._rows.pop()
        self.waiting.take(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_ORDER)
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = sequence.num_computed
            self.counters.prefix_queries += sequence.num_tokens
            self.counters.prefix_hits += sequence.num_computed
