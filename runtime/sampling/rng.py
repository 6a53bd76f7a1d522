"""Random numbers by address: (seed, sequence, position) -> uniform in [0, 1), without any running state.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) as numpy ships it; numpy
guarantees the bit stream (NEP 19), and the conversion to a float is done here, so a seed keeps its meaning.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np

__all__ = ["ATTEMPTS", "UniformStream", "fresh_seed"]

#: Independent numbers at each position: what one Philox counter yields.
ATTEMPTS: Final = 4

_MASK64: Final = (1 << 64) - 1
_POSITIONS: Final = 32  # made at once: setting up the generator costs more than the numbers


def fresh_seed() -> int:
    """A seed for a request that came without one."""
    return secrets.randbits(63)


class UniformStream:
    """The random numbers of one sequence; any position at any time, in any order, gives the same numbers.

    seed: any integer; taken modulo 2**64.
    sequence: index of the choice within its request, so that n choices differ.
    """

    __slots__ = ("_block", "_block_index", "_key")

    def __init__(self, seed: int, *, sequence: int = 0) -> None:
        self._key = (seed & _MASK64) | (sequence << 64)
        self._block_index = -1
        self._block: list[float] = []

    def at(self, position: int, attempt: int = 0) -> float:
        """The number of output token `position` (from 0): a multiple of 2**-53 in [0, 1).

        attempt: below `ATTEMPTS`; where one number may not be enough.
        """
        block_index, offset = divmod(position, _POSITIONS)
        if block_index != self._block_index:
            raw = np.random.Philox(key=self._key, counter=block_index * _POSITIONS).random_raw(_POSITIONS * ATTEMPTS)
            self._block = ((raw >> np.uint64(11)) * 2.0**-53).tolist()
            self._block_index = block_index
        return self._block[offset * ATTEMPTS + attempt]
