"""The way of a request's outputs from the stepping thread to its coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from .async_types import RequestOptions
from .engine.request_book import AnyRequest
from .outputs import RequestOutput

__all__ = ["Stream", "accept", "call_in", "reject", "set_all"]


class Stream:
    """The way of one request's outputs to its coroutine. `latest` is replaced, never queued: outputs are cumulative."""

    def __init__(self, options: RequestOptions) -> None:
        self.loop = asyncio.get_running_loop()
        self.every = options.stream
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.event = asyncio.Event()
        self.latest: RequestOutput | None = None
        self.failure: Exception | None = None  # raised in the coroutine instead of an output
        self.done = False

    def offer(self, request: AnyRequest) -> bool:
        """In the stepping thread: makes an output when one is wanted; True when the coroutine is to be woken."""
        finished = request.is_finished
        if not finished and (not self.every or self.latest is not None):
            return False
        self.latest = request.output()
        return True


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in an event loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop was closed; nobody is left to hear it
        loop.call_soon_threadsafe(function, *arguments)


def set_all(streams: list[Stream]) -> None:
    """Wakes the coroutines of streams."""
    for stream in streams:
        stream.event.set()


def accept(future: asyncio.Future[None]) -> None:
    """Tells a coroutine that its request is in the engine."""
    if not future.done():
        future.set_result(None)


def reject(future: asyncio.Future[None], error: Exception) -> None:
    """Raises in a coroutine that waits for its request to be accepted."""
    if not future.done():
        future.set_exception(error)
