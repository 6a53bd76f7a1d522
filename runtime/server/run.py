"""Starts a server in this process."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Unpack

import uvicorn

from ..async_engine import AsyncLLM
from ..config import Settings
from .app import ServerOptions, create_app
from .listen import address_error, bind

__all__ = ["run_server"]

#: For the last answers to reach their clients, after the requests that go on too long were ended.
_ANSWER_SECONDS = 2


def run_server(
    model: Path, options: ServerOptions, *, host: str, port: int, max_unfinished: int, **settings: Unpack[Settings]
) -> None:
    """Loads the model, serves until SIGINT or SIGTERM, then drains. `settings` as for LLM.

    Raises AddressError, before the model is loaded, for a host or port that cannot be had.
    """
    sockets = bind(host, port)
    with ExitStack() as closed:
        for each in sockets:
            closed.enter_context(each)
        llm = AsyncLLM(model, max_unfinished=max_unfinished, **settings)
        _Server(llm, options, host=host, port=sockets[0].getsockname()[1]).run(sockets)


class _Server(uvicorn.Server):
    """Says where it listens once it does; at its end every client gets an answer."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, *, host: str, port: int) -> None:
        longest = math.ceil(options.drain_seconds) + _ANSWER_SECONDS
        app = create_app(llm, options)
        super().__init__(
            uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=longest)
        )
        self._llm = llm
        self._options = options
        self._at_once = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C ends the draining, not uvicorn's own wait, in which the last answers reach their clients."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._at_once, self.force_exit = True, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then prints the addresses. Raises AddressError when another program took the port meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise address_error(error, self.config.host, self.config.port) from None
        if self.started:
            host, port = self.config.host, self.servers[0].sockets[0].getsockname()[1]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            name = self._options.model_name
            print(f"{name} at {address} (chat page), {address}/v1 (OpenAI), /metrics, /health", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains the engine while connections are open, so that requests which go on too long end with an output.

        A second Ctrl-C ends the draining at once: requests are answered with what they have.
        """
        self._say_what_is_finished()
        drain = asyncio.create_task(self._llm.shutdown(drain_seconds=self._options.drain_seconds))
        end = asyncio.create_task(super().shutdown(sockets))
        tasks = [drain, end]
        try:
            while not end.done() and not self._at_once:
                await asyncio.wait({end}, timeout=0.1)
            if not end.done():
                tasks.append(asyncio.create_task(self._llm.shutdown()))
                await asyncio.wait({end}, timeout=_ANSWER_SECONDS)
                for connection in list(self.server_state.connections):  # their clients do not read
                    connection.transport.abort()
                await asyncio.wait({end}, timeout=_ANSWER_SECONDS)
            if end.done():
                end.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _say_what_is_finished(self) -> None:
        count = self._llm.stats().num_unfinished
        if count and not self._at_once:
            requests = "1 request" if count == 1 else f"{count} requests"
            longest = f"at most {self._options.drain_seconds:g} s"
            print(f"finishing {requests} ({longest}); Ctrl-C again to stop at once", flush=True)
