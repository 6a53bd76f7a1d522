"""What one step will do: a value that the scheduler makes, the runner's feeds are filled from, and the engine commits
or rolls back. Nobody recomputes it."""

from __future__ import annotations

from dataclasses import dataclass

from .prefix_index import PrefixNode
from .sequence import Sequence

__all__ = ["BlockCopy", "Registration", "StepPlan", "TableUpdate"]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Before the run, block `source` of a group is copied onto block `target` in every layer (copy-on-write)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Before the run, `blocks` are written into a group's table at `row`, from logical block `column` on."""

    group: int
    row: int
    column: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """A block that this step fills and that the prefix index already offers; undone when the step fails."""

    node: PrefixNode
    group: int
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Entry i computes tokens [starts[i], starts[i] + counts[i]) of sequences[i]; entries are packed in this order.

    `samples` are the entries whose last token is the last one its sequence has, so that a next one can be sampled.
    """

    number: int
    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[int, ...]
    num_tokens: int
    copies: tuple[BlockCopy, ...]
    table_updates: tuple[TableUpdate, ...]
    registrations: tuple[Registration, ...]
    preempted: tuple[Sequence, ...]

    @property
    def is_empty(self) -> bool:
        """True when nothing can run now."""
        return not self.sequences
