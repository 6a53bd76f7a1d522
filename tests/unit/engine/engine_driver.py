"""A fake model over the scheduler: integers alone, no arrays.

It keeps, for every block of every group, which (sequence of tokens, position) each slot holds, written by the plan's
own tables in the plan's order; reading a token's context back through the tables must give the sequence's own tokens.
The next token is a function of everything before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from pagegraft.runtime.engine.cache_manager import CacheManager, GroupShape
from pagegraft.runtime.engine.invariants import snapshot, violations
from pagegraft.runtime.engine.plan import StepPlan
from pagegraft.runtime.engine.prefix_index import Digest, chained_digest
from pagegraft.runtime.engine.scheduler import Scheduler
from pagegraft.runtime.engine.sequence import Sequence, SequenceState

VOCAB = 5


def next_token(tokens: Items[int], index: int = 0) -> int:
    """What follows `tokens`; `index` tells the choices of a request apart."""
    total = index
    for position, token in enumerate(tokens):
        total = (total * 31 + (position + 1) * (token + 1)) % 1_000_003
    return total % VOCAB


def undisturbed(prompt: Items[int], max_tokens: int, index: int = 0) -> list[int]:
    """All tokens of a sequence that runs alone."""
    tokens = list(prompt)
    while len(tokens) < max_tokens:
        tokens.append(next_token(tokens, index))
    return tokens


@dataclass
class Driver:
    """Runs steps and checks, after each, the invariants and what every token saw."""

    groups: Items[GroupShape] = (GroupShape(None, 32),)
    block_size: int = 4
    budget: int = 8
    max_sequences: int = 4
    share: bool = True
    digest: Digest = chained_digest
    on_finish: Callable[[Sequence], None] | None = None
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        cache = CacheManager(
            self.groups, self.block_size, max_chunk=self.budget, share_prefixes=self.share, digest=self.digest
        )
        self.scheduler = Scheduler(cache, max_step_tokens=self.budget, max_sequences=self.max_sequences)
        # By group and slot: the token written there and its position.
        self.memory: list[dict[int, tuple[int, int]]] = [{} for _ in self.groups]

    def add(self, prompt: Iterable[int], output: int, **options: object) -> Sequence:
        tokens = list(prompt)
        sequence = Sequence(str(len(self.sequences)), tokens, len(tokens) + output, **options)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        child = Sequence(
            parent.request_id,
            parent.tokens,
            parent.max_tokens,
            index=1 + max(s.index for s in self.sequences if s.request_id == parent.request_id),
            priority=parent.priority,
        )
        child.num_prompt_tokens = parent.num_prompt_tokens
        self.scheduler.fork(parent, child)
        self.sequences.append(child)
        return child

    def step(self, *, fail: bool = False, sample: bool = True) -> StepPlan:
        plan = self.scheduler.schedule()
        self.check()
        assert plan.num_tokens <= self.budget
        assert not (plan.is_empty and self.scheduler.has_work)
        self.run_model(plan)
        if fail:
            self.scheduler.rollback(plan)
            self.check()
            return plan
        self.scheduler.commit(plan)
        for i in plan.samples if sample else ():
            self.sampled(plan.sequences[i])
        self.check()
        return plan

    def sampled(self, sequence: Sequence) -> None:
        sequence.append(next_token(sequence.tokens, sequence.index))
        if sequence.num_tokens >= sequence.max_tokens:
            self.scheduler.finish(sequence, "length")
            if self.on_finish:
                self.on_finish(sequence)

    def run_model(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            for offset in range(self.block_size):
                source = self.memory[copy.group].get(copy.source * self.block_size + offset)
                if source is not None:
                    self.memory[copy.group][copy.target * self.block_size + offset] = source
        entries = list(zip(plan.sequences, plan.starts, plan.counts, strict=True))
        for g in range(len(self.groups)):
            written: set[int] = set()
            for sequence, start, count in entries:
                for position in range(start, start + count):
                    slot = self.slot(sequence, g, position)
                    assert slot not in written, "two tokens of a step go to one slot"
                    written.add(slot)
                    self.memory[g][slot] = (sequence.tokens[position], position)
            for sequence, start, count in entries:
                window = self.groups[g].window or 1 << 30
                for position in range(max(0, start - window + 1), start + count):
                    seen = self.memory[g].get(self.slot(sequence, g, position))
                    assert seen == (sequence.tokens[position], position), (sequence, g, position, seen)

    def slot(self, sequence: Sequence, group: int, position: int) -> int:
        block = sequence.blocks[group][position // self.block_size]
        assert block >= 0, f"{sequence} has no block for position {position} in group {group}"
        return block * self.block_size + position % self.block_size

    def check(self) -> None:
        assert violations(snapshot(self.scheduler)) == []

    def run(self, limit: int = 10_000) -> int:
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < limit, "no end"
        self.check_drained()
        return steps

    def check_drained(self) -> None:
        for pool in self.scheduler.cache.pools:
            assert pool.num_owned == 0
            assert pool.num_available == pool.num_blocks
        for sequence in self.sequences:
            if sequence.finish_reason == "length":
                expected = undisturbed(
                    sequence.tokens[: sequence.num_prompt_tokens], sequence.max_tokens, sequence.index
                )
                if sequence.index == 0:
                    assert sequence.tokens.tolist() == expected
            assert sequence.state == SequenceState.FINISHED
