"""The HTTP API over a real socket, a real store and a real (tiny) engine; only the network is left out."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from codec import Codec
from edge_agent.agent import Agent
from edge_agent.auth import BearerTokens
from edge_agent.config import EdgeConfig
from edge_agent.errors import DeadlineExceeded, NoWorker, WorkerLost
from edge_agent.http import build_app
from edge_agent.model import EdgeModel
from edge_agent.store import ContextStore
from engine import TorchEngine
from telemetry import MetricSet
from tests.edge_agent.local_transfer import LocalTransfer

TEXT = "The boiler in hall four was checked in May. " * 6
Client = TestClient[web.Request, web.Application]


@pytest.fixture
def transfer() -> LocalTransfer:
    return LocalTransfer()


@pytest.fixture
async def agent(
    engine: TorchEngine,
    codec: Codec,
    store: ContextStore,
    metrics: MetricSet,
    pool: ThreadPoolExecutor,
    transfer: LocalTransfer,
) -> Agent:
    return Agent(
        EdgeConfig(
            model="tiny",
            tenant="t",
            chunk_tokens=100,
            levels=("fp16",),
            max_requests=2,
            default_max_tokens=8,
            deadline_s=1.0,
        ),
        store=store,
        uplink=transfer,
        metrics=metrics,
        disk=pool,
        compute=pool,
        load=lambda _: EdgeModel(engine, codec),
    )


@pytest.fixture
async def client(agent: Agent) -> AsyncIterator[Client]:
    await agent.load()
    async with make_client(agent) as ready:
        yield ready


def make_client(agent: Agent, tokens: BearerTokens | None = None) -> Client:
    app = build_app(agent, tokens=tokens or BearerTokens(), max_body_bytes=20_000)
    return TestClient(TestServer(app, handler_cancellation=True))


async def sse(response: ClientResponse) -> list[tuple[str, Any]]:
    events = []
    for block in (await response.text()).strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


async def ingest(client: Client, context_id: str = "doc", text: str = TEXT) -> dict[str, Any]:
    response = await client.post("/v1/contexts", json={"id": context_id, "text": text})
    assert response.status == 200, await response.text()
    name, done = (await sse(response))[-1]
    assert name == "done"
    return dict(done)


def ask(question: str = "When?", **fields: Any) -> dict[str, Any]:
    options = fields.pop("kvtide", {"context_id": "doc"})
    return {
        "messages": [{"role": "user", "content": question}],
        "kvtide": options,
        **fields,
    }


async def error_of(response: ClientResponse, status: int, code: str) -> str:
    body = await response.json()
    assert (response.status, body["error"]["code"]) == (status, code), body
    assert set(body["error"]) == {"message", "type", "code", "status"}
    return str(body["error"]["message"])


async def test_health_is_up_before_the_model_and_readiness_after(agent: Agent) -> None:
    async with make_client(agent) as client:
        assert (await client.get("/healthz")).status == 200
        response = await client.get("/readyz")
        assert response.status == 503
        assert (await response.json())["engine"] is False
        response = await client.post("/v1/contexts", json={"text": "T"})
        await error_of(response, 503, "not_ready")
        assert response.headers["Retry-After"] == "5"
        await error_of(await client.post("/v1/chat/completions", json=ask()), 503, "not_ready")
        await agent.load()
        assert (await client.get("/readyz")).status == 200


async def test_ingest_reports_progress_and_ends_with_done(client: Client) -> None:
    response = await client.post("/v1/contexts", json={"id": "doc", "text": TEXT})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    events = await sse(response)
    stages = [data["stage"] for name, data in events if name == "progress"]
    assert list(dict.fromkeys(stages)) == ["tokenize", "prefill", "encode", "store"]
    name, done = events[-1]
    assert name == "done"
    assert (done["id"], done["num_tokens"], done["num_chunks"]) == ("doc", 270, 3)
    assert set(done["bytes_by_level"]) == {"fp16"}


async def test_ingest_as_plain_json_when_asked_for(client: Client) -> None:
    response = await client.post(
        "/v1/contexts", json={"id": "doc", "text": TEXT}, headers={"Accept": "application/json"}
    )
    assert response.status == 201
    assert (await response.json())["num_tokens"] == 270


async def test_contexts_are_listed_shown_and_deleted(client: Client) -> None:
    await ingest(client)
    listed = (await (await client.get("/v1/contexts")).json())["data"]
    shown = await (await client.get("/v1/contexts/doc")).json()
    assert listed == [shown]
    assert (shown["id"], shown["num_tokens"]) == ("doc", 270)
    assert (await client.delete("/v1/contexts/doc")).status == 200
    assert "'doc'" in await error_of(await client.get("/v1/contexts/doc"), 404, "unknown_context")
    await error_of(await client.delete("/v1/contexts/doc"), 404, "unknown_context")
    await error_of(await client.get("/v1/contexts/a%2Fb"), 400, "bad_request")


async def test_answer_is_the_same_streamed_and_whole(client: Client) -> None:
    await ingest(client)
    whole = await (await client.post("/v1/chat/completions", json=ask())).json()
    streamed = await client.post(
        "/v1/chat/completions", json=ask(stream=True, stream_options={"include_usage": True})
    )
    events = [data for _, data in await sse(streamed)]
    assert events.pop() == "[DONE]"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["choices"][0]["message"]["content"] != ""
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 270
    assert whole["usage"]["completion_tokens"] == 8
    for report in (events[-1]["kvtide"], whole["kvtide"]):
        assert report["ttft_s"] == 0.5
        assert report["slo_met"] is True
        assert [chunk["token_stop"] for chunk in report["chunks"]] == [100, 200, 270]


async def test_context_is_found_as_the_beginning_of_the_messages(client: Client) -> None:
    await ingest(client)
    by_id = await (await client.post("/v1/chat/completions", json=ask())).json()
    for messages in (
        [{"role": "user", "content": TEXT + "\n\nWhen?"}],
        [{"role": "system", "content": TEXT}, {"role": "user", "content": "When?"}],
    ):
        response = await client.post("/v1/chat/completions", json={"messages": messages})
        body = await response.json()
        assert body["usage"] == by_id["usage"]
        assert body["choices"] == by_id["choices"]
    # The id and the context together do not ask about the context twice.
    both = ask(TEXT + "\n\nWhen?")
    body = await (await client.post("/v1/chat/completions", json=both)).json()
    assert body["usage"] == by_id["usage"]


async def test_without_context_it_is_a_plain_chat(client: Client) -> None:
    response = await client.post("/v1/chat/completions", json=ask(kvtide={}))
    body = await response.json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert body["kvtide"]["chunks"] == []


async def test_stop_string_ends_the_answer(client: Client) -> None:
    await ingest(client)
    whole = await (await client.post("/v1/chat/completions", json=ask(max_tokens=40))).json()
    text = whole["choices"][0]["message"]["content"]
    stop = text[3]
    body = await (
        await client.post("/v1/chat/completions", json=ask(max_tokens=40, stop=stop))
    ).json()
    assert body["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]


async def test_bad_requests_are_named(client: Client) -> None:
    await ingest(client)
    post = client.post
    url = "/v1/chat/completions"
    assert "JSON" in await error_of(await post(url, data=b"{"), 400, "bad_request")
    deep = b'{"messages":' + b"[" * 9000 + b"]" * 9000 + b"}"
    await error_of(await post(url, data=deep), 400, "bad_request")
    assert "'no'" in await error_of(
        await post(url, json=ask(kvtide={"context_id": "no"})), 404, "unknown_context"
    )
    assert "other" in await error_of(
        await post(url, json=ask(model="other")), 409, "model_mismatch"
    )
    assert "511" in await error_of(await post(url, json=ask("x" * 300)), 413, "context_too_long")
    await error_of(await post(url, json=ask("x" * 30_000)), 413, "body_too_large")
    await error_of(await post("/v1/contexts", json={"text": " "}), 400, "bad_request")
    await error_of(await post("/v1/contexts", json={"text": "x" * 600}), 413, "context_too_long")
    await error_of(
        await post("/v1/contexts", json={"text": "x", "levels": ["fp17"]}), 400, "bad_request"
    )
    await error_of(
        await post("/v1/contexts", json={"id": "doc", "text": "other"}), 409, "context_exists"
    )
    await error_of(await client.get("/nowhere"), 404, "not_found")
    response = await client.put("/v1/contexts", json={})
    await error_of(response, 405, "method_not_allowed")
    assert "POST" in response.headers["Allow"]


async def test_only_the_context_and_no_question_is_refused(client: Client) -> None:
    await ingest(client)
    body = {"messages": [{"role": "user", "content": TEXT}]}
    message = await error_of(
        await client.post("/v1/chat/completions", json=body), 400, "bad_request"
    )
    assert "nothing to answer" in message


async def test_full_store_is_507_before_and_an_error_event_during_the_stream(
    client: Client, store: ContextStore
) -> None:
    store._quota_bytes = 20_000
    plain = {"Accept": "application/json"}
    body = {"id": "doc", "text": TEXT}
    await error_of(await client.post("/v1/contexts", json=body, headers=plain), 507, "store_full")
    name, data = (await sse(await client.post("/v1/contexts", json=body)))[-1]
    assert (name, data["error"]["code"], data["error"]["status"]) == ("error", "store_full", 507)
    assert (await (await client.get("/v1/contexts")).json())["data"] == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoWorker("no worker answered within 2 s"), 503, "no_worker"),
        (WorkerLost("the worker went silent"), 502, "worker_lost"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
    ],
)
async def test_failed_transfer_has_its_status_even_when_streaming(
    client: Client, transfer: LocalTransfer, error: Any, status: int, code: str
) -> None:
    await ingest(client)
    transfer.error = error
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json=ask(stream=stream))
        assert str(error) == await error_of(response, status, code)


async def test_failure_after_the_first_token_is_an_error_event_without_done(
    client: Client, transfer: LocalTransfer
) -> None:
    await ingest(client)
    transfer.error, transfer.error_after_tokens = WorkerLost("the worker went silent"), 3
    response = await client.post("/v1/chat/completions", json=ask(stream=True))
    assert response.status == 200
    events = [data for _, data in await sse(response)]
    assert events[-1]["error"]["code"] == "worker_lost"
    assert "[DONE]" not in events
    metrics = await (await client.get("/metrics")).text()
    assert 'kvtide_edge_requests_total{outcome="failed"} 1.0' in metrics
    assert 'kvtide_edge_requests_total{outcome="cancelled"} 1.0' not in metrics


async def test_context_that_is_evicted_after_it_was_found_leaves_a_plain_chat(
    client: Client, store: ContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ingest(client)
    find = store.find_by_text

    def found_and_evicted(text: str, **options: Any) -> Any:
        found = find(text, **options)
        assert found is not None
        store.delete(found.context_id)
        return found

    monkeypatch.setattr(store, "find_by_text", found_and_evicted)
    body = ask(question=TEXT + "\n\nWhen?", kvtide={})
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status == 200, await response.text()
    assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_client_that_goes_away_cancels_the_transfer(
    client: Client, transfer: LocalTransfer, agent: Agent
) -> None:
    await ingest(client)
    transfer.hold = asyncio.Event()
    response = await client.post("/v1/chat/completions", json=ask(stream=True))
    await response.content.readany()
    response.close()
    await asyncio.wait_for(agent.wait_idle(10), 11)
    assert transfer.num_cancelled == 1
    # The same without streaming, where nothing was written yet.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.post("/v1/chat/completions", json=ask())
    await asyncio.wait_for(agent.wait_idle(10), 11)
    assert transfer.num_cancelled == 2
    assert agent.num_requests == 0


async def test_more_requests_than_allowed_get_503(client: Client, transfer: LocalTransfer) -> None:
    await ingest(client)
    transfer.hold = asyncio.Event()
    held = [await client.post("/v1/chat/completions", json=ask(stream=True)) for _ in range(2)]
    await error_of(await client.post("/v1/chat/completions", json=ask()), 503, "too_busy")
    transfer.hold.set()
    for response in held:
        assert "[DONE]" in await response.text()
    assert (await client.post("/v1/chat/completions", json=ask())).status == 200


async def test_draining_agent_refuses_new_work_and_finishes_the_old(
    client: Client, transfer: LocalTransfer, agent: Agent
) -> None:
    await ingest(client)
    transfer.hold = asyncio.Event()
    running = await client.post("/v1/chat/completions", json=ask(stream=True))
    agent.start_draining()
    await error_of(await client.post("/v1/chat/completions", json=ask()), 503, "draining")
    assert (await client.get("/readyz")).status == 503
    transfer.hold.set()
    assert "[DONE]" in await running.text()
    await asyncio.wait_for(agent.wait_idle(10), 11)


async def test_bearer_token_is_needed_where_set(agent: Agent) -> None:
    await agent.load()
    tokens = BearerTokens([hashlib.sha256(b"key").digest()])
    async with make_client(agent, tokens) as client:
        response = await client.get("/v1/contexts")
        await error_of(response, 401, "unauthorized")
        assert response.headers["WWW-Authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer key"}
        assert (await client.get("/v1/contexts", headers=headers)).status == 200
        assert (await client.get("/healthz")).status == 200


async def test_metrics_count_what_happened(client: Client) -> None:
    await ingest(client)
    await client.post("/v1/chat/completions", json=ask())
    await client.post("/v1/chat/completions", json=ask(kvtide={"context_id": "no"}))
    text = await (await client.get("/metrics")).text()
    assert 'kvtide_edge_requests_total{outcome="ok"} 1.0' in text
    assert 'kvtide_edge_requests_total{outcome="failed"} 1.0' in text
    assert 'kvtide_edge_ingests_total{outcome="ok"} 1.0' in text
    assert "kvtide_edge_ingested_tokens_total 270.0" in text
    assert "kvtide_edge_store_contexts 1.0" in text
    assert 'kvtide_edge_ttft_seconds_count{policy="cachegen"} 1.0' in text
    assert 'method="POST",status="4xx"} 1.0' in text


async def test_models_are_listed(client: Client) -> None:
    body = await (await client.get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["tiny"]


async def test_no_text_of_a_client_is_logged(
    client: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from telemetry import configure_logging

    configure_logging("debug", program="kvtide-edge")
    await ingest(client, text="SECRETREPORT " + TEXT)
    await client.post("/v1/chat/completions", json=ask("SECRETQUESTION?"))
    await client.post("/v1/chat/completions", json=ask("SECRETQUESTION?" * 40))
    printed = capsys.readouterr().out
    assert "transfer.done" in printed
    assert "SECRET" not in printed
