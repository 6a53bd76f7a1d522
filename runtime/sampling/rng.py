"""Random numbers by address: (seed, sequence, stream, position) -> uniform in [0, 1), without any running state.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) as numpy ships it; numpy
guarantees the bit stream (NEP 19), and the conversion to a float is done here, so a seed keeps its meaning.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAW_STREAM", "VERIFY_STREAM", "UniformStream", "fresh_seed"]

#: Stream of the number that picks a token.
DRAW_STREAM: Final = 0
#: Stream of the number that accepts or rejects a proposed token in speculative decoding.
VERIFY_STREAM: Final = 1

_MASK64: Final = (1 << 64) - 1
_BLOCK: Final = 64  # positions made at once: one construction costs as much as a hundred numbers
_COUNTERS_PER_BLOCK: Final = _BLOCK // 4


def fresh_seed() -> int:
    """A seed for a request that came without one."""
    return secrets.randbits(63)


class UniformStream:
    """The random numbers of one sequence; any position at any time, in any order, gives the same number.

    seed: any integer; taken modulo 2**64.
    sequence: index of the choice within its request, so that n choices differ.
    stream: numbers for different purposes at one position do not repeat one another.
    """

    __slots__ = ("_block", "_block_index", "_key", "_stream")

    def __init__(self, seed: int, *, sequence: int = 0, stream: int = DRAW_STREAM) -> None:
        self._key = (seed & _MASK64) | (sequence << 64)
        self._stream = stream
        self._block_index = -1
        self._block: list[float] = []

    def at(self, position: int, attempt: int = 0) -> float:
        """The number of output token `position` (from 0): a multiple of 2**-53 in [0, 1).

        attempt: further independent numbers for the same position, where one may not be enough.
        """
        if attempt:
            return float(self._raw(position, attempt, 1)[0] * 2.0**-53)
        block_index, offset = divmod(position, _BLOCK)
        if block_index != self._block_index:
            self._block = (self._raw(block_index * _COUNTERS_PER_BLOCK, 0, _BLOCK) * 2.0**-53).tolist()
            self._block_index = block_index
        return self._block[offset]

    def _raw(self, counter: int, attempt: int, count: int) -> NDArray[np.uint64]:
        """53 random bits each; `counter` is the low word, stream and attempt the two above."""
        philox = np.random.Philox(key=self._key, counter=counter | self._stream << 64 | attempt << 128)
        return np.asarray(philox.random_raw(count)) >> np.uint64(11)
