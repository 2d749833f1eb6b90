"""The session's loop, step by step, against a real pair of sessions."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from codec import Codec
from edge_agent.errors import CorruptChunk
from edge_agent.ingest import Ingestor
from edge_agent.planning import build_plan
from edge_agent.sharing import UplinkShares
from edge_agent.store import ContextStore
from edge_agent.timeline import ChunkRecord, Timeline
from edge_agent.transfer import Mailbox, SessionLoop
from engine import TorchEngine
from planner import Choice, Decision, MedianRate, Reason, Stage, make_policy
from telemetry import MetricSet
from wire import (
    Accept,
    ChunkRange,
    ChunkReady,
    Lane,
    Open,
    OutgoingChunk,
    ReceiverSession,
    SenderSession,
    Speeds,
    agent_inbox,
)

SESSION = bytes(16)


@pytest.fixture
async def loop(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    engine: TorchEngine,
    codec: Codec,
    pool: ThreadPoolExecutor,
) -> SessionLoop:
    """A loop whose worker has just accepted."""
    text = "The boiler in hall four was checked in May. " * 6
    result = await ingestor.ingest(text, context_id="doc", levels=None, on_progress=lambda _: None)
    context = result.context
    sizes = store.chunk_sizes(context)
    now = time.monotonic()
    opening = Open(
        tenant="t",
        inbox=agent_inbox("t", "e"),
        model_name="tiny",
        model_digest=engine.identity.digest,
        profile_digest=ingestor.profile_digest,
        chunks=tuple(ChunkRange(s.token_start, s.token_stop, s.key) for s in context.spans),
        max_chunk_bytes=max(n for entry in sizes for n in entry.values()),
        question_tokens=3,
        max_tokens=4,
        deadline_s=5.0,
    )
    accept = Accept(
        worker="w",
        window_bytes=2**24,
        segment_bytes=2**18,
        speeds=Speeds(1e9, 1e-4, 0.0),
        queue_delay_s=0.0,
        backend="cpu",
    )
    sender = SenderSession(opening, context.token_ids, session=SESSION, now=now)
    receiver = ReceiverSession(opening, accept, session=SESSION, now=now)
    sender.receive(receiver.accept_frame(), now=now)
    assert sender.next_event() == accept
    timeline = Timeline(
        arrived_at=now, session="00", policy="text", estimator="median-rate", deadline_s=5.0
    )
    timeline.chunks = [
        ChunkRecord(i, span.token_start, span.token_stop) for i, span in enumerate(context.spans)
    ]

    async def publish(lane: Lane, data: bytes) -> None:
        pass

    request: Any = None
    return SessionLoop(
        session=sender,
        request=request,
        plan=build_plan(
            spans=context.spans,
            sizes=sizes,
            level_loss={},
            accept=accept,
            kv_bytes_per_token=engine.geometry.num_bytes_per_token(2),
            question_tokens=3,
            deadline_s=5.0,
            arrived_at=now,
            accepted_at=now,
        ),
        policy=make_policy("text"),
        estimator=MedianRate(),
        timeline=timeline,
        mailbox=Mailbox(),
        publish=publish,
        store=store,
        disk=pool,
        metrics=metrics,
        on_token=lambda _: True,
        shares=UplinkShares(),
    )


def choose(loop: SessionLoop, name: str, *, abandons: bool = False) -> None:
    """Carry out a decision for chunk 0."""
    chunk = loop._plan.chunks[0]
    choice: Choice | None = loop._plan.options(chunk).choice(name)
    assert choice is not None
    decision = Decision(
        chunk_index=0,
        choice=choice,
        reason=Reason.FIXED,
        expected_ttft_s=1.0,
        meets_deadline=True,
        abandons=abandons,
    )
    loop._carry_out(decision, time.monotonic())


def ready(epoch: int, level: str) -> ChunkReady:
    return ChunkReady(
        chunk=0, part=0, epoch=epoch, level=level, arrived_s=0.0, start_s=0.0, end_s=0.1
    )


async def load(loop: SessionLoop) -> None:
    assert loop._loading is not None
    await asyncio.wait({loop._loading})
    loop._finish_load()


async def test_attempt_that_was_given_up_and_came_through_ends_the_newer_one(
    loop: SessionLoop,
) -> None:
    choose(loop, "fp16")
    await load(loop)
    choose(loop, "int8", abandons=True)
    await load(loop)
    assert loop._session.progress(0) is not None
    loop._chunk_ready(ready(0, "fp16"), time.monotonic())
    assert loop._session.progress(0) is None, "the newer attempt is still being sent"
    record = loop._timeline.chunks[0]
    assert (record.choice, record.epoch) == ("fp16", 0)
    assert record.num_bytes == loop._plan.chunks[0].sizes["fp16"]


async def test_order_to_recompute_that_came_too_late_is_not_reported_as_done(
    loop: SessionLoop,
) -> None:
    choose(loop, "int8")
    await load(loop)
    choose(loop, "text", abandons=True)
    loop._chunk_ready(ready(0, "int8"), time.monotonic())
    record = loop._timeline.chunks[0]
    assert (record.choice, record.epoch) == ("int8", 0)


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_chunk_that_becomes_ready_while_another_choice_is_read_is_not_sent(
    loop: SessionLoop, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    chunk = loop._plan.chunks[0]
    loop._session.offer(OutgoingChunk(0, "fp16", b"x"), now=time.monotonic())
    loop._session.abort(0, now=time.monotonic())

    def damaged(key: bytes, level: str) -> bytes:
        raise CorruptChunk(key=key, level=level, reason="for the test")

    if is_damaged:
        monkeypatch.setattr(loop._store, "read_chunk", damaged)
    choose(loop, "int8")
    loop._chunk_ready(ready(0, "fp16"), time.monotonic())
    await load(loop)
    assert loop._session.progress(0) is None
    assert chunk.stage is Stage.READY
