"""The start of `pagegraft serve`: the address is had before the model is loaded; its options reach the server."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from pagegraft.runtime import AsyncLLM
from pagegraft.runtime.server.app import ServerOptions
from pagegraft.runtime.server.listen import AddressError, bind
from pagegraft.runtime.server.run import _Server
from served import PAGEGRAFT, serving


def refused(*options: str) -> str:
    """The complaint of a server about its options; there is no model that it could load."""
    done = subprocess.run([PAGEGRAFT, "serve", "nowhere", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--port", str(port))
    assert line.startswith(f"pagegraft: port {port} of 127.0.0.1 is in use")
    assert line.endswith("choose another with --port")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7", "a" * 70])
def test_a_host_that_is_not_here_is_told(host: str) -> None:
    line = refused("--host", host)
    assert host in line
    assert "--host" in line


def test_every_address_of_a_name_is_bound_once_to_one_port() -> None:
    sockets = bind("localhost", 0)
    names = [each.getsockname() for each in sockets]
    for each in sockets:
        each.close()
    assert len({name[1] for name in names}) == 1
    assert len(set(names)) == len(names)
    assert "127.0.0.1" in {name[0] for name in names}


def test_a_refusal_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else set()
        with pytest.raises(AddressError):
            bind("127.0.0.1", taken.getsockname()[1])
        after = set(os.listdir("/proc/self/fd")) if before else set()
    assert len(after) == len(before)


def test_a_template_of_the_command_line_is_used(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(model, "--chat-template", str(template)) as (_, line):
        address = re.search(r"http://\S+?:\d+", line)
        assert address is not None, line
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
        answer = httpx.post(f"{address[0]}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(("content", "word"), [("{% if %}", "not valid jinja2"), (None, "give a jinja2 file")])
def test_a_template_that_is_none_ends_the_start(model: Path, tmp_path: Path, content: str | None, word: str) -> None:
    template = tmp_path / "own.jinja"
    if content is not None:
        template.write_text(content)
    command = [PAGEGRAFT, "serve", str(model), "--port", "0", "--chat-template", str(template)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert word in done.stderr
    assert done.stdout == ""


def test_a_port_taken_while_the_model_was_loaded_is_told(model: Path) -> None:
    llm = AsyncLLM(model, num_blocks=30)
    with ExitStack() as closed:
        first = closed.enter_context(bind("127.0.0.1", 0)[0])
        port = first.getsockname()[1]
        second = closed.enter_context(bind("127.0.0.1", port)[0])  # allowed until one of them listens
        first.listen()
        with pytest.raises(AddressError, match=f"port {port} of 127.0.0.1 is in use"):
            _Server(llm, ServerOptions(model_name="synthetic"), host="127.0.0.1", port=port).run([second])
    asyncio.run(llm.shutdown())
