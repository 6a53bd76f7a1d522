"""Which tokens may be drawn and how likely each is, against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from pagegraft.runtime.sampling import SamplingParams
from pagegraft.runtime.sampling.narrow import MAX_CANDIDATES, Candidates, draw_together
from pagegraft.runtime.sampling.rng import ATTEMPTS
from pagegraft.runtime.sampling.selection import (
    BlockSums,
    keep_largest,
    nucleus_candidates,
    top_tokens,
)
from pagegraft.runtime.sampling.truncation import distribution, draw, is_in_nucleus, nucleus, survivors
from sampling_reference import chi_square, drawable

SIZES = [1, 2, 7, 100, 255, 256, 257, 4095, 4096, 5000]


def row(rng: np.random.Generator, size: int) -> np.ndarray:
    """Logits of various spreads; some with many equal values, some with -inf."""
    values = rng.standard_normal(size) * rng.choice([0.0, 0.3, 1.0, 3.0, 8.0])
    if rng.random() < 0.4:
        values = np.round(values * 2) / 2
    if rng.random() < 0.3:
        values[rng.random(size) < 0.5] = -np.inf
    values[rng.integers(size)] = rng.standard_normal()
    return values.astype(np.float32)


def params(rng: np.random.Generator) -> SamplingParams:
    def sometimes(value: float, neutral: float) -> float:
        return value if rng.random() < 0.5 else neutral

    return SamplingParams(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 2.0])),
        top_k=int(sometimes(int(rng.integers(1, 60)), 0)),
        top_p=float(sometimes(rng.uniform(0.05, 0.999), 1.0)),
        min_p=float(sometimes(rng.uniform(0.0, 0.2), 0.0)),
        typical_p=float(sometimes(rng.uniform(0.05, 0.999), 1.0)),
    )


@pytest.mark.parametrize("size", SIZES)
def test_drawable_tokens_and_their_probabilities(size: int) -> None:
    rng = np.random.default_rng(size)
    near = 0
    cases = 300 if size < 1000 else 25
    for _ in range(cases):
        logits, sampling = row(rng, size), params(rng)
        expected, nearest = drawable(logits.tolist(), sampling)
        ids, weights = distribution(logits, logits.max(), sampling)
        if nearest < 1e-4 and ids.tolist() != list(expected):
            near += 1  # float32 may decide a tie between sums differently
            continue
        assert ids.tolist() == list(expected), sampling
        np.testing.assert_allclose(weights / weights.sum(), list(expected.values()), rtol=2e-5, atol=1e-7)
    assert near <= cases // 10


@pytest.mark.parametrize("size", [7, 257, 5000, 49152])
def test_the_drawn_token_is_the_one_the_number_points_at(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(40):
        logits, uniform = row(rng, size), rng.random()
        sampling = SamplingParams(temperature=0.9, top_k=int(rng.choice([0, 20])))
        token = draw(logits, logits.max(), sampling, lambda attempt, uniform=uniform: uniform)
        ids, weights = distribution(logits, logits.max(), sampling)
        running = np.cumsum(weights.astype(np.float64))
        running /= running[-1]
        at = ids.tolist().index(token)
        assert running[at] > uniform - 1e-5
        assert at == 0 or running[at - 1] <= uniform + 1e-5


@pytest.mark.parametrize("size", [7, 300, 5000])
def test_rows_drawn_together_are_those_the_numbers_point_at(size: int) -> None:
    """Rows of many kinds in one matrix, each against the reference's running sum."""
    rng = np.random.default_rng(size)
    rows, references, near = [], [], 0
    while len(rows) < 60:
        logits, sampling = row(rng, size), replace(params(rng), typical_p=1.0)
        ids = survivors(logits, logits.max(), sampling)
        if ids is None or ids.size > MAX_CANDIDATES:
            continue
        rows.append(Candidates(ids, logits[ids], logits.max(), sampling, rng.random()))
        references.append(drawable(logits.tolist(), sampling))
    drawn = draw_together(rows)
    assert drawn.tolist() == [int(draw_together([one])[0]) for one in rows], "companions do not matter"
    for token, one, (expected, nearest) in zip(drawn.tolist(), rows, references, strict=True):
        if nearest < 1e-4:
            near += 1
            continue
        running = np.cumsum(list(expected.values()))
        at = list(expected).index(token)
        assert running[at] > one.uniform - 1e-5
        assert at == 0 or running[at - 1] <= one.uniform + 1e-5
    assert near < 10


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.999), SamplingParams(typical_p=0.9)],
)
def test_the_ends_of_the_unit_interval_give_tokens_of_positive_weight(uniform: float, sampling: SamplingParams) -> None:
    logits = np.full(600, -np.inf, np.float32)
    logits[[5, 100, 300]] = 1.0
    allowed = {0.0: [5], 0.5: [100]}.get(uniform, [300])
    assert draw(logits, logits.max(), sampling, lambda attempt: uniform) in allowed
    ids = np.array([5, 100, 300])
    row = Candidates(ids, logits[ids], logits.max(), sampling, uniform)
    assert draw_together([row])[0] in allowed


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("size", [40, 6000])
def test_draws_from_the_nucleus_follow_its_distribution(size: int, top_p: float) -> None:
    """The quick way (draw from all, look whether it lies inside) and the slow one behind it, together."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(size) * 0.6).astype(np.float32)
    logits[::-1].sort()  # the nucleus lies at one end, so numbers that are used twice would show
    sampling = SamplingParams(top_p=top_p)
    expected, _ = drawable(logits.tolist(), sampling)
    draws = 12000 if size < 1000 else 4000
    uniforms = rng.random((draws, ATTEMPTS))
    counts: dict[int, int] = {}
    for number in range(draws):
        token = draw(logits, logits.max(), sampling, lambda attempt, number=number: uniforms[number, attempt])
        counts[token] = counts.get(token, 0) + 1
    assert set(counts) <= set(expected)
    assert len(expected) > 1
    assert abs(chi_square(counts, expected, draws)) < 4


@pytest.mark.parametrize("size", [1, 2, 300, 4096, 9000])
def test_selection_settles_ties_by_the_lowest_index(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(30):
        values = np.round(rng.standard_normal(size) * 3).astype(np.float32)
        ranked = sorted(range(size), key=lambda i: (-values[i], i))
        for count in {1, min(2, size), size // 2 + 1, max(size - 1, 1), size}:
            assert keep_largest(values, count).tolist() == sorted(ranked[:count])
            assert top_tokens(values, count).tolist() == ranked[:count]


@pytest.mark.parametrize("size", [1, 5, 256, 700, 10000])
def test_sums_against_float64(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(20):
        weights = np.exp(np.round(rng.standard_normal(size) * 3)).astype(np.float32)
        weights[rng.random(size) < 0.2] = 0
        weights[rng.integers(size)] = 1
        exact = weights.astype(np.float64)
        sums = BlockSums(weights)
        assert math.isclose(sums.total, exact.sum(), rel_tol=1e-6)
        ranked = sorted(range(size), key=lambda i: (-weights[i], i))
        index = int(rng.integers(size))
        before = exact[ranked[: ranked.index(index)]].sum()
        assert is_in_nucleus(weights, index, before + 1e-5 * exact.sum())
        assert not is_in_nucleus(weights, index, before - 1e-5 * exact.sum())
        mass = rng.uniform(0.0, 0.99) * exact.sum()
        kept = nucleus(weights, mass)
        assert kept.tolist() == sorted(ranked[: kept.size])
        assert exact[kept].sum() >= mass * (1 - 1e-5)
        assert exact[kept].sum() - exact[ranked[kept.size - 1]] < mass * (1 + 1e-5) + 1e-12
        candidates = nucleus_candidates(weights, mass)
        assert candidates is None or set(kept) <= set(candidates)


@pytest.mark.parametrize("size", [200, 256, 3 * 256, 3 * 256 + 77])
def test_a_sum_at_the_very_end_of_a_block_stays_on_positive_weights(size: int) -> None:
    """Blocks are added up in float32 and searched in float64: their ends differ in the last digits."""
    rng = np.random.default_rng(size)
    for _ in range(200):
        weights = rng.random(size).astype(np.float32)
        weights[np.arange(size) % 256 > 100] = 0.0
        sums = BlockSums(weights)
        for end in (*range(256, size, 256), size):
            for mass in (BlockSums(weights[:end]).total, weights[:end].astype(np.float64).sum(), sums.total * 1.001):
                index = sums.find(math.nextafter(mass, 0.0))
                assert 0 <= index < size
                assert weights[index] > 0
