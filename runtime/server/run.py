"""Starts a server in this process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Unpack

import uvicorn

from ..async_engine import AsyncLLM
from ..config import Settings
from .app import ServerOptions, create_app

__all__ = ["run_server"]


def run_server(
    model: Path, options: ServerOptions, *, host: str, port: int, max_unfinished: int, **settings: Unpack[Settings]
) -> None:
    """Loads the model, serves until SIGINT or SIGTERM, then drains. `settings` as for LLM."""
    llm = AsyncLLM(model, max_unfinished=max_unfinished, **settings)
    app = create_app(llm, options)
    drain = int(options.drain_seconds)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=drain)
    _Server(config, options.model_name).run()


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    def __init__(self, config: uvicorn.Config, model_name: str) -> None:
        super().__init__(config)
        self._model_name = model_name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Binds, then prints the addresses; prints nothing when the port is taken."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            address = f"http://{self.config.host}:{port}"
            print(f"{self._model_name} at {address} (chat page), {address}/v1 (OpenAI), /metrics, /health", flush=True)
