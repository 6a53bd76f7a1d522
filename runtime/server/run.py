"""Starts a server in this process."""

from __future__ import annotations

import asyncio
import math
import socket
from pathlib import Path
from typing import Unpack

import uvicorn

from ..async_engine import AsyncLLM
from ..config import Settings
from .app import ServerOptions, create_app

__all__ = ["run_server"]

#: For the last answers to reach their clients, after the requests that go on too long were ended.
_ANSWER_SECONDS = 2


def run_server(
    model: Path, options: ServerOptions, *, host: str, port: int, max_unfinished: int, **settings: Unpack[Settings]
) -> None:
    """Loads the model, serves until SIGINT or SIGTERM, then drains. `settings` as for LLM."""
    llm = AsyncLLM(model, max_unfinished=max_unfinished, **settings)
    _Server(llm, options, host=host, port=port).run()


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Binds, then prints the addresses; prints nothing when the port is taken."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            address = f"http://{self.config.host}:{port}"
            name = self._options.model_name
            print(f"{name} at {address} (chat page), {address}/v1 (OpenAI), /metrics, /health", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains the engine while connections are open, so that requests which go on too long end with an output."""
        drain = asyncio.create_task(self._llm.shutdown(drain_seconds=self._options.drain_seconds))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()
