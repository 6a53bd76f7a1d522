"""A server under load: limits, timeouts, stalls, and clients that go away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagegraft.runtime.server.serving import _Merged
from served import Server, complete, greedy, serve


def test_an_overload_is_refused_with_429(model: Path) -> None:
    for small in serve(model, settings={"max_unfinished": 1}):
        small.runner.seconds = 0.05
        with small.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 300, "stream": True}) as s:
            lines = s.iter_lines()  # kept: the connection closes with it
            next(lines)
            response = small.http.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
        small.runner.seconds = 0.0
        small.wait_idle()


def test_a_timeout_ends_a_request(model: Path) -> None:
    for short in serve(model, request_timeout=0.1):
        short.runner.seconds = 0.02
        answer = complete(short, prompt="a", max_tokens=1000)["choices"][0]
        assert answer["finish_reason"] == "timeout"
        assert greedy("a", 60).startswith(answer["text"])


def test_a_stalled_step_turns_health_red_and_its_end_green_again(model: Path) -> None:
    for stalled in serve(model, stall_seconds=0.7):
        stalled.runner.seconds = 1.5
        thread = threading.Thread(target=complete, args=(stalled,), kwargs={"prompt": "a", "max_tokens": 1})
        thread.start()
        time.sleep(1.1)
        response = stalled.http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "stalled")
        thread.join()
        stalled.wait_idle()
        assert stalled.http.get("/health").status_code == 200


def _goes_away(server: Server, body: dict[str, Any], after: int) -> None:
    """Sends a request and closes the connection: after some lines of a stream, or at once."""
    with httpx.Client(base_url=server.http.base_url, timeout=30) as client:
        if body.get("stream"):
            with client.stream("POST", "/v1/completions", json=body) as response:
                for _, _ in zip(range(after), response.iter_lines(), strict=False):
                    pass
            return
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.15)


@pytest.mark.parametrize("state", ["queued", "prompt", "output"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything_at_once(model: Path, state: str, stream: bool) -> None:
    for slow in serve(model):
        slow.runner.seconds = 0.03
        prompt = "p" * 400 if state == "prompt" else "ab"
        body = {"prompt": [prompt] * (9 if state == "queued" else 1), "max_tokens": 700, "ignore_eos": True}
        _goes_away(slow, {**body, "stream": stream}, 4)
        slow.wait_idle(3.0)
        slow.runner.seconds = 0.0
        assert complete(slow, prompt="after", max_tokens=3)["choices"][0]["text"] == greedy("after", 3)


def test_a_stream_that_is_not_read_is_not_queued() -> None:
    async def main() -> None:
        made = 0

        async def outputs() -> AsyncIterator[Any]:
            nonlocal made
            for made in range(1, 101):
                yield made

        merged = _Merged([outputs(), outputs()])
        for _ in range(50):
            await asyncio.sleep(0)
        assert made <= 2
        read = 0
        while await merged.next() is not None:
            read += 1
        assert read == 200
        await merged.close()

    asyncio.run(main())
