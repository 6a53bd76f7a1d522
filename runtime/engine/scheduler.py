"""Decides what each step computes. Integers only: no arrays, no text, no model.

A step has one budget of tokens. First every running sequence that wants one token gets it, then unfinished prompts get
chunks, then waiting sequences are admitted, in order of (priority, arrival). What is left goes to guesses.

*Long* means that more than a whole budget is left to compute. The oldest long sequence gets half of what the decodes
leave (and what nobody else takes), so that short ones pass beside it; other long ones come after the short.

Fairness: let D < budget be the running sequences that want one token. (a) Each of them gets it in every step, unless
it is preempted. (b) The first sequence in order of (priority, arrival) is never preempted and, while it wants more,
computes at least ceil((budget - D) / 2) tokens a step or all that it wants. (c) A waiting sequence is admitted before
those of its priority that came later, except that it may wait for a running one that is computing its prefix. By (b)
every queue drains: the first sequence always ends, whatever arrives.

Preemption is by recomputation: the sequence gives up all blocks, keeps its tokens, and waits at its old place. The
victim is the sequence of lowest priority that arrived last. No sequence is admitted in a step that ran out of blocks,
and only when blocks for all of its tokens are there beside spare ones for the growth of those that run, so that
preemption and admission do not chase each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from .admission import Admission
from .cache_manager import CacheManager, PrefixHit
from .errors import ConfigurationError
from .plan import StepPlan
from .positions import window_block_bound
from .sequence import Sequence, SequenceState

__all__ = ["Guess", "Scheduler"]

#: (a sequence that wants one token, most tokens) -> guesses of what follows, perhaps none.
Guess = Callable[[Sequence, int], "array[int]"]


@dataclass(slots=True)
class _Draft:
    """The plan in the making."""

    budget: int
    counts: dict[Sequence, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    capped: Sequence | None = None  # the long sequence that takes what is left over
    out_of_blocks: bool = False

    def left(self) -> int:
        """Tokens of the budget that nobody has yet."""
        return self.budget - sum(self.counts.values())


class Scheduler(Admission):
    """Queues sequences and plans steps over a CacheManager. `max_sequences` may run at once."""

    def __init__(self, cache: CacheManager, *, max_step_tokens: int, max_sequences: int) -> None:
        if not 1 <= max_sequences <= max_step_tokens:
            raise ConfigurationError(
                f"max_num_seqs={max_sequences} must be between 1 and max_num_batched_tokens={max_step_tokens}: every "
                "running sequence needs a token of the budget in each step"
            )
        for shape in cache.groups:
            if shape.window and window_block_bound(shape.window, cache.max_chunk, cache.block_size) > shape.num_blocks:
                raise ConfigurationError(
                    f"{shape.num_blocks} blocks of {cache.block_size} tokens cannot hold one sequence's window of "
                    f"{shape.window} tokens beside a chunk of {cache.max_chunk}: give more --kv-memory"
                )
        super().__init__(cache, max_sequences)
        self.max_step_tokens = max_step_tokens
        self.guess: Guess | None = None  # set by the engine that verifies guesses

    # -- planning -------------------------------------------------------------------------------------------------

    def schedule(self, *, only: Sequence | None = None) -> StepPlan:
        """Plans the next step; the plan is empty only when no sequence wants a token.

        `only` is planned alone, whatever its turn, to find out whether it is the one that makes steps fail.
        Whatever is raised, the accounting is whole and nothing is offered that no step will compute.
        """
        draft = _Draft(self.max_step_tokens)
        try:
            if only is not None:
                self._plan_alone(draft, only)
            else:
                self._plan(draft)
            return self._freeze(draft)
        except BaseException:
            self._abandon()
            raise

    def _plan(self, draft: _Draft) -> None:
        self._yield_to_priority(draft)
        prompts = self._plan_decodes(draft)
        if prompts:
            self._plan_prompts(draft, prompts)
        self._register(draft)
        if len(self.waiting) and not draft.out_of_blocks:
            self._admit(draft)
        while not draft.counts and self.running and len(self.waiting):
            # Nobody who runs wants a token and nobody else fits beside them.
            self._drop(draft, self.running[-1])
            self._admit(draft)
        if draft.capped is not None:
            self._extend(draft, draft.capped)
        if self.guess is not None:
            self._speculate(draft, self.guess)

    def _abandon(self) -> None:
        """Takes a half-made plan back. Its table updates are lost, so that whoever runs starts over."""
        _, _, registrations = self.cache.take_changes()
        self.cache.undo(registrations)
        for sequence in self.running[:]:
            self.preempt(sequence)

    def _plan_decodes(self, draft: _Draft) -> list[Sequence]:
        """Plans one token for each running sequence that wants one; returns those that want more."""
        prompts: list[Sequence] = []
        counts = draft.counts
        for sequence in self.running[:]:
            start = sequence.num_computed
            wanted = sequence.num_tokens - start
            if wanted == 1:
                if start < sequence.capacity or self._grow(draft, sequence, start + 1):
                    counts[sequence] = 1
            elif wanted > 1:
                prompts.append(sequence)
        return prompts

    def _plan_prompts(self, draft: _Draft, prompts: list[Sequence]) -> None:
        """Plans chunks of running sequences that want more than one token."""
        long = [s for s in prompts if s.num_tokens - s.num_computed > self.max_step_tokens]
        short = [s for s in prompts if s.num_tokens - s.num_computed <= self.max_step_tokens]
        others = len(prompts) > 1 or len(self.waiting) > 0
        if long:
            left = draft.left()
            share = (left + (long[0] is prompts[0])) // 2  # the odd token goes to the first in order
            self._plan_chunk(draft, long[0], share if others else left)
            draft.capped = long[0]
        for sequence in short + long[1:]:
            self._plan_chunk(draft, sequence, draft.left())

    def _plan_chunk(self, draft: _Draft, sequence: Sequence, limit: int) -> None:
        """Plans up to `limit` tokens of a running sequence."""
        count = min(limit, self.cache.max_chunk, sequence.num_tokens - sequence.num_computed)
        if count > 0 and self._grow(draft, sequence, sequence.num_computed + count):
            draft.counts[sequence] = count

    def _grow(self, draft: _Draft, sequence: Sequence, end: int) -> bool:
        """Gets blocks up to `end`, from later sequences when it must. False when the sequence itself had to go."""
        if sequence.state != SequenceState.RUNNING:
            return False  # it was a victim earlier in this step
        while not self.cache.grow(sequence, end):
            victim = self.running[-1]
            draft.out_of_blocks = True
            self._drop(draft, victim)
            if victim is sequence:
                return False
        return True

    def _drop(self, draft: _Draft, victim: Sequence) -> None:
        """Preempts a sequence and takes it out of the plan.

        A copy planned for it stays in the plan and does no harm: whoever gets the target has not written it yet.
        """
        draft.counts.pop(victim, None)
        self.preempt(victim)
        draft.preempted.append(victim)

    def _register(self, draft: _Draft) -> None:
        """Offers the blocks that this step fills. Nothing is preempted after this point of a step."""
        if self.cache.share_prefixes:
            for sequence, count in draft.counts.items():
                self.offer(sequence, sequence.num_computed + count)

    # -- admission ------------------------------------------------------------------------------------------------

    def _yield_to_priority(self, draft: _Draft) -> None:
        """Preempts sequences of lower priority than the first waiting one until that one can be admitted."""
        head = self.waiting.head()
        while head and self.running and self.running[-1].priority > head.priority:
            if self._rows and self.cache.fits(head, self.cache.lookup(head), self.promised()):
                return
            self._drop(draft, self.running[-1])

    def _admit(self, draft: _Draft) -> None:
        """Starts waiting sequences in order while rows, budget and blocks last."""
        promised = self.promised()
        left = draft.left()
        while left > 0 and (found := self.next_admissible(promised)) is not None:
            left -= self._start(draft, *found, left)
            self.promise(promised, found[0])

    def _start(self, draft: _Draft, sequence: Sequence, hit: PrefixHit, left: int) -> int:
        """Admits a sequence and plans its first chunk; returns the chunk's size."""
        self.start(sequence, hit)
        wanted = sequence.num_tokens - sequence.num_computed
        count = min(left, wanted, self.cache.max_chunk)
        if wanted > self.max_step_tokens and len(self.waiting):
            count = min(count, (left + 1) // 2)
            draft.capped = draft.capped or sequence
        end = sequence.num_computed + count
        if not self.cache.grow(sequence, end):
            raise AssertionError(f"{sequence} fitted but could not grow to {end}: block accounting is wrong")
        draft.counts[sequence] = count
        self.offer(sequence, end)
        return count

    def _extend(self, draft: _Draft, sequence: Sequence) -> None:
        """Gives what is left of the budget to a long sequence whose chunk was capped."""
        planned = draft.counts.get(sequence)
        if planned is None:
            return
        wanted = sequence.num_tokens - sequence.num_computed
        count = min(planned + draft.left(), wanted, self.cache.max_chunk)
        end = sequence.num_computed + count
        if count > planned and self.cache.grow(sequence, end):
            draft.counts[sequence] = count
            self.offer(sequence, end)

    def _plan_alone(self, draft: _Draft, sequence: Sequence) -> None:
        if sequence.state == SequenceState.RUNNING:
            self._plan_chunk(draft, sequence, draft.budget)
            self._register(draft)
            return
        hit = self.cache.lookup(sequence)
        while not (self._rows and self.cache.fits(sequence, hit, self.promised())):
            self._drop(draft, self.running[-1])
        self._start(draft, sequence, hit, draft.budget)

    def _speculate(self, draft: _Draft, guess: Guess) -> None:
        """Gives what nobody else wants of the budget to guesses, for sequences that want one token."""
        left = draft.left()
        for sequence in [s for s, count in draft.counts.items() if count == 1]:
            room = min(left, sequence.max_tokens - sequence.num_tokens - 1)
            if room < 1 or sequence.num_tokens - sequence.num_computed != 1:
                continue
            tokens = guess(sequence, room)
            # Guessed tokens are not offered to others: a wrong one is overwritten in its slot.
            if tokens and self.cache.grow(sequence, sequence.num_tokens + len(tokens)):
                sequence.guess(tokens)
                draft.counts[sequence] = 1 + len(tokens)
                left -= len(tokens)

    # -- the plan and its end -------------------------------------------------------------------------------------

    def _freeze(self, draft: _Draft) -> StepPlan:
        sequences = tuple(draft.counts)
        counts = tuple(draft.counts.values())
        starts = tuple([s.num_computed for s in sequences])
        samples = [i for i, s in enumerate(sequences) if starts[i] + counts[i] == s.num_tokens]
        copies, updates, registrations = self.cache.take_changes()
        self.counters.steps += 1
        return StepPlan(
            number=self.counters.steps,
            sequences=sequences,
            starts=starts,
            counts=counts,
            samples=tuple(samples),
            num_tokens=sum(counts),
            copies=copies,
            table_updates=updates,
            registrations=registrations,
            preempted=tuple(draft.preempted),
        )

    def commit(self, plan: StepPlan) -> None:
        """The step ran: its tokens are computed. Sequences that ended meanwhile are left alone."""
        running = SequenceState.RUNNING
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            if sequence.state is running:
                sequence.num_computed += count
        self.counters.computed_tokens += plan.num_tokens

    def rollback(self, plan: StepPlan) -> None:
        """The step failed: what it offered is withdrawn, and its sequences start over from their tokens."""
        self.cache.undo(plan.registrations)
        for sequence in plan.sequences:
            if sequence.state == SequenceState.RUNNING:
                self.preempt(sequence)
