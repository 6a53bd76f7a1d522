"""`pagegraft serve`. Imports the server only when it runs, because its dependencies are an extra."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .cli_options import (
    Budget,
    ChatTemplateFile,
    Device,
    KvMemory,
    Model,
    Sequences,
    Speculate,
    Threads,
    read_template,
)
from .engine.errors import ConfigurationError

__all__ = ["serve"]


def serve(
    model: Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8000,
    model_name: Annotated[Optional[str], typer.Option("--model-name", help="What clients call the model.")] = None,  # noqa: UP045
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--api-key", envvar="PAGEGRAFT_API_KEY", help="Wanted from clients as a bearer token."),
    ] = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    max_num_batched_tokens: Budget = 512,
    max_num_seqs: Sequences = None,
    device: Device = "cpu",
    speculative_tokens: Speculate = 0,
    max_unfinished: Annotated[int, typer.Option("--max-unfinished", help="Further requests get status 429.")] = 1024,
    request_timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--request-timeout", help="Seconds after which a request is ended."),
    ] = None,
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", help="For running requests at the end.")] = 30.0,
    shared_memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--shared-memory", help="Name of a shared memory region for the caches."),
    ] = None,
    chat_template: ChatTemplateFile = None,
) -> None:
    """Serves a model by OpenAI's HTTP interface, with metrics at /metrics and a chat page at /."""
    try:
        from .server.app import ServerOptions
        from .server.run import run_server
    except ImportError as error:
        raise ConfigurationError(
            f"the server needs {error.name}, which is not installed; run: pip install 'pagegraft[server]'"
        ) from error
    name = model_name or model.resolve().name
    options = ServerOptions(
        model_name=name, api_key=api_key, request_timeout=request_timeout, drain_seconds=drain_seconds
    )
    run_server(
        model,
        options,
        host=host,
        port=port,
        max_unfinished=max_unfinished,
        kv_memory=kv_memory,
        num_threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        device=device,
        num_speculative_tokens=speculative_tokens,
        shared_memory=shared_memory,
        chat_template=read_template(chat_template),
    )
