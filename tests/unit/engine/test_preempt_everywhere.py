"""Preempting, failing and ending at every step of a run: everybody else's tokens are those of the undisturbed run."""

from __future__ import annotations

import pytest
from engine_driver import Driver
from pagegraft.runtime.engine.cache_manager import GroupShape

SHAPES = {
    "full": [GroupShape(None, 24)],
    "windowed": [GroupShape(5, 14)],
    "both": [GroupShape(None, 24), GroupShape(5, 14)],
}


def make(shapes: str, *, collide: bool = False) -> Driver:
    extra = {"digest": lambda parent, tokens: b"one"} if collide else {}
    driver = Driver(SHAPES[shapes], budget=7, max_sequences=3, **extra)
    driver.add([1, 2, 3, 4, 1, 2, 3, 4, 1], 9)
    driver.add([1, 2, 3, 4, 1, 2, 3, 4, 2, 2], 7)
    driver.add([1, 2, 3, 4, 0], 8, priority=1)
    driver.add([0], 5)
    return driver


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("what", ["preempt", "fail", "end"])
def test_at_every_step(shapes: str, collide: bool, what: str) -> None:
    steps = make(shapes, collide=collide).run()
    assert steps > 10
    for at in range(steps):
        for victim in range(4) if what != "fail" else range(1):
            driver = make(shapes, collide=collide)
            for _ in range(at):
                driver.step()
            sequence = driver.sequences[victim]
            if what == "fail":
                driver.step(fail=True)
            elif what == "end":
                driver.scheduler.finish(sequence, "abort")
                driver.check()
            elif sequence in driver.scheduler.running:
                driver.scheduler.preempt(sequence)
                driver.check()
            driver.run()  # compares every sequence that ended by length with its solo run
            reasons = [s.finish_reason for s in driver.sequences]
            assert reasons.count("length") >= (3 if what == "end" else 4)
