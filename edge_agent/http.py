"""The HTTP API: OpenAI's chat shape, contexts, health and metrics.

Handlers read a body, call the agent's services and write what comes out. Invariants: every error
is a JSON body with one sentence and the status of its class; a client that closes its connection
cancels what it asked for (the server runs with handler cancellation). Must not know: NATS, planner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from edge_agent.api import (
    ChatRequest,
    NewContext,
    completion_chunk_json,
    completion_json,
    context_json,
    error_json,
    parse_chat,
    parse_context_id,
    parse_new_context,
    usage_json,
)
from edge_agent.auth import BearerTokens
from edge_agent.chat import Answer
from edge_agent.errors import AgentError, BadRequest
from edge_agent.ingest import IngestResult, Progress
from edge_agent.store import ContextInfo
from telemetry import Event, MetricSet, get_logger, names
from telemetry.metrics import CONTENT_TYPE

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that need no bearer token; they show no content."""

BODY_TIMEOUT_S = 30.0
"""Time for a request's body to arrive: 16 MiB at 5 Mbit/s. Unit: seconds."""

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies such as nginx hold streamed answers back without this.
    "X-Accel-Buffering": "no",
}
_HTTP_ERRORS = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}

_log = get_logger("edge_agent")


class Service(Protocol):
    """What the API needs from the agent."""

    model_name: str
    metrics: MetricSet

    def readiness(self) -> dict[str, bool]:
        """Return each condition of being ready, by name."""

    def refresh_metrics(self) -> Awaitable[None]:
        """Bring gauges up to date."""

    def ingest(
        self, new: NewContext, on_progress: Callable[[Progress], None]
    ) -> Awaitable[IngestResult]:
        """Store a context."""

    def list_contexts(self) -> Awaitable[list[ContextInfo]]: ...

    def describe_context(self, context_id: str) -> Awaitable[ContextInfo]: ...

    def delete_context(self, context_id: str) -> Awaitable[None]: ...

    def chat(
        self, request: ChatRequest, *, arrived_at: float
    ) -> contextlib.AbstractAsyncContextManager[Answer]:
        """Answer a chat request; leaving the context early cancels it."""


SERVICE_KEY: web.AppKey[Service] = web.AppKey("service", Service)
TOKENS_KEY = web.AppKey("tokens", BearerTokens)


def build_app(service: Service, *, tokens: BearerTokens, max_body_bytes: int) -> web.Application:
    """Build the application.

    Args:
        service: the agent.
        tokens: who may call; empty lets everybody.
        max_body_bytes: larger bodies get 413.
    """
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_answer_errors, _authorize])
    app[SERVICE_KEY] = service
    app[TOKENS_KEY] = tokens
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
            web.get("/v1/models", _models),
            web.post("/v1/contexts", _post_context),
            web.get("/v1/contexts", _get_contexts),
            web.get("/v1/contexts/{context_id}", _get_context),
            web.delete("/v1/contexts/{context_id}", _delete_context),
            web.post("/v1/chat/completions", _post_chat),
        ]
    )
    return app


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    metrics = request.app[SERVICE_KEY].metrics
    try:
        response = await handler(request)
    except AgentError as error:
        response = _error_response(error)
    except web.HTTPException as error:
        response = _http_error_response(error)
    except (asyncio.CancelledError, ConnectionError):
        # The client is gone; there is nobody to answer.
        raise
    except Exception as error:
        _log.exception(Event.TASK_FAILED, path=request.path, error=type(error).__name__)
        response = _error_response(AgentError("the agent failed; its log says more"))
    method = request.method if request.method in names.Label.METHOD.allowed else "other"
    metrics.add(names.EDGE_HTTP_RESPONSES, 1, method, f"{response.status // 100}xx")
    return response


@web.middleware
async def _authorize(request: web.Request, handler: _Handler) -> web.StreamResponse:
    tokens = request.app[TOKENS_KEY]
    if request.path not in OPEN_PATHS and not tokens.allows(request.headers.get("Authorization")):
        body = {
            "error": {
                "message": "the request needs a valid bearer token in its Authorization header",
                "type": "invalid_request_error",
                "code": "unauthorized",
                "status": 401,
            }
        }
        return web.json_response(body, status=401, headers={"WWW-Authenticate": "Bearer"})
    return await handler(request)


async def _healthz(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    conditions = request.app[SERVICE_KEY].readiness()
    is_ready = conditions["engine"] and not conditions["draining"]
    return web.json_response(
        {"status": "ready" if is_ready else "not ready", **conditions},
        status=200 if is_ready else 503,
    )


async def _metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE_KEY]
    await service.refresh_metrics()
    return web.Response(body=service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def _models(request: web.Request) -> web.Response:
    name = request.app[SERVICE_KEY].model_name
    return web.json_response(
        {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "kvtide"}]}
    )


async def _post_context(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE_KEY]
    new = parse_new_context(await _read_json(request))
    accept = request.headers.get("Accept", "")
    if "application/json" in accept and "text/event-stream" not in accept:
        result = await service.ingest(new, lambda _: None)
        return web.json_response(_ingested_json(result), status=201)
    reports: asyncio.Queue[Progress | None] = asyncio.Queue()
    task = asyncio.ensure_future(service.ingest(new, reports.put_nowait))
    task.add_done_callback(lambda _: reports.put_nowait(None))
    try:
        # Nothing is written before the first step is done, so that early errors keep their status.
        first = await reports.get()
        while first is not None and first.done == 0:
            first = await reports.get()
        if first is None:
            return await _stream_end(request, None, task)
        response = web.StreamResponse(headers=_SSE_HEADERS)
        await response.prepare(request)
        report: Progress | None = first
        while report is not None:
            await _send_event(
                response,
                "progress",
                {"stage": report.stage, "done": report.done, "total": report.total},
            )
            report = await reports.get()
        return await _stream_end(request, response, task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _stream_end(
    request: web.Request,
    response: web.StreamResponse | None,
    task: asyncio.Future[IngestResult],
) -> web.StreamResponse:
    try:
        result = await task
    except AgentError as error:
        if response is None:
            raise
        await _send_event(response, "error", error_json(error))
    else:
        if response is None:
            response = web.StreamResponse(headers=_SSE_HEADERS)
            await response.prepare(request)
        await _send_event(response, "done", _ingested_json(result))
    await response.write_eof()
    return response


async def _get_contexts(request: web.Request) -> web.Response:
    contexts = await request.app[SERVICE_KEY].list_contexts()
    return web.json_response(
        {"object": "list", "data": [context_json(context) for context in contexts]}
    )


async def _get_context(request: web.Request) -> web.Response:
    context_id = parse_context_id(request.match_info["context_id"], "the context id")
    info = await request.app[SERVICE_KEY].describe_context(context_id)
    return web.json_response(context_json(info))


async def _delete_context(request: web.Request) -> web.Response:
    context_id = parse_context_id(request.match_info["context_id"], "the context id")
    await request.app[SERVICE_KEY].delete_context(context_id)
    return web.json_response({"id": context_id, "object": "kvtide.context", "deleted": True})


async def _post_chat(request: web.Request) -> web.StreamResponse:
    arrived_at = time.monotonic()
    service = request.app[SERVICE_KEY]
    chat = parse_chat(await _read_json(request))
    created = int(time.time())
    async with service.chat(chat, arrived_at=arrived_at) as answer:
        if chat.stream:
            return await _stream_answer(request, chat, answer, created, service.model_name)
        async for _ in answer.pieces():
            pass
        body = completion_json(
            request_id=answer.request_id,
            created=created,
            model=service.model_name,
            text=answer.text,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.context_tokens,
            completion_tokens=answer.completion_tokens,
            kvtide=answer.report_json(),
        )
        return web.json_response(body)


async def _stream_answer(
    request: web.Request, chat: ChatRequest, answer: Answer, created: int, model: str
) -> web.StreamResponse:
    def event(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return completion_chunk_json(
            request_id=answer.request_id,
            created=created,
            model=model,
            delta=delta,
            finish_reason=finish_reason,
        )

    response = web.StreamResponse(headers=_SSE_HEADERS)
    try:
        async with contextlib.aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if not response.prepared:
                    # Only now: an error before the first token still has its own status.
                    await response.prepare(request)
                    await _send_data(response, event({"role": "assistant", "content": ""}))
                if piece:
                    await _send_data(response, event({"content": piece}))
    except AgentError as error:
        if not response.prepared:
            raise
        await _send_data(response, error_json(error))
        await response.write_eof()
        return response
    if not response.prepared:
        await response.prepare(request)
        await _send_data(response, event({"role": "assistant", "content": ""}))
    last = event({}, answer.finish_reason)
    last["kvtide"] = answer.report_json()
    if chat.include_usage:
        last["usage"] = usage_json(
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.context_tokens,
            completion_tokens=answer.completion_tokens,
        )
    await _send_data(response, last)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _read_json(request: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await request.read()
    except TimeoutError as error:
        raise BadRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest("the body is not valid JSON") from error


async def _send_event(response: web.StreamResponse, name: str, data: object) -> None:
    await response.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())


async def _send_data(response: web.StreamResponse, data: object) -> None:
    await response.write(f"data: {json.dumps(data)}\n\n".encode())


def _ingested_json(result: IngestResult) -> dict[str, Any]:
    return {
        "id": result.context.context_id,
        "num_tokens": result.context.num_tokens,
        "num_chunks": len(result.context.spans),
        "bytes_by_level": result.bytes_by_level,
        "prefilled_tokens": result.prefilled_tokens,
        "duration_s": round(result.duration_s, 3),
    }


def _error_response(error: AgentError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
    if error.http_status >= 500:
        _log.warning(Event.HTTP_ERROR, code=error.code, status=error.http_status, error=str(error))
    return web.json_response(error_json(error), status=error.http_status, headers=headers)


def _http_error_response(error: web.HTTPException) -> web.Response:
    """Give aiohttp's own errors (no such path, body too large) our shape."""
    messages = {
        404: "there is nothing at this path",
        405: "this path does not take this method",
        413: "the request body is larger than max_body_bytes allows",
    }
    body = {
        "error": {
            "message": messages.get(error.status, error.reason),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "code": _HTTP_ERRORS.get(error.status, "http_error"),
            "status": error.status,
        }
    }
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return web.json_response(body, status=error.status, headers=headers)
