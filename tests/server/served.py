"""A server over the synthetic model, run by uvicorn in a thread and spoken to over a socket; how tests ask it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime.async_engine import AsyncLLM
from pagegraft.runtime.model.session import OnnxRunner
from pagegraft.runtime.server.app import ServerOptions, create_app

from tests.wiring.synthetic import continuation, letters, spell

PAGEGRAFT = str(Path(sys.executable).with_name("pagegraft"))


class SlowRunner(OnnxRunner):
    """Waits before each step, so that a test can act in between."""

    seconds = 0.0

    def execute(self, feeds: Any) -> Any:
        time.sleep(self.seconds)
        return super().execute(feeds)


@dataclass
class Server:
    """A running server."""

    llm: AsyncLLM
    runner: SlowRunner
    http: httpx.Client

    def wait_idle(self, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while self.llm.stats().num_unfinished:
            assert time.monotonic() < end, self.llm.stats()
            time.sleep(0.01)
        assert all(pool.num_owned == 0 for pool in self.llm.model.engine.scheduler.cache.pools)


def serve(folder: Path, **options: Any) -> Iterator[Server]:
    """Runs a server in a thread, by uvicorn and over a socket."""
    settings = {"num_blocks": 300, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options.pop("settings", {})}
    runner = SlowRunner(folder, Manifest.load(folder))
    llm = AsyncLLM(folder, runner=runner, **settings)
    app = create_app(llm, ServerOptions(**{"model_name": "synthetic", **options}))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with httpx.Client(base_url=address(server), timeout=30) as http:
        yield Server(llm, runner, http)
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()


def address(server: uvicorn.Server) -> str:
    """The URL of a server that a thread runs, once it listens."""
    end = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def greedy(prompt: str, count: int) -> str:
    return spell(continuation(letters(prompt), count))


def complete(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, path: str, **body: Any) -> list[Any]:
    """The data of a stream's events; the last must be [DONE]."""
    body = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


#: The command with interrupts as a terminal gives them: where the tests run in the background they are ignored.
_COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from pagegraft.custom_ops.main import main
main()
"""


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its first line."""
    command = [sys.executable, "-c", _COMMAND, "serve", str(model), "--kv-memory", "1MB", "--port", "0", *options]
    environment = {**os.environ, "NO_COLOR": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline()
        finally:
            server.kill()
