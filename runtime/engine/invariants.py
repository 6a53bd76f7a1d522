"""What must hold between steps: pure functions over a snapshot that return every violation, none of them raising.

Checked after each step in tests and under `--debug`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .positions import blocks_for, first_visible_block, window_block_bound
from .prefix_index import NO_BLOCK
from .scheduler import Scheduler
from .sequence import NO_ROW, Sequence, SequenceState

__all__ = ["PoolSnapshot", "SequenceSnapshot", "Snapshot", "snapshot", "violations"]


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One group's pool. `offered` maps a block to the tokens from the beginning that the prefix index finds it by."""

    window: int | None
    num_blocks: int
    ref_counts: tuple[int, ...]
    free: tuple[int, ...]
    cached: tuple[int, ...]
    findable: tuple[int, ...]
    offered: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One unfinished sequence; `tokens` as the bytes of int32 ids."""

    name: str
    state: SequenceState
    row: int
    order: tuple[int, int, int]
    tokens: bytes
    num_computed: int
    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the checks look at."""

    block_size: int
    max_chunk: int
    max_sequences: int
    free_rows: tuple[int, ...]
    pools: tuple[PoolSnapshot, ...]
    running: tuple[SequenceSnapshot, ...]
    waiting: tuple[SequenceSnapshot, ...]
    num_waiting: int
    awaited: tuple[str, ...]  # running ones for whom waiting ones stand aside


def snapshot(scheduler: Scheduler) -> Snapshot:
    """A copy of the scheduler's and the cache's state."""
    cache = scheduler.cache
    pools = []
    for g, (shape, pool) in enumerate(zip(cache.groups, cache.pools, strict=True)):
        findable = tuple(b for b in range(pool.num_blocks) if pool.is_findable(b))
        offered = {}
        for block in range(pool.num_blocks):
            node = cache.node_of(g, block)
            if node is not None:
                parts = []
                while node.parent is not None:
                    parts.append(node.tokens)
                    node = node.parent
                offered[block] = b"".join(reversed(parts))
        pools.append(
            PoolSnapshot(
                shape.window,
                pool.num_blocks,
                pool.ref_counts(),
                pool.free_blocks(),
                pool.cached_blocks(),
                findable,
                offered,
            )
        )

    def name_of(s: Sequence) -> str:
        return f"{s.request_id}/{s.index}"

    def seen(s: Sequence) -> SequenceSnapshot:
        return SequenceSnapshot(
            name=name_of(s),
            state=s.state,
            row=s.row,
            order=s.order,
            tokens=s.tokens.tobytes(),
            num_computed=s.num_computed,
            num_tokens=s.num_tokens,
            blocks=tuple(map(tuple, s.blocks)),
            released=tuple(s.released),
        )

    return Snapshot(
        block_size=cache.block_size,
        max_chunk=cache.max_chunk,
        max_sequences=scheduler.max_sequences,
        free_rows=scheduler.free_rows(),
        pools=tuple(pools),
        running=tuple(seen(s) for s in scheduler.running),
        waiting=tuple(seen(s) for s in scheduler.waiting.in_order()),
        num_waiting=len(scheduler.waiting),
        awaited=tuple(name_of(s) for s in scheduler.waiting.awaited()),
    )


def violations(state: Snapshot) -> list[str]:
    """Every rule that the snapshot breaks, as one line each; empty when all is well."""
    found: list[str] = []
    for group, pool in enumerate(state.pools):
        found += (f"group {group}: {text}" for text in _pool_violations(state, group, pool))
    found += _row_violations(state)
    for sequence in (*state.running, *state.waiting):
        found += (f"sequence {sequence.name}: {text}" for text in _sequence_violations(state, sequence))
    return found


def _pool_violations(state: Snapshot, group: int, pool: PoolSnapshot) -> Iterator[str]:
    held: Counter[int] = Counter()
    for sequence in state.running:
        blocks = [b for b in sequence.blocks[group] if b != NO_BLOCK]
        held.update(blocks)
        if len(set(blocks)) != len(blocks):
            yield f"sequence {sequence.name} holds a block twice: {blocks}"
    if len(pool.ref_counts) != pool.num_blocks:
        yield f"{len(pool.ref_counts)} reference counts for {pool.num_blocks} blocks"
    for block, count in enumerate(pool.ref_counts):
        if count != held[block]:
            yield f"block {block} has {count} references and {held[block]} tables hold it"
    places = Counter(pool.free) + Counter(pool.cached) + Counter(b for b, c in enumerate(pool.ref_counts) if c > 0)
    for block in range(pool.num_blocks):
        if places[block] != 1:
            yield f"block {block} is in {places[block]} of the states free, cached, owned (or twice in one)"
    for block in places:
        if not 0 <= block < pool.num_blocks:
            yield f"block {block} does not exist"
    if set(pool.findable) != set(pool.offered):
        yield f"blocks marked findable {pool.findable} are not those the index offers {sorted(pool.offered)}"
    for block in pool.cached:
        if block not in pool.offered:
            yield f"block {block} is cached, and the index does not offer it"


def _row_violations(state: Snapshot) -> Iterator[str]:
    rows = Counter(state.free_rows) + Counter(s.row for s in state.running)
    if rows != Counter(range(state.max_sequences)):
        yield f"rows are lost or doubled: {sorted(rows.items())}"
    orders = [s.order for s in state.running]
    if orders != sorted(orders):
        yield f"running sequences are out of order: {orders}"
    if state.num_waiting != len(state.waiting):
        yield f"{state.num_waiting} sequences are counted as waiting, {len(state.waiting)} wait"
    for name in set(state.awaited) - {s.name for s in state.running}:
        yield f"sequences wait for {name}, which does not run"


def _sequence_violations(state: Snapshot, s: SequenceSnapshot) -> Iterator[str]:
    if s.state == SequenceState.WAITING:
        if s.blocks or s.row != NO_ROW or s.num_computed:
            yield f"waits and holds row {s.row}, {len(s.blocks)} tables, {s.num_computed} computed tokens"
        return
    if not 0 <= s.num_computed <= s.num_tokens:
        yield f"has computed {s.num_computed} of {s.num_tokens} tokens"
    size = state.block_size
    for group, (blocks, released) in enumerate(zip(s.blocks, s.released, strict=True)):
        pool = state.pools[group]
        where = f"in group {group}"
        if len(blocks) < blocks_for(s.num_computed, size):
            yield f"{where} has {len(blocks)} blocks for {s.num_computed} computed tokens"
        first = first_visible_block(s.num_computed, pool.window, size)
        if any(b == NO_BLOCK for b in blocks[first:]):
            yield f"{where} has no block in its visible range: {blocks}"
        if any(b != NO_BLOCK for b in blocks[:released]) or NO_BLOCK in blocks[released:]:
            yield f"{where} claims to have given up {released} blocks: {blocks}"
        if pool.window is not None:
            bound = window_block_bound(pool.window, state.max_chunk, size)
            if len(blocks) - released > bound:
                yield f"{where} holds {len(blocks) - released} blocks, more than the bound of {bound}"
        stride = size * 4
        for column, block in enumerate(blocks):
            content = pool.offered.get(block)
            if content is not None and content != s.tokens[: (column + 1) * stride]:
                yield f"{where} holds block {block} at {column}, offered for other tokens"
