"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from ...custom_ops.errors import PagegraftError
from ..async_engine import EngineStoppedError, QueueFullError

__all__ = ["ApiError", "error_body", "status_of"]


class ApiError(PagegraftError, ValueError):
    """A request that cannot be served. `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def status_of(error: Exception) -> int:
    """HTTP status of one of our errors; 500 for any other."""
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, QueueFullError):
        return 429
    if isinstance(error, EngineStoppedError):
        return 503
    return 400 if isinstance(error, PagegraftError) else 500


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON of an error response."""
    status = status_of(error)
    message = str(error) if status != 500 else f"{type(error).__name__}: {error}"
    return {
        "error": {
            # It may quote what the client sent, lone surrogates included, which no response can hold.
            "message": message.encode("utf-8", "replace").decode(),
            "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }
