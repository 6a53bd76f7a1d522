"""Every order of adding, stepping, failing, ending, preempting and forking: invariants, contexts and tokens hold."""

from __future__ import annotations

import pytest
from engine_driver import Driver
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from pagegraft.runtime.engine.cache_manager import GroupShape
from pagegraft.runtime.engine.errors import ConfigurationError, RequestError
from pagegraft.runtime.engine.prefix_index import chained_digest
from pagegraft.runtime.engine.sequence import SequenceState

GROUPS = st.lists(
    st.builds(GroupShape, st.sampled_from([None, 1, 2, 5, 9]), st.integers(8, 24)), min_size=1, max_size=3
)


def constant_digest(parent: bytes, tokens: bytes) -> bytes:
    return b""


class EngineMachine(RuleBasedStateMachine):
    """The driver checks invariants and every token's context after each step."""

    @initialize(
        groups=GROUPS,
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([3, 7, 12]),
        rows=st.integers(1, 3),
        share=st.booleans(),
        collide=st.booleans(),
    )
    def start(
        self, groups: list[GroupShape], block_size: int, budget: int, rows: int, share: bool, collide: bool
    ) -> None:
        digest = constant_digest if collide else chained_digest
        while True:
            try:
                self.driver = Driver(groups, block_size, budget, rows, share, digest)
                return
            except ConfigurationError:
                groups = [GroupShape(g.window, g.num_blocks + 8) for g in groups]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        output=st.integers(1, 8),
        priority=st.sampled_from([0, 0, 1]),
        salt=st.sampled_from(["", "", "tenant"]),
        read=st.booleans(),
    )
    def add(self, prompt: list[int], output: int, priority: int, salt: str, read: bool) -> None:
        try:
            self.driver.add(prompt, output, priority=priority, cache_salt=salt, read_cache=read)
        except RequestError:
            self.driver.check()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def fail(self) -> None:
        self.driver.step(fail=True)

    def unfinished(self) -> list:  # type: ignore[type-arg]
        return [s for s in self.driver.sequences if not s.is_finished]

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.driver.scheduler.finish(data.draw(st.sampled_from(self.unfinished())), "abort")
        self.driver.check()

    def running(self, *, complete: bool) -> list:  # type: ignore[type-arg]
        running = self.driver.scheduler.running
        return [s for s in running if not complete or s.num_tokens - s.num_computed <= 1]

    @precondition(lambda self: self.running(complete=False))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.driver.scheduler.preempt(data.draw(st.sampled_from(self.running(complete=False))))
        self.driver.check()

    @precondition(lambda self: self.running(complete=True) and len(self.driver.sequences) < 20)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.driver.fork(data.draw(st.sampled_from(self.running(complete=True))))
        self.driver.check()

    @rule()
    def drain(self) -> None:
        self.driver.run()
        assert all(s.state == SequenceState.FINISHED for s in self.driver.sequences)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()


_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

TestEngineQuickly = EngineMachine.TestCase
TestEngineQuickly.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=_CHECKS
)


class _Thorough(EngineMachine):
    """The same, 100,000 operations."""


@pytest.mark.slow
class TestEngineThoroughly(_Thorough.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=1700, stateful_step_count=60, deadline=None, suppress_health_check=_CHECKS)
