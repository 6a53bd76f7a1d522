"""The end of a server: requests that go on longer than they may are answered with what they have."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime.async_engine import AsyncLLM
from pagegraft.runtime.server.app import ServerOptions
from pagegraft.runtime.server.run import _Server
from served import SlowRunner, address, serving

from tests.wiring.synthetic import continuation, letters, spell


@pytest.mark.parametrize("drain_seconds", [0.0, 0.3])
def test_every_client_gets_an_answer(model: Path, drain_seconds: float) -> None:
    runner = SlowRunner(model, Manifest.load(model))
    runner.seconds = 0.02
    llm = AsyncLLM(model, runner=runner, num_blocks=600, max_num_seqs=2, max_num_batched_tokens=16)
    options = ServerOptions(model_name="synthetic", drain_seconds=drain_seconds)
    server = _Server(llm, options, host="127.0.0.1", port=0)
    running = threading.Thread(target=server.run, daemon=True)
    running.start()
    url = f"{address(server)}/v1/completions"
    end = time.monotonic() + 60
    body: dict[str, Any] = {"prompt": "end", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:  # two run, the others wait
        answers = [
            threads.submit(httpx.post, url, json={**body, "stream": stream}, timeout=90)
            for stream in (False, True, False, True)
        ]
        while llm.stats().num_unfinished < len(answers) or llm.stats().counters.steps < 5:
            assert time.monotonic() < end, llm.stats()
            time.sleep(0.01)
        server.should_exit = True
        whole, streamed, *_ = responses = [answer.result() for answer in answers]
    running.join(60)
    assert not running.is_alive()
    assert not llm.stats().alive
    assert [response.status_code for response in responses] == [200] * len(answers)
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert spell(continuation(letters("end"), 2000)).startswith(choice["text"])
    *chunks, done, _ = streamed.text.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(chunks[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_ctrl_c_says_what_is_finished_and_a_second_one_ends_it(model: Path) -> None:
    with serving(model, "--drain-seconds", "50") as (server, line):
        address = re.search(r"http://\S+?:\d+", line)
        assert address is not None, line
        assert server.stdout is not None
        assert server.stderr is not None
        body = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address[0]}/v1/completions", json=body, timeout=90) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGINT)
            told = server.stdout.readline()
            server.send_signal(signal.SIGINT)
            assert list(lines)[-2] == "data: [DONE]"
        assert told == "finishing 1 request (at most 50 s); Ctrl-C again to stop at once\n"
        assert server.wait(30) != 0
        assert "Traceback" not in server.stderr.read()


@pytest.mark.slow
def test_a_client_that_does_not_read_cannot_hold_up_the_second_ctrl_c(model: Path) -> None:
    body = {"prompt": ["a"] * 32, "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": 20}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with serving(model, "--drain-seconds", "300") as (server, line), socket.socket() as client:
        assert server.stdout is not None
        assert server.stderr is not None
        port = re.search(r":(\d+) ", line)
        assert port is not None, line
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", int(port[1])))
        client.sendall(head.encode() + content)
        assert client.recv(1)  # it streams, and nobody reads on
        time.sleep(6)  # until all buffers between are full
        server.send_signal(signal.SIGINT)
        assert server.stdout.readline().startswith("finishing 32 requests")
        server.send_signal(signal.SIGINT)
        server.wait(60)
        assert server.stderr.read() == ""
