"""The fewest entries that reach a mass, against a full sort in float64."""

from __future__ import annotations

import numpy as np
import pytest
from pagegraft.runtime.sampling.leading import ascending_keys, descending_keys, leading, mass_of


def weights_of(kind: str, rng: np.random.Generator, size: int) -> np.ndarray:
    if kind == "flat":
        return np.exp(rng.standard_normal(size)).astype(np.float32)
    if kind == "equal":
        return np.full(size, 0.5, np.float32)
    if kind == "few values":
        return np.exp(np.round(rng.standard_normal(size) * 2)).astype(np.float32)
    if kind == "heavy":
        return (rng.permutation(size) + 1.0).astype(np.float32) ** -1.5
    weights = np.zeros(size, np.float32)  # "lone": a sample hardly meets one
    weights[rng.choice(size, 5, replace=False)] = rng.random(5) + 0.1
    return weights


@pytest.mark.parametrize("size", [1, 300, 2049, 5000, 49152])
@pytest.mark.parametrize("kind", ["flat", "equal", "few values", "heavy", "lone"])
def test_against_a_full_sort(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(12):
        weights = weights_of(kind, rng, max(size, 6) if kind == "lone" else size)
        distances = np.round(rng.random(weights.size) * rng.choice([8, 1e6])).astype(np.float32)
        for keys in (descending_keys(weights), ascending_keys(distances)):
            order = np.lexsort((np.arange(weights.size), keys))
            running = weights[order].astype(np.float64).cumsum()
            mass = float(rng.choice([1e-9, rng.random(), 0.999])) * running[-1]
            found = leading(keys, weights, mass)
            mask = found.mask(keys)
            count = np.count_nonzero(mask)
            assert sorted(order[:count]) == np.flatnonzero(mask).tolist(), "a beginning of the order"
            slack = 2e-6 * running[-1]  # sums are float32 in parts
            assert running[count - 1] >= mass - slack
            assert count == 1 or running[count - 2] < mass + slack
            assert weights[order[count - 1]] > 0


@pytest.mark.parametrize("size", [300, 5000])
def test_more_than_all_is_all_of_positive_weight(size: int) -> None:
    """What rounding may ask for."""
    weights = weights_of("flat", np.random.default_rng(size), size)
    weights[size // 2 :] = 0.0
    keys = descending_keys(weights)
    mask = leading(keys, weights, float(weights.sum(dtype=np.float64)) * 1.001).mask(keys)
    assert mask[: size // 2].all()


@pytest.mark.parametrize("size", [3, 256, 5001])
def test_mass_of_a_mask(size: int) -> None:
    rng = np.random.default_rng(size)
    weights, mask = rng.random(size).astype(np.float32), rng.random(size) < 0.4
    assert mass_of(weights, mask) == pytest.approx(weights[mask].sum(dtype=np.float64), rel=1e-6)
