"""What `AsyncLLM` takes and tells beside prompts and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from ..custom_ops.errors import PagegraftError
from .engine.lifecycle import SchedulerCounters

__all__ = ["EngineStats", "EngineStoppedError", "QueueFullError", "RequestOptions"]


class QueueFullError(PagegraftError, RuntimeError):
    """Too many requests are unfinished; try again later."""


class EngineStoppedError(PagegraftError, RuntimeError):
    """The engine was shut down, or is about to be, and takes no requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """What a request may ask beside sampling.

    request_id: the caller's name for it; made up when None. stream: outputs as they come instead of the last only.
    priority: lower runs first. cache_salt: shares prefixes only with requests of the same salt.
    timeout: seconds after which the request ends with finish reason "timeout".
    """

    request_id: str | None = None
    stream: bool = True
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Where the engine stands. `heartbeat_age`: seconds since the stepping thread last came round."""

    alive: bool
    heartbeat_age: float
    num_running: int
    num_waiting: int
    num_unfinished: int
    kv_usage: float
    counters: SchedulerCounters
