"""AsyncLLM: outputs, cancellation in every state, deadlines, limits, draining, failures, heartbeat."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime import RequestOutput, SamplingParams
from pagegraft.runtime.async_engine import AsyncLLM, EngineStoppedError, QueueFullError, RequestOptions
from pagegraft.runtime.engine.errors import RequestError
from pagegraft.runtime.engine.request import Request as EngineRequest
from pagegraft.runtime.model.runner import Feeds
from pagegraft.runtime.model.session import OnnxRunner

from tests.wiring.synthetic import continuation

Build = Callable[..., Path]


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def ids(*tokens: int) -> Any:
    return {"prompt_token_ids": list(tokens)}


async def last(llm: AsyncLLM, prompt: Any, count: int, **options: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params(count), RequestOptions(**options))][-1]


class Gate(OnnxRunner):
    """Lets a step through only when told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Manifest.load(folder))
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.error: Exception | None = None

    def execute(self, feeds: Feeds) -> np.ndarray:
        self.entered.release()
        assert self.permits.acquire(timeout=20)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().execute(feeds)

    def open(self) -> None:
        self.permits.release(1_000_000)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=20)


def run(folder: Path, body: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> None:
    """Runs `body` with an engine, and checks that it left nothing behind."""

    async def main() -> None:
        llm = AsyncLLM(folder, **{"num_blocks": 64, "debug": True, **settings})
        try:
            await asyncio.wait_for(body(llm), 60)
        finally:
            gate = settings.get("runner")
            if isinstance(gate, Gate):
                gate.open()
            await llm.shutdown(drain_seconds=10)
        assert all(pool.num_owned == 0 for pool in llm.model.engine.scheduler.cache.pools)
        assert llm.stats().num_unfinished == 0

    asyncio.run(main())


def test_many_coroutines_get_their_own_tokens(synthetic_model: Build) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(last(llm, ids(i, i + 1), 12, stream=i % 2 == 0) for i in range(30)))
        for i, output in enumerate(outputs):
            assert list(output.outputs[0].token_ids) == continuation([i, i + 1], 12)

    run(synthetic_model(), body, max_num_batched_tokens=16, max_num_seqs=8)


def test_streamed_outputs_grow(synthetic_model: Build) -> None:
    async def body(llm: AsyncLLM) -> None:
        expected, length = continuation([4], 40), 0
        async for output in llm.generate(ids(4), params(40)):
            tokens = list(output.outputs[0].token_ids)
            assert tokens == expected[: len(tokens)]
            assert len(tokens) > length
            length = len(tokens)
        assert length == 40

    run(synthetic_model(), body)


def test_a_request_that_can_never_run_raises_in_its_own_coroutine(synthetic_model: Build) -> None:
    async def body(llm: AsyncLLM) -> None:
        good = asyncio.create_task(last(llm, ids(1), 5))
        with pytest.raises(RequestError, match="empty"):
            await last(llm, ids(), 5)
        with pytest.raises(RequestError, match="in use"):
            await asyncio.gather(last(llm, ids(1), 500, request_id="a"), last(llm, ids(1), 5, request_id="a"))
        llm.abort("a")
        assert list((await good).outputs[0].token_ids) == continuation([1], 5)

    run(synthetic_model(), body, num_blocks=256)


@pytest.mark.parametrize("state", ["queued", "prompt", "output"])
@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_ending_a_request_in_every_state(synthetic_model: Build, state: str, how: str) -> None:
    folder = synthetic_model()
    gate = Gate(folder)

    async def body(llm: AsyncLLM) -> None:
        other = asyncio.create_task(last(llm, ids(9), 6))
        await gate.wait_entered()
        victim = asyncio.create_task(last(llm, ids(*range(30)), 6, request_id="victim"))
        await asyncio.sleep(0.01)
        if state != "queued":
            gate.permits.release(1 if state == "prompt" else 6)
            for _ in range(1 if state == "prompt" else 6):
                await gate.wait_entered()
        if how == "cancel":
            victim.cancel()
        else:
            llm.abort("victim")
        await asyncio.sleep(0.01)
        gate.open()
        if how == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await victim
        else:
            output = await victim
            assert output.outputs[0].finish_reason == "abort"
            assert (len(output.outputs[0].token_ids) > 0) == (state == "output")
        assert list((await other).outputs[0].token_ids) == continuation([9], 6)

    run(folder, body, runner=gate, max_num_batched_tokens=8, max_num_seqs=4)


def test_a_deadline_ends_a_request_and_no_later_one_of_its_name(synthetic_model: Build) -> None:
    async def body(llm: AsyncLLM) -> None:
        output = await last(llm, ids(1), 4000, timeout=0.05, request_id="x")
        assert output.outputs[0].finish_reason == "timeout"
        assert list(output.outputs[0].token_ids) == continuation([1], len(output.outputs[0].token_ids))
        first = await last(llm, ids(2), 2, timeout=0.2, request_id="y")
        assert first.outputs[0].finish_reason == "length"
        again = await last(llm, ids(2), 600, request_id="y")
        assert again.outputs[0].finish_reason == "length"

    run(synthetic_model(), body, num_blocks=1100, debug=False)


def test_more_requests_than_allowed_are_refused(synthetic_model: Build) -> None:
    folder = synthetic_model()
    gate = Gate(folder)

    async def body(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm, ids(i), 3)) for i in range(2)]
        await asyncio.sleep(0.02)
        with pytest.raises(QueueFullError, match="limit is 2"):
            await last(llm, ids(5), 3)
        gate.open()
        await asyncio.gather(*tasks)
        await last(llm, ids(5), 3)

    run(folder, body, runner=gate, max_unfinished=2)


def test_draining_finishes_what_runs_and_takes_nothing_new(synthetic_model: Build) -> None:
    async def main() -> None:
        llm = AsyncLLM(synthetic_model(), num_blocks=64)
        running = asyncio.create_task(last(llm, ids(1), 50))
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(llm.shutdown(drain_seconds=20))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError):
            await last(llm, ids(2), 3)
        assert (await running).outputs[0].finish_reason == "length"
        await stopping
        assert not llm.stats().alive

    asyncio.run(asyncio.wait_for(main(), 60))


def test_stopping_without_draining_aborts(synthetic_model: Build) -> None:
    async def main() -> None:
        llm = AsyncLLM(synthetic_model(), num_blocks=1000)
        running = asyncio.create_task(last(llm, ids(1), 3900))
        await asyncio.sleep(0.02)
        await llm.shutdown()
        assert (await running).outputs[0].finish_reason == "abort"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_unknown_failure_ends_the_requests_and_not_the_engine(synthetic_model: Build) -> None:
    folder = synthetic_model()
    gate = Gate(folder)
    prompts = [[*range(20), i] for i in range(3)]

    async def body(llm: AsyncLLM) -> None:
        gate.error = MemoryError("no more")
        tasks = [asyncio.create_task(last(llm, ids(*prompt), 3)) for prompt in prompts]
        await asyncio.sleep(0.02)
        gate.open()
        outputs = await asyncio.gather(*tasks)
        failed = [o for o in outputs if o.outputs[0].finish_reason == "error"]
        assert failed
        assert all("MemoryError: no more" in (o.outputs[0].error or "") for o in failed)
        # The same prompts again: nothing of the failed step is taken for computed.
        for prompt in prompts:
            output = await last(llm, ids(*prompt), 3)
            assert list(output.outputs[0].token_ids) == continuation(prompt, 3)

    run(folder, body, runner=gate)


def test_the_heartbeat_goes_on_when_idle_and_stops_when_a_step_hangs(synthetic_model: Build) -> None:
    folder = synthetic_model()
    gate = Gate(folder)

    async def body(llm: AsyncLLM) -> None:
        await asyncio.sleep(1.2)
        assert llm.stats().heartbeat_age < 1.0
        task = asyncio.create_task(last(llm, ids(1), 2))
        await gate.wait_entered()
        before = llm.stats().heartbeat_age
        await asyncio.sleep(0.7)
        assert llm.stats().heartbeat_age > before + 0.6
        gate.open()
        await task

    run(folder, body, runner=gate)


class Panic(BaseException):
    """What an extension raises that is no Exception."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_is_told_to_everybody(synthetic_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm = AsyncLLM(synthetic_model(), num_blocks=64)
        sample, calls = llm._engine._sampler.sample, iter(range(100))

        def fragile(*arguments: Any) -> Any:
            if next(calls) == 3:
                raise Panic("at the disco")
            return sample(*arguments)

        monkeypatch.setattr(llm._engine._sampler, "sample", fragile)
        tasks = [asyncio.create_task(last(llm, ids(1, i), 200)) for i in range(3)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineStoppedError)
            assert "Panic: at the disco" in str(result)
        with pytest.raises(EngineStoppedError):
            await last(llm, ids(1), 2)
        await llm.shutdown()
        assert not llm.stats().alive
        assert llm.stats().num_unfinished == 0
        assert all(pool.num_owned == 0 for pool in llm.model.engine.scheduler.cache.pools)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_request_that_comes_as_the_thread_stops_is_refused(
    synthetic_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        llm = AsyncLLM(synthetic_model(), num_blocks=64)
        between, go = threading.Event(), threading.Event()
        expire = llm._expire

        def hold() -> None:
            if not between.is_set():
                between.set()
                assert go.wait(20)
            expire()

        monkeypatch.setattr(llm, "_expire", hold)
        assert await asyncio.to_thread(between.wait, 20)
        task = asyncio.create_task(last(llm, ids(1), 2))
        await asyncio.sleep(0.02)
        stop = asyncio.create_task(llm.shutdown())
        await asyncio.sleep(0.02)
        go.set()
        await stop
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(task, 5)
        llm._accepting = True  # as a coroutine saw it just before
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(last(llm, ids(1), 2), 5)
        assert llm.stats().num_unfinished == 0

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_output_that_cannot_be_told_fails_its_own_request(
    synthetic_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = EngineRequest.output

    def fragile(request: EngineRequest) -> RequestOutput:
        if request.request_id == "bad":
            raise ValueError("no text")
        return output(request)

    monkeypatch.setattr(EngineRequest, "output", fragile)

    async def body(llm: AsyncLLM) -> None:
        other = asyncio.create_task(last(llm, ids(1, 2), 50))
        with pytest.raises(ValueError, match="no text"):
            await last(llm, ids(3), 50, request_id="bad")
        assert list((await other).outputs[0].token_ids) == continuation([1, 2], 50)

    run(synthetic_model(), body)


def test_any_cache_salt_is_served(synthetic_model: Build) -> None:
    async def body(llm: AsyncLLM) -> None:
        for salt in ("\ud800", "", "\ud800"):
            output = await last(llm, ids(*range(9)), 3, cache_salt=salt)
            assert list(output.outputs[0].token_ids) == continuation(range(9), 3)

    run(synthetic_model(), body)


def test_deadlines_of_ended_requests_are_forgotten(synthetic_model: Build) -> None:
    async def body(llm: AsyncLLM) -> None:
        for _ in range(60):
            await last(llm, ids(1), 1, timeout=1000)
        assert len(llm._deadlines) < 40

    run(synthetic_model(), body)
