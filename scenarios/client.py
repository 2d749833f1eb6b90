"""The agent's HTTP API, as a client of it sees it.

Owns: ingesting with progress, asking with a streamed answer, and turning the `kvtide` object of the answer
into records. Invariant: an answer that is not of the documented shape is a `ReplayError` that names the
field. Must not know: processes, links.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from scenarios.errors import ReplayError
from scenarios.results import ChunkRecord, EvaluationRecord, IngestRecord, RequestRecord

OnStage = Callable[[str, int, int], None]
"""Called with stage, done and total."""
MAX_LINE_BYTES = 64 * 2**20
"""The last event of an answer carries the whole trace of the request."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to make."""

    policy: str
    """Name in the report."""
    request_policy: str
    """Name that the agent knows."""
    context: str
    question: str
    deadline_s: float
    max_tokens: int
    repetition: int = 0
    estimator: str = ""
    evaluate: bool = True
    agent: int = 0


async def ingest(
    http: aiohttp.ClientSession,
    base_url: str,
    *,
    context: str,
    text: str,
    on_stage: OnStage,
    timeout_s: float,
) -> IngestRecord:
    """Store a context at the agent.

    Raises:
        ReplayError: the agent refused it, or its answer is not of the documented shape.
    """
    done: Mapping[str, Any] | None = None
    async with _post(
        http, f"{base_url}/v1/contexts", {"id": context, "text": text}, timeout_s
    ) as response:
        await _refuse_error(response, f"the ingest of {context!r}")
        async for event, data in _events(response):
            if event == "error" or "error" in data:
                raise ReplayError(f"the ingest of {context!r} failed: {_message(data)}")
            if event == "done" or "num_tokens" in data:
                done = data
            elif "stage" in data:
                on_stage(str(data["stage"]), int(data["done"]), int(data["total"]))
    if done is None:
        raise ReplayError(f"the ingest of {context!r} ended without a last word")
    try:
        return IngestRecord(
            context=context,
            num_tokens=int(done["num_tokens"]),
            num_chunks=int(done["num_chunks"]),
            bytes_by_level={str(k): int(v) for k, v in done["bytes_by_level"].items()},
            duration_s=float(done.get("duration_s", 0.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplayError(f"the answer to an ingest lacks or garbles {error}") from error


async def ask(
    http: aiohttp.ClientSession, base_url: str, request: Ask, *, timeout_s: float
) -> RequestRecord:
    """Ask a question and collect the answer; a refusal by the agent is a record with an error.

    Raises:
        ReplayError: the answer is not of the documented shape.
    """
    extra: dict[str, Any] = {
        "context_id": request.context,
        "policy": request.request_policy,
        "deadline_s": request.deadline_s,
        "evaluate": request.evaluate,
        "trace": True,
    }
    if request.estimator:
        extra["estimator"] = request.estimator
    body = {
        "messages": [{"role": "user", "content": request.question}],
        "stream": True,
        "temperature": 0.0,
        "max_tokens": request.max_tokens,
        "kvtide": extra,
    }
    answer: list[str] = []
    kvtide: Mapping[str, Any] | None = None
    problem = ""
    try:
        async with _post(http, f"{base_url}/v1/chat/completions", body, timeout_s) as response:
            if response.status != 200:
                problem = f"HTTP {response.status}: {_message(await _json(response))}"
            else:
                async for _, data in _events(response):
                    if "error" in data:
                        problem = _message(data)
                        break
                    answer += [
                        str(choice.get("delta", {}).get("content") or "")
                        for choice in data.get("choices", [])
                    ]
                    kvtide = data.get("kvtide") or kvtide
    except TimeoutError:
        problem = f"no whole answer within {timeout_s:g} s"
    except aiohttp.ClientError as error:
        problem = f"the connection to the agent broke: {error}"
    if not problem and kvtide is None:
        problem = "the answer came without its kvtide object"
    return to_record(request, "".join(answer), kvtide or {}, problem)


def to_record(
    request: Ask, answer: str, kvtide: Mapping[str, Any], problem: str = ""
) -> RequestRecord:
    """Build a record from an answer.

    Raises:
        ReplayError: a field is missing or of the wrong type.
    """
    try:
        chunks = tuple(
            ChunkRecord(
                index=int(chunk["index"]),
                token_start=int(chunk["token_start"]),
                token_stop=int(chunk["token_stop"]),
                choice=str(chunk["choice"]),
                num_bytes=int(chunk["bytes"]),
                epoch=int(chunk.get("epoch", 0)),
                send_start_s=_seconds(chunk, "send_start_s"),
                acked_s=_seconds(chunk, "acked_s"),
                decode_start_s=_seconds(chunk, "decode_start_s"),
                decode_end_s=_seconds(chunk, "decode_end_s"),
                ready_s=_seconds(chunk, "ready_s"),
            )
            for chunk in kvtide.get("chunks") or ()
        )
        first_token_s = _seconds(kvtide, "first_token_s")
        return RequestRecord(
            policy=request.policy,
            context=request.context,
            question=request.question,
            repetition=request.repetition,
            deadline_s=request.deadline_s,
            num_tokens=max((chunk.token_stop for chunk in chunks), default=0),
            ttft_s=first_token_s if not problem or first_token_s is not None else None,
            bytes_sent=int(kvtide.get("bytes_sent") or 0),
            answer=answer,
            chunks=chunks,
            prefill_start_s=_seconds(kvtide, "prefill_start_s"),
            prefill_end_s=_seconds(kvtide, "prefill_end_s"),
            last_token_s=_seconds(kvtide, "last_token_s"),
            delivery=tuple((float(t), float(r)) for t, r in kvtide.get("delivery") or ()),
            decisions=tuple(dict(decision) for decision in kvtide.get("decisions") or ()),
            worker_changes=int(kvtide.get("worker_changes") or 0),
            evaluation=_evaluation(kvtide.get("evaluation")),
            error=problem,
            agent=request.agent,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplayError(f"the kvtide object of an answer lacks or garbles {error}") from error


def _evaluation(fields: Mapping[str, Any] | None) -> EvaluationRecord | None:
    if not fields or "kl" not in fields:
        return None
    return EvaluationRecord(
        kl=float(fields["kl"]),
        top1=float(fields["top1"]),
        # The worker reports a share of the exact answer's tokens; only all of them are a match.
        greedy_match=float(fields["greedy_match"]) == 1.0,
        exact_text=str(fields.get("exact_text", "")),
    )


def _seconds(fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    return None if value is None else float(value)


def _post(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    headers = {"Accept": "text/event-stream"}
    return http.post(url, json=body, timeout=timeout, headers=headers)


async def _refuse_error(response: aiohttp.ClientResponse, what: str) -> None:
    if response.status >= 400:
        raise ReplayError(
            f"{what} failed: HTTP {response.status}: {_message(await _json(response))}"
        )


async def _json(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    text = await response.text()
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return {"error": {"message": text[:300]}}
    return document if isinstance(document, dict) else {}


def _message(data: Mapping[str, Any]) -> str:
    error = data.get("error", data)
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


async def _events(
    response: aiohttp.ClientResponse,
) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and data of server-sent events until the end or `[DONE]`; JSON is one event."""
    if response.content_type == "application/json":
        yield "", await _json(response)
        return
    name, data = "", b""
    async for line in _read_lines(response):
        if not line:
            if data:
                if data == b"[DONE]":
                    return
                yield name, _object(data)
            name, data = "", b""
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode()
        elif line.startswith(b"data:"):
            data += line[5:].strip()


async def _read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length; aiohttp's own reader refuses long ones."""
    rest = b""
    async for block in response.content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(rest) > MAX_LINE_BYTES:
            raise ReplayError(f"the agent sent a line of more than {MAX_LINE_BYTES} bytes")
        await asyncio.sleep(0)


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        raise ReplayError(f"the agent sent an event that is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ReplayError("the agent sent an event that is no JSON object")
    return document
