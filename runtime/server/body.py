"""What is looked at before a body is read: its size and its type."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_body

__all__ = ["MAX_BODY_BYTES", "BodyGuard"]

#: Most bytes of a request's body. Its JSON is held as a whole, several times.
MAX_BODY_BYTES = 32 << 20

_TOO_LARGE = f"the body is larger than the {MAX_BODY_BYTES >> 20} MiB that this server reads; send less in one request"


class BodyGuard:
    """Refuses bodies of more than MAX_BODY_BYTES with 413, and takes those without a Content-Type for JSON.

    A page of another site can have a browser send such a body without asking, but not without naming its origin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection by ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if int(headers.get("content-length", "0")) > MAX_BODY_BYTES:
            error = ApiError(_TOO_LARGE, status=413)
            await JSONResponse(error_body(error), status_code=error.status)(scope, receive, send)
            return
        if not headers.get("content-type") and "origin" not in headers:
            scope = {**scope, "headers": [*scope["headers"], (b"content-type", b"application/json")]}
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:  # in chunks, of which nobody said how many come
                raise HTTPException(status_code=413, detail=_TOO_LARGE)
            return message

        await self._app(scope, counted, send)
