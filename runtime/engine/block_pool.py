"""One cache group's blocks: reference counts, the free list and the LRU of cached blocks. Every operation is O(1).

A block is in exactly one of three states: *owned* (one or more tables hold it), *cached* (no table holds it, but the
prefix index can still find its content), *free*. Plain integers; what a block contains is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ...custom_ops.errors import PagegraftError

__all__ = ["BlockAccountingError", "BlockPool"]


class BlockAccountingError(PagegraftError, RuntimeError):
    """A block was used against the rules of the pool (a bug of the caller); the pool is unchanged."""


class BlockPool:
    """Hands out block ids 0..num_blocks-1.

    `on_evict(block)` is called when a cached block is about to be reused: its owner must forget the content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._findable = bytearray(num_blocks)  # 1: the prefix index refers to this block
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks held by at least one table."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no table holds and the prefix index can still find."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        """Number of tables that hold `block`."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A block with one reference; evicts the least recently used cached block when none is free."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._findable[block] = 0
            self._on_evict(block)
        else:
            raise BlockAccountingError(f"all {self.num_blocks} blocks are owned; check num_available before allocating")
        self._ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Adds a reference to a block that is owned or cached."""
        if self._ref_counts[block] == 0:
            if block not in self._cached:
                raise BlockAccountingError(f"block {block} is free and cannot be acquired; allocate one instead")
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drops a reference; the last one makes the block cached when findable, else free."""
        count = self._ref_counts[block]
        if count == 0:
            raise BlockAccountingError(f"block {block} has no reference and cannot be released again")
        self._ref_counts[block] = count - 1
        if count == 1:
            if self._findable[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def set_findable(self, block: int) -> None:
        """Notes that the prefix index refers to an owned block."""
        if self._ref_counts[block] == 0:
            raise BlockAccountingError(f"block {block} has no owner and cannot become findable")
        self._findable[block] = 1

    def forget(self, block: int) -> None:
        """Notes that the prefix index no longer refers to a block; a cached one becomes free."""
        self._findable[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def free_blocks(self) -> tuple[int, ...]:
        """The free list, for snapshots."""
        return tuple(self._free)

    def cached_blocks(self) -> tuple[int, ...]:
        """The cached blocks from least to most recently used, for snapshots."""
        return tuple(self._cached)

    def ref_counts(self) -> tuple[int, ...]:
        """Reference count by block id, for snapshots."""
        return tuple(self._ref_counts)

    def is_findable(self, block: int) -> bool:
        """True when the prefix index refers to the block."""
        return bool(self._findable[block])
