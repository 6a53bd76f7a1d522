"""How many requests run at once in one memory: the checks of tests/performance/concurrency.py, which counts steps."""

from __future__ import annotations

import pytest

from tests.performance.concurrency import Stretch, contiguous, measure, workload


def test_reservations_are_placed_first_fit_and_merge() -> None:
    stretch = Stretch(10)
    assert [stretch.reserve(n) for n in (4, 4, 4)] == [0, 4, None]
    stretch.free(0, 4)
    assert stretch.reserve(5) is None  # four slots before and two behind the second one
    assert stretch.reserve(3) == 0
    stretch.free(4, 4)
    assert [stretch.reserve(n) for n in (7, 1)] == [3, None]


def test_without_contention_everything_runs_at_once() -> None:
    jobs = workload(20, 0)
    assert contiguous(jobs, 1 << 20, [768] * 20).peak <= 20
    assert contiguous(jobs, 768, [768] * 20).peak <= 1


@pytest.mark.slow
def test_paging_holds_nearly_twice_the_requests_of_reservations() -> None:
    figures = measure(16_384, 600, 1)
    assert figures["preemptions"] == 0
    assert figures["mean_ratio"]["own_maximum"] >= 1.9
