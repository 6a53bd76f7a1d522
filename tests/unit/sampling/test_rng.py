"""Random numbers by address, against the algorithm written out."""

from __future__ import annotations

import numpy as np
from pagegraft.runtime.sampling.rng import ATTEMPTS, UniformStream, fresh_seed

WORD = 2**64


def philox4x64(counter: int, key: int) -> list[int]:
    """Philox4x64-10 as published: multipliers, key increments and ten rounds."""
    c = [counter >> (64 * i) & (WORD - 1) for i in range(4)]
    k = [key & (WORD - 1), key >> 64]
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [high >> 64 ^ c[1] ^ k[0], high % WORD, low >> 64 ^ c[3] ^ k[1], low % WORD]
        k = [(k[0] + 0x9E3779B97F4A7C15) % WORD, (k[1] + 0xBB67AE8584CAA73B) % WORD]
    return c


def test_numbers_are_philox_of_seed_choice_and_position() -> None:
    for seed, sequence in ((0, 0), (42, 1), (-1, 3), (2**70 + 5, 0)):
        stream = UniformStream(seed, sequence=sequence)
        for position in (0, 1, 31, 32, 33, 1000, 5):
            # numpy counts up before it draws.
            words = philox4x64(position + 1, seed % WORD | sequence << 64)
            for attempt in range(ATTEMPTS):
                assert stream.at(position, attempt) == (words[attempt] >> 11) / 2**53


def test_numbers_do_not_repeat_and_fill_the_unit_interval() -> None:
    stream = UniformStream(1)
    numbers = [stream.at(position, attempt) for position in range(2000) for attempt in range(ATTEMPTS)]
    assert len(set(numbers)) == len(numbers)
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - len(numbers) / 20).max() < 5 * (len(numbers) / 20) ** 0.5


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(100)}) == 100
