"""Pages contiguous keys and values, so that oracles which know no blocks can be compared with PagedAttention."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def paged(contiguous_SPGD: Array, *, block_size: int, seed: int) -> tuple[Array, Array]:
    """A pool [N, B, G, D] that holds each sequence's P positions in shuffled blocks, and the block table [S, M].

    Two spare blocks and the tail of each last block hold noise. The table depends on the seed and the lengths only.
    """
    rng = np.random.default_rng(seed)
    sequences, length, heads, size = contiguous_SPGD.shape
    width = -(-length // block_size)
    blocks = sequences * width + 2
    table = rng.permutation(blocks)[: sequences * width].reshape(sequences, width).astype(np.int32)
    pool = rng.normal(size=(blocks, block_size, heads, size)).astype(contiguous_SPGD.dtype)
    for s in range(sequences):
        for p in range(length):
            pool[table[s, p // block_size], p % block_size] = contiguous_SPGD[s, p]
    return pool, table


def gathered(pool_NBGD: Array, table_SM: Array, length: int) -> Array:
    """The first `length` positions of each sequence, [S, length, G, D]."""
    sequences = table_SM.shape[0]
    return pool_NBGD[table_SM].reshape(sequences, -1, *pool_NBGD.shape[2:])[:, :length]
