"""The HTTP face: routes, errors, disconnects, health."""

from __future__ import annotations

import asyncio
import html
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ...custom_ops.errors import PagegraftError
from ..async_engine import AsyncLLM
from .body import BodyGuard
from .errors import ApiError, error_body, status_of
from .metrics import ServerMetrics
from .protocol import ChatRequest, CompletionRequest
from .serving import Job, Serving

T = TypeVar("T")

__all__ = ["ServerOptions", "create_app"]

_PAGE = Path(__file__).with_name("page.html")
#: nginx's own status for a client that went away; nobody reads it.
_CLIENT_CLOSED = 499


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """model_name: what clients call the model. api_key: wanted as bearer token when set. request_timeout: seconds.

    drain_seconds: how long requests may go on when the server stops. stall_seconds: a step that takes longer makes the
    server unhealthy.
    """

    model_name: str
    api_key: str | None = None
    request_timeout: float | None = None
    drain_seconds: float = 30.0
    stall_seconds: float = 120.0


def create_app(llm: AsyncLLM, options: ServerOptions) -> FastAPI:
    """The application over a running engine, which it shuts down at its own end."""
    metrics = ServerMetrics(llm, options.model_name)
    serving = Serving(llm, metrics, options.model_name, timeout=options.request_timeout)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await llm.shutdown(drain_seconds=options.drain_seconds)

    app = FastAPI(title="pagegraft", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    _add_errors(app)
    app.add_middleware(BodyGuard)
    if options.api_key is not None:
        _add_key_check(app, options.api_key)
    _add_health(app, llm, options.stall_seconds)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(serving, serving.completion_job(body), request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        # Not in the event loop, where a long conversation would hold up everybody's streams.
        return await _answer(serving, await asyncio.to_thread(serving.chat_job, body), request)

    def model_entry() -> dict[str, Any]:
        limit = llm.model.engine.limits.max_context
        entry = {"id": options.model_name, "object": "model", "created": created, "owned_by": "pagegraft"}
        return {**entry, "max_model_len": limit}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_entry()]}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        serving.check_model(model)
        return model_entry()

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        hidden = "hidden" if options.api_key is None else ""
        text = _PAGE.read_text(encoding="utf-8").replace("{{hidden}}", hidden)
        return text.replace("{{model}}", html.escape(options.model_name))

    return app


def _add_health(app: FastAPI, llm: AsyncLLM, stall_seconds: float) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        stats = llm.stats()
        healthy = stats.alive and stats.heartbeat_age < stall_seconds
        content = {
            "status": "ok" if healthy else "stalled" if stats.alive else "stopped",
            "heartbeat_age": round(stats.heartbeat_age, 3),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }
        return JSONResponse(content, status_code=200 if healthy else 503)


async def _answer(serving: Serving, job: Job, request: Request) -> Response:
    """A response, or a stream. The requests behind it are aborted when the client goes away."""
    if not job.body.stream:
        content = await _while_connected(request, serving.respond(job))
        return Response(status_code=_CLIENT_CLOSED) if content is None else JSONResponse(content)
    started = await _while_connected(request, serving.start(job))
    if started is None:
        return Response(status_code=_CLIENT_CLOSED)
    events = serving.events(job, *started)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client went away first; `work` is cancelled then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return _result(task)
        return None
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def _result(task: asyncio.Task[T]) -> T:
    """A task's result; of several errors at once the first."""
    try:
        return task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def _disconnected(request: Request) -> None:
    # The body was read, so that the next message is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PagegraftError)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(error), status_code=status_of(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        refusal = _malformed(request, error)
        return JSONResponse(error_body(refusal), status_code=refusal.status)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: Exception) -> JSONResponse:
        # The framework's own: no such path or method, a body that is no JSON.
        status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        ours = ApiError(getattr(error, "detail", str(error)) + cause, status=status)
        return JSONResponse(error_body(ours), status_code=status, headers=headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(error), status_code=500)


def _malformed(request: Request, error: RequestValidationError) -> ApiError:
    """What is wrong with a body, and where."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        before = str(error.body)[: place[0]]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return ApiError(f"the body is not JSON: {first['ctx']['error']} at line {line}, column {column}")
    if not place and first["type"] == "missing":
        return ApiError("the body is empty; send a JSON object")
    kind = request.headers.get("content-type")
    if not place and "json" not in (kind or ""):
        given = f"is {kind!r:.60}" if kind else "is missing"
        return ApiError(f"the header Content-Type {given}; it must be application/json, for the body is read as JSON")
    where = ".".join(map(str, place))
    return ApiError(f"{where or 'body'}: {first['msg']}", param=str(place[0]) if place else None)


def _add_key_check(app: FastAPI, key: str) -> None:
    @app.middleware("http")
    async def check(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "")
        if request.url.path.startswith("/v1/") and not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            error = ApiError("the API key is missing or wrong: send it as Authorization: Bearer KEY", status=401)
            return JSONResponse(error_body(error), status_code=401)
        return await call(request)
