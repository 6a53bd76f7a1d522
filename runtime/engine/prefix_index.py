"""Finds blocks by the tokens they and everything before them hold.

A trie: one node per distinct full block of tokens under one parent. Nodes are found by a chained digest and then
*verified*: a candidate counts only when its parent is the very node the search came from and its tokens are equal, so a
colliding digest costs time and never gives a wrong block. A node carries one block id per cache group (-1: none), and
lives as long as a block, a child or a sequence refers to it: an evicted block in the middle of a chain does not make
the blocks behind it unreachable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

__all__ = ["NO_BLOCK", "Digest", "PrefixIndex", "PrefixNode", "chained_digest"]

NO_BLOCK = -1

#: (digest of the parent, bytes of the block's tokens) -> digest of the chain.
Digest = Callable[[bytes, bytes], bytes]


def chained_digest(parent: bytes, tokens: bytes) -> bytes:
    """blake2b of the parent's digest and the tokens (Python's own `hash` is salted per process)."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class PrefixNode:
    """One full block of tokens behind a given prefix. `tokens` are the raw bytes of its int32 token ids."""

    __slots__ = ("blocks", "digest", "live", "parent", "references", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: bytes, digest: bytes, num_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.digest = digest
        self.blocks = [NO_BLOCK] * num_groups
        self.live = True  # found by `find`; so are all of its ancestors then
        self.references = 0  # blocks + children + sequences whose newest full block this is


class PrefixIndex:
    """The trie over all salts; every salt has a root of its own, so tenants never see each other's blocks."""

    def __init__(self, num_groups: int, digest: Digest = chained_digest) -> None:
        self._num_groups = num_groups
        self._digest = digest
        self._roots: dict[str, PrefixNode] = {}
        self._buckets: dict[bytes, list[PrefixNode]] = {}
        self._size = 0

    def __len__(self) -> int:
        """Number of nodes below the roots."""
        return self._size

    def root(self, salt: str) -> PrefixNode:
        """The empty prefix of a salt."""
        node = self._roots.get(salt)
        if node is None:
            # The prefix of the input keeps salts and token bytes in separate key spaces.
            # A salt is any string, lone surrogates included.
            key = b"salt:" + salt.encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(key, digest_size=16).digest()
            node = self._roots[salt] = PrefixNode(None, key, digest, self._num_groups)
        return node

    def find_root(self, salt: str) -> PrefixNode | None:
        """The empty prefix of a salt when anything was ever kept under it."""
        return self._roots.get(salt)

    def find(self, parent: PrefixNode, tokens: bytes) -> PrefixNode | None:
        """The verified child of `parent` for a block of tokens, or None."""
        for node in self._buckets.get(self._digest(parent.digest, tokens), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def extend(self, parent: PrefixNode, tokens: bytes) -> PrefixNode:
        """The child of `parent` for a block of tokens, made when absent. A new node lives once it is retained."""
        digest = self._digest(parent.digest, tokens)
        bucket = self._buckets.setdefault(digest, [])
        for node in bucket:
            if node.parent is parent and node.tokens == tokens:
                return node
        node = PrefixNode(parent, tokens, digest, self._num_groups)
        bucket.append(node)
        parent.references += 1
        self._size += 1
        return node

    def retain(self, node: PrefixNode) -> None:
        """Keeps a node alive for a sequence."""
        node.references += 1

    def release(self, node: PrefixNode) -> None:
        """Gives up one reference; a node without any is removed, and so are its ancestors that lived only for it."""
        node.references -= 1
        current: PrefixNode | None = node
        while current is not None and current.references == 0:
            parent = current.parent
            current.live = False
            if parent is None:
                self._roots.pop(current.tokens[len(b"salt:") :].decode("utf-8", "surrogatepass"), None)
                return
            bucket = self._buckets[current.digest]
            bucket.remove(current)
            if not bucket:
                del self._buckets[current.digest]
            self._size -= 1
            parent.references -= 1
            current = parent

    def set_block(self, node: PrefixNode, group: int, block: int) -> None:
        """Records which block holds the node's tokens in a group that has none yet."""
        node.blocks[group] = block
        node.references += 1

    def clear_block(self, node: PrefixNode, group: int) -> None:
        """Forgets the node's block in a group."""
        node.blocks[group] = NO_BLOCK
        self.release(node)
