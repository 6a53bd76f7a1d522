"""Finding by chain and tokens, never by digest alone; lifetime of nodes; salts."""

from __future__ import annotations

import numpy as np
from pagegraft.runtime.engine.prefix_index import PrefixIndex, PrefixNode


def block(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def constant_digest(parent: bytes, tokens: bytes) -> bytes:
    return b"same"


def put(index: PrefixIndex, parent: PrefixNode, tokens: bytes, block_id: int) -> PrefixNode:
    node = index.extend(parent, tokens)
    index.set_block(node, 0, block_id)
    return node


def test_equal_tokens_behind_different_prefixes_are_different_nodes_even_when_every_digest_collides() -> None:
    index = PrefixIndex(1, constant_digest)
    root = index.root("")
    index.retain(root)
    a, b = put(index, root, block(1, 2), 0), put(index, root, block(3, 4), 1)
    a2, b2 = put(index, a, block(5, 6), 2), put(index, b, block(5, 6), 3)
    assert a2 is not b2
    assert index.find(a, block(5, 6)) is a2
    assert index.find(b, block(5, 6)) is b2
    assert index.find(root, block(5, 6)) is None
    assert index.find(root, block(9, 9)) is None
    assert len(index) == 4


def test_a_salt_sees_only_its_own_blocks() -> None:
    index = PrefixIndex(1)
    put(index, index.root("a"), block(1), 0)
    assert index.find_root("b") is None
    assert index.find(index.root("b"), block(1)) is None
    # A salt whose spelling equals token bytes is still a salt.
    assert index.root("").digest != index.root("\x01\x00\x00\x00").digest


def test_a_block_lost_in_the_middle_leaves_the_rest_reachable_and_all_goes_with_the_last() -> None:
    index = PrefixIndex(1)
    root = index.root("")
    first = put(index, root, block(1), 0)
    second = put(index, first, block(2), 1)
    index.clear_block(first, 0)
    assert index.find(root, block(1)) is first
    assert index.find(first, block(2)) is second
    index.clear_block(second, 0)
    assert len(index) == 0
    assert index.find_root("") is None


def test_a_sequence_keeps_its_node_alive() -> None:
    index = PrefixIndex(1)
    node = put(index, index.root(""), block(1), 0)
    index.retain(node)
    index.clear_block(node, 0)
    assert index.find(index.root(""), block(1)) is node
    index.release(node)
    assert len(index) == 0


def test_a_salt_is_any_string() -> None:
    index = PrefixIndex(1)
    for salt in ("", "é", "\ud800", "\ud83d\ude00", "\U0001f600"):
        root = index.root(salt)
        node = index.extend(root, b"1234")
        index.retain(node)
        assert index.find_root(salt) is root
        index.release(node)
        assert index.find_root(salt) is None
