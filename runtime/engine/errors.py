"""Exceptions of the runtime's engine. Each message names the thing, the reason and the fix."""

from __future__ import annotations

from ...custom_ops.errors import PagegraftError

__all__ = ["CacheMemoryError", "ConfigurationError", "RequestError", "StepError"]


class ConfigurationError(PagegraftError, ValueError):
    """Settings with which the engine cannot run."""


class CacheMemoryError(ConfigurationError):
    """The memory that the caches would take is not there."""


class RequestError(PagegraftError, ValueError):
    """A request that can never run; nothing was queued."""


class StepError(PagegraftError, RuntimeError):
    """The model failed on a step; the requests that caused it end with this error, the engine goes on."""
