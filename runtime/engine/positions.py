"""Arithmetic of positions, blocks and windows: one definition, used by scheduler, cache, feeds and invariants.

Positions and counts are in tokens, `block_size` in token slots. A window W lets position p see (p - W, p].
"""

from __future__ import annotations

__all__ = ["blocks_for", "first_visible_block", "largest_chunk", "window_block_bound"]


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """First logical block that the token at `position`, and so any later one, can still see."""
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size


def window_block_bound(window: int, chunk: int, block_size: int) -> int:
    """Most blocks that one sequence holds in a windowed group when a step computes up to `chunk` of its tokens."""
    return blocks_for(window - 1 + chunk, block_size) + 1


def largest_chunk(window: int, num_blocks: int, block_size: int) -> int:
    """Largest chunk whose `window_block_bound` is within `num_blocks`; below 1 when the pool cannot run the group."""
    return (num_blocks - 1) * block_size - (window - 1)
