"""Which blocks a sequence holds in every cache group: lookup of shared prefixes, growth, windows, forks, release.

All groups of a sequence cover the same logical blocks; a windowed group has given up those behind its window. The
manager decides nothing: the scheduler asks, and gets False when blocks are lacking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from .block_pool import BlockPool
from .plan import BlockCopy, Registration, TableUpdate
from .positions import blocks_for, first_visible_block, window_block_bound
from .prefix_index import NO_BLOCK, Digest, PrefixIndex, PrefixNode, chained_digest
from .sequence import Sequence

__all__ = ["CacheManager", "GroupShape", "PrefixHit"]

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One cache group: its window (None keeps all tokens) and its number of blocks."""

    window: int | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest usable shared prefix of a sequence, as its chain of nodes; empty when there is none."""

    nodes: tuple[PrefixNode, ...] = ()


class CacheManager:
    """Pools and prefix index of all groups. `max_chunk` is the most tokens of a sequence that one step computes."""

    def __init__(
        self,
        groups: Iterable[GroupShape],
        block_size: int,
        *,
        max_chunk: int,
        share_prefixes: bool = True,
        digest: Digest = chained_digest,
    ) -> None:
        self.groups = tuple(groups)
        self._has_windows = any(shape.window is not None for shape in self.groups)
        self.block_size = block_size
        self.max_chunk = max_chunk
        self.share_prefixes = share_prefixes
        self.index = PrefixIndex(len(self.groups), digest)
        self._holders: list[dict[int, PrefixNode]] = [{} for _ in self.groups]
        self.pools = tuple(BlockPool(shape.num_blocks, partial(self._forget, g)) for g, shape in enumerate(self.groups))
        self._updates: list[TableUpdate] = []
        self._copies: list[BlockCopy] = []
        self._registrations: list[Registration] = []

    # -- shared prefixes ------------------------------------------------------------------------------------------

    def follow(self, sequence: Sequence) -> PrefixNode | None:
        """Looks how far the tokens of a waiting sequence are known, the last of them left out, in `sequence.matched`.

        It goes on from the last node there that is still found, so that waiting costs no hashing. Returns the node
        behind which it ends, the root of the salt if it is the first, or None without one.
        """
        if not self.share_prefixes or not sequence.read_cache:
            return None
        chain = sequence.matched
        while chain and not chain[-1].live:
            chain.pop()
        node = last = chain[-1] if chain else self.index.find_root(sequence.cache_salt)
        if node is None:
            return None
        size = self.block_size
        data, stride = memoryview(sequence.tokens).cast("B"), size * sequence.tokens.itemsize
        first = (len(chain) + 1) * stride
        for end in range(first, ((sequence.num_tokens - 1) // size) * stride + 1, stride):
            node = self.index.find(node, bytes(data[end - stride : end]))
            if node is None:
                break
            chain.append(node)
            last = node
        data.release()
        return last

    def chain_of(self, sequence: Sequence) -> list[PrefixNode]:
        """The nodes of the full blocks that a running sequence has offered, from the first on."""
        chain: list[PrefixNode] = []
        node = sequence.prefix
        while node is not None and node.parent is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """The longest shared prefix whose keys and values are all there; at least one token is left to compute."""
        if self.follow(sequence) is None:
            return PrefixHit()
        chain = sequence.matched
        return PrefixHit(tuple(chain[: self._usable(chain)]))

    def _usable(self, chain: list[PrefixNode]) -> int:
        """Largest number of leading blocks that every group can serve: all of a full one, a window's last ones."""
        if not self._has_windows:
            for count, node in enumerate(chain):
                if NO_BLOCK in node.blocks:
                    return count
            return len(chain)
        usable = 0
        runs = [0] * len(self.groups)  # blocks present without a gap up to here
        for count, node in enumerate(chain, 1):
            served = True
            for g, shape in enumerate(self.groups):
                runs[g] = runs[g] + 1 if node.blocks[g] != NO_BLOCK else 0
                first = first_visible_block(count * self.block_size, shape.window, self.block_size)
                served = served and runs[g] >= count - first
            if served:
                usable = count
        return usable

    # -- growth ---------------------------------------------------------------------------------------------------

    def fits(self, sequence: Sequence, hit: PrefixHit, promised: list[int]) -> bool:
        """True when blocks for all of a waiting sequence's tokens are there, beside those promised per group."""
        for g, pool in enumerate(self.pools):
            total = self.most_held(g, sequence.num_tokens)
            shown = self._shown(g, hit)
            taken = sum(1 for node in shown if pool.ref_count(node.blocks[g]) == 0)
            # A shared block costs only what it takes out of the cached ones.
            if max(0, total - len(shown)) + taken > pool.num_available - promised[g]:
                return False
        return True

    def most_held(self, group: int, tokens: int) -> int:
        """Most blocks of a group that a sequence holds at once on its way to `tokens` tokens."""
        total = blocks_for(tokens, self.block_size)
        window = self.groups[group].window
        if window is None:
            return total
        return min(total, window_block_bound(window, min(self.max_chunk, tokens), self.block_size))

    def outstanding(self, sequence: Sequence) -> list[int]:
        """By group, blocks that a running sequence will still take to compute the tokens it has now."""
        total = blocks_for(sequence.num_tokens, self.block_size)
        out = []
        for g in range(len(self.groups)):
            ahead = total - len(sequence.blocks[g])
            held = len(sequence.blocks[g]) - sequence.released[g]
            out.append(max(0, min(ahead, self.most_held(g, sequence.num_tokens) - held)))
        return out

    def _shown(self, group: int, hit: PrefixHit) -> tuple[PrefixNode, ...]:
        """The part of a hit that a sequence starting behind it can see."""
        start = len(hit.nodes) * self.block_size
        return hit.nodes[first_visible_block(start, self.groups[group].window, self.block_size) :]

    def admit(self, sequence: Sequence, row: int, hit: PrefixHit) -> None:
        """Gives a waiting sequence a row and the blocks of its shared prefix."""
        prefix: PrefixNode | None = None
        if self.share_prefixes:
            prefix = hit.nodes[-1] if hit.nodes else self.index.root(sequence.cache_salt)
        sequence.row = row
        sequence.matched = []
        sequence.num_computed = len(hit.nodes) * self.block_size
        blocks: list[list[int]] = []
        sequence.released = []
        for g, pool in enumerate(self.pools):
            shown = self._shown(g, hit)
            hidden = len(hit.nodes) - len(shown)
            held = [node.blocks[g] for node in shown]
            for block in held:
                pool.acquire(block)
            sequence.released.append(hidden)
            blocks.append([NO_BLOCK] * hidden + held)
            if held:
                self._updates.append(TableUpdate(g, row, hidden, tuple(held)))
        sequence.blocks = tuple(blocks)
        sequence.capacity = sequence.num_computed
        sequence.shares_tail = False
        if prefix is not None:
            sequence.prefix = prefix
            self.index.retain(prefix)
            sequence.next_full = sequence.num_computed + self.block_size
        else:
            sequence.next_full = _NEVER

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Makes room for tokens up to `end` and makes the written blocks its own. False, and nothing, when lacking.

        Blocks behind a window are given up first, whatever the outcome.
        """
        size, start = self.block_size, sequence.num_computed
        total = blocks_for(end, size)
        tail = start // size
        copying = [False] * len(self.pools)
        for g, pool in enumerate(self.pools):
            blocks = sequence.blocks[g]
            self._give_up(sequence, g, first_visible_block(start, self.groups[g].window, size))
            copying[g] = sequence.shares_tail and start % size != 0 and pool.ref_count(blocks[tail]) > 1
            if max(0, total - len(blocks)) + copying[g] > pool.num_available:
                return False
        for g, pool in enumerate(self.pools):
            blocks = sequence.blocks[g]
            if copying[g]:
                self._copy_on_write(sequence, g, tail)
            column = len(blocks)
            if total > column:
                taken = [pool.allocate() for _ in range(total - column)]
                blocks.extend(taken)
                self._updates.append(TableUpdate(g, sequence.row, column, tuple(taken)))
        sequence.capacity = len(sequence.blocks[0]) * size
        sequence.shares_tail = False
        return True

    def _copy_on_write(self, sequence: Sequence, group: int, column: int) -> None:
        pool, blocks = self.pools[group], sequence.blocks[group]
        source, target = blocks[column], pool.allocate()
        pool.release(source)
        blocks[column] = target
        self._copies.append(BlockCopy(group, source, target))
        self._updates.append(TableUpdate(group, sequence.row, column, (target,)))

    def _give_up(self, sequence: Sequence, group: int, first: int) -> None:
        """Releases a group's blocks before logical block `first`."""
        blocks, pool = sequence.blocks[group], self.pools[group]
        for column in range(sequence.released[group], min(first, len(blocks))):
            pool.release(blocks[column])
            blocks[column] = NO_BLOCK
            sequence.released[group] = column + 1

    def register(self, sequence: Sequence, end: int) -> None:
        """Offers the blocks that are full once tokens up to `end` are computed to every later sequence."""
        size = self.block_size
        while sequence.next_full <= end:
            column = sequence.next_full // size - 1
            node = sequence.prefix
            assert node is not None  # set by admit whenever next_full is reachable
            child = self.index.extend(node, sequence.tokens[column * size : sequence.next_full].tobytes())
            self.index.retain(child)
            self.index.release(node)
            sequence.prefix = child
            sequence.next_full += size
            for g, pool in enumerate(self.pools):
                block = sequence.blocks[g][column]
                if child.blocks[g] == NO_BLOCK and block != NO_BLOCK:
                    self.index.set_block(child, g, block)
                    self._holders[g][block] = child
                    pool.set_findable(block)
                    self._registrations.append(Registration(child, g, block))

    def _forget(self, group: int, block: int) -> None:
        self.index.clear_block(self._holders[group].pop(block), group)

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Gives up all blocks, last one first, so that the end of a prefix is evicted before its beginning."""
        for g, pool in enumerate(self.pools):
            for block in reversed(sequence.blocks[g][sequence.released[g] :]):
                pool.release(block)
        sequence.blocks, sequence.released, sequence.capacity = (), [], 0
        if sequence.prefix is not None:
            self.index.release(sequence.prefix)
            sequence.prefix = None

    def fork(self, parent: Sequence, child: Sequence, row: int) -> None:
        """Lets `child`, which begins with all computed tokens of `parent`, share the parent's blocks."""
        child.row = row
        child.num_computed = parent.num_computed
        child.blocks = tuple(list(blocks) for blocks in parent.blocks)
        child.released = list(parent.released)
        child.capacity = parent.capacity
        child.next_full = parent.next_full
        child.prefix = parent.prefix
        if child.prefix is not None:
            self.index.retain(child.prefix)
        for g, pool in enumerate(self.pools):
            held = child.blocks[g][child.released[g] :]
            for block in held:
                pool.acquire(block)
            if held:
                self._updates.append(TableUpdate(g, row, child.released[g], tuple(held)))
        parent.shares_tail = child.shares_tail = True
        # A tail block beyond the computed tokens must be made private before either writes it: grow looks at it
        # only when it is asked to.
        parent.capacity = child.capacity = min(parent.capacity, parent.num_computed)

    def undo(self, registrations: Iterable[Registration]) -> None:
        """Withdraws blocks that were offered for a step which then failed."""
        for r in registrations:
            if r.node.blocks[r.group] == r.block:
                self.pools[r.group].forget(r.block)
                self._forget(r.group, r.block)

    # -- what a plan takes along ----------------------------------------------------------------------------------

    def take_changes(self) -> tuple[tuple[BlockCopy, ...], tuple[TableUpdate, ...], tuple[Registration, ...]]:
        """Block copies, table updates and registrations since the last call."""
        copies, updates, registrations = tuple(self._copies), tuple(self._updates), tuple(self._registrations)
        self._copies, self._updates, self._registrations = [], [], []
        return copies, updates, registrations

    def node_of(self, group: int, block: int) -> PrefixNode | None:
        """The node under which the prefix index offers a block, for snapshots."""
        return self._holders[group].get(block)
