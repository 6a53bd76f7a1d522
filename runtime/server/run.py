"""Starts a server in this process."""

from __future__ import annotations

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
    address = f"http://{host}:{port}"
    print(f"{options.model_name} at {address} (chat page), {address}/v1 (OpenAI), /metrics, /health", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=int(options.drain_seconds))
