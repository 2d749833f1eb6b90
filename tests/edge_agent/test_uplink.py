"""The uplink against the real worker, both in this process, over the broker in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloud_worker.config import WorkerConfig
from cloud_worker.executors import Executors
from cloud_worker.speeds import SpeedModel
from cloud_worker.worker import Worker
from codec import Codec
from edge_agent import uplink as uplink_module
from edge_agent.broker import Broker, Connections
from edge_agent.chat import AnswerEnd, AnswerRequest
from edge_agent.config import EdgeConfig
from edge_agent.errors import (
    BadRequest,
    DeadlineExceeded,
    MessageTooLarge,
    ModelMismatch,
    NoWorker,
    TooLong,
    WorkerLost,
    WorkerRefused,
)
from edge_agent.ingest import Ingestor
from edge_agent.model import EdgeModel, build_codec
from edge_agent.store import ContextStore, StoredContext
from edge_agent.uplink import Uplink
from engine import TorchEngine, load_engine
from telemetry import MetricSet, names
from tests.edge_agent.conftest import write_tiny_model
from tests.edge_agent.local_transfer import LocalTransfer
from wire import (
    Accept,
    PayloadTooLarge,
    SenderSession,
    Speeds,
    open_subject,
)
from wire.aio import Message
from wire.aio.faults import Fault, FaultKind, Noise
from wire.aio.memory import MemoryBroker, MemoryTransport
from wire.frames import Frame, FrameType, pack, parse
from wire.messages import pack_body

TEXT = "The boiler in hall four was checked in May. " * 6
QUESTION = tuple(b"\n\nWhen?")
MAX_TOKENS = 8


@dataclass
class World:
    """An agent's uplink and any number of workers on one broker."""

    broker: MemoryBroker
    uplink: Uplink
    context: StoredContext
    store: ContextStore
    metrics: MetricSet
    model: EdgeModel
    workers: list[Worker] = field(default_factory=list)
    worker_lines: list[MemoryTransport] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    async def add_worker(
        self, executors: Executors, *, model: EdgeModel | None = None, **settings: Any
    ) -> Worker:
        used = model or self.model
        lines = [
            self.broker.connect(name="worker data"),
            self.broker.connect(name="worker control"),
        ]
        worker = Worker(
            config=WorkerConfig(model="tiny", tenant="t", **settings),
            worker_id=f"w{len(self.workers)}",
            engine=used.engine,
            codec=used.codec,
            executors=executors,
            speeds=SpeedModel(),
            evaluator=None,
            metrics=MetricSet(names.WORKER_METRICS),
            data=lines[0],
            control=lines[1],
        )
        await worker.start()
        self.workers.append(worker)
        self.worker_lines += lines
        return worker

    def request(self, policy: str = "fixed:fp16", **changes: Any) -> AnswerRequest:
        now = time.monotonic()
        request = AnswerRequest(
            session="ab" * 16,
            context=self.context,
            question_ids=QUESTION,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            top_p=1.0,
            seed=0,
            policy=policy,
            estimator="median-rate",
            deadline_s=5.0,
            evaluate=False,
            arrived_at=now,
            give_up_at=now + 60.0,
        )
        return dataclasses.replace(request, **changes)

    async def ask(self, request: AnswerRequest) -> AnswerEnd:
        self.tokens.clear()
        return await self.uplink.answer(request, self.take)

    def take(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return True

    async def expected(self) -> list[int]:
        """The answer without any transport."""
        local = LocalTransfer()
        local.set_model(self.model)
        out: list[int] = []

        def take(token_id: int) -> bool:
            out.append(token_id)
            return True

        await local.answer(self.request(), take)
        return out

    async def wait_until(self, is_true: Callable[[], bool], within_s: float = 1.0) -> None:
        give_up_at = time.monotonic() + within_s
        while not is_true():
            assert time.monotonic() < give_up_at, "it did not come about in time"
            await asyncio.sleep(0.005)


def truncate_file(root: Path, name: str) -> None:
    (path,) = root.rglob(name)
    path.write_bytes(path.read_bytes()[:-1])


@asynccontextmanager
async def make_world(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    model: EdgeModel,
    pool: ThreadPoolExecutor,
    *,
    broker: MemoryBroker | None = None,
    denied: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[World]:
    result = await ingestor.ingest(TEXT, context_id="doc", levels=None, on_progress=lambda _: None)
    memory = broker or MemoryBroker()

    async def connect() -> Connections:
        return Connections(
            data=memory.connect(name="agent data"),
            control=memory.connect(name="agent control", denied=denied),
        )

    config = EdgeConfig(
        model="tiny", tenant="t", chunk_tokens=100, **{"claim_timeout_s": 0.3, **settings}
    )
    async with Broker(connect, address="memory").open() as opened:
        uplink = Uplink(config, broker=opened, store=store, metrics=metrics, disk=pool)
        uplink.set_model(model)
        world = World(memory, uplink, result.context, store, metrics, model)
        await world.wait_until(lambda: uplink.is_connected)
        yield world


@pytest.fixture
def model(engine: TorchEngine, codec: Codec) -> EdgeModel:
    return EdgeModel(engine, codec)


@pytest.fixture
def executors() -> Any:
    made = Executors()
    yield made
    made.close()


@pytest.fixture
async def world(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    model: EdgeModel,
    pool: ThreadPoolExecutor,
) -> AsyncIterator[World]:
    async with make_world(ingestor, store, metrics, model, pool) as ready:
        yield ready


@pytest.mark.parametrize("policy", ["fixed:fp16", "text"])
async def test_exact_transport_gives_the_answer_without_transport(
    world: World, executors: Executors, policy: str
) -> None:
    await world.add_worker(executors)
    end = await world.ask(world.request(policy))
    assert world.tokens == await world.expected()
    assert end.finish_reason == "length"
    timeline = end.timeline
    assert timeline.worker == "w0"
    assert [chunk.choice for chunk in timeline.chunks] == [policy.removeprefix("fixed:")] * 3
    for chunk in timeline.chunks:
        assert chunk.ready_s is not None
        assert chunk.decode_start_s is not None
        assert 0.0 <= chunk.decode_start_s <= chunk.ready_s
    assert timeline.prefill_end_s is not None
    assert timeline.first_token_s is not None
    # The worker's times are mapped onto the agent's clock to within the way there.
    assert timeline.prefill_end_s <= timeline.first_token_s + 1e-3
    assert [d["choice"] for d in timeline.decisions] == [c.choice for c in timeline.chunks]
    sizes = sum(entry["fp16"] for entry in world.store.chunk_sizes(world.context))
    if policy == "text":
        assert timeline.num_payload_bytes == 0
    else:
        # Besides the bitstreams only their descriptors.
        assert sizes < timeline.num_payload_bytes < sizes + 3 * 1000
    await world.wait_until(lambda: world.workers[0].budget.reserved_bytes == 0)


async def test_int8_answers_and_sends_about_half(world: World, executors: Executors) -> None:
    await world.add_worker(executors)
    fine = (await world.ask(world.request())).timeline.num_payload_bytes
    coarse = (await world.ask(world.request("int8"))).timeline.num_payload_bytes
    assert len(world.tokens) == MAX_TOKENS
    assert 0.4 * fine < coarse < 0.65 * fine


async def test_plain_chat_is_prefilled_by_the_worker(world: World, executors: Executors) -> None:
    await world.add_worker(executors)
    ids = (*world.context.token_ids, *QUESTION)
    request = world.request("fixed:fp16", context=None, question_ids=ids)
    end = await world.ask(request)
    assert world.tokens == await world.expected()
    assert {chunk.choice for chunk in end.timeline.chunks} == {"text"}


async def test_damaged_chunk_file_is_replaced_by_text(
    world: World, executors: Executors, tmp_path: Path
) -> None:
    await world.add_worker(executors)
    key = world.context.spans[1].key
    truncate_file(tmp_path, f"{key.hex()}.fp16.kvchunk")
    end = await world.ask(world.request())
    assert world.tokens == await world.expected()
    assert [chunk.choice for chunk in end.timeline.chunks] == ["fp16", "text", "fp16"]
    assert b'kvtide_edge_corrupt_chunks_total{level="fp16"} 1.0' in world.metrics.render()


async def test_bitstream_that_does_not_decode_is_replaced_by_text(
    world: World, executors: Executors
) -> None:
    """A file that is what was stored, and still no bitstream: the worker says so."""
    await world.add_worker(executors)
    span = world.context.spans[2]
    with world.store.begin_ingest() as job:
        job.put(span.key, "cachegen:0", b"not a bitstream" * 10)
        sizes = world.store.chunk_sizes(world.context)
        assert "cachegen:0" in sizes[2]
        end = await world.ask(world.request("fixed:fp16"))
        assert world.tokens == await world.expected()
        # The same file under the name that the policy wants.
        world.store._db.execute(
            "UPDATE chunks SET level = 'x' WHERE level = 'fp16' AND key = ?", (span.key,)
        )
        job.put(span.key, "fp16", b"not a bitstream" * 10)
        end = await world.ask(world.request("fixed:fp16"))
    assert world.tokens == await world.expected()
    assert [chunk.choice for chunk in end.timeline.chunks] == ["fp16", "fp16", "text"]
    assert end.timeline.chunks[2].epoch == 1


async def test_policy_that_asks_for_a_level_that_is_not_stored_is_a_bad_request(
    world: World, executors: Executors
) -> None:
    worker = await world.add_worker(executors)
    with pytest.raises(BadRequest, match="cachegen:1"):
        await world.ask(world.request("fixed:cachegen:1"))
    await world.wait_until(lambda: worker.num_sessions == 0)


async def test_unknown_policy_and_estimator_are_bad_requests(world: World) -> None:
    with pytest.raises(BadRequest, match="'best'"):
        await world.ask(world.request("best"))
    with pytest.raises(BadRequest, match="'oracle-9'"):
        await world.ask(world.request(estimator="oracle-9"))


async def test_no_worker_is_known_at_once(world: World) -> None:
    started = time.monotonic()
    with pytest.raises(NoWorker, match="no worker serves tenant 't'"):
        await world.ask(world.request())
    assert time.monotonic() - started < 0.3


async def test_frozen_worker_is_no_worker_within_the_claim_timeout(
    world: World, executors: Executors
) -> None:
    await world.add_worker(executors)
    for line in world.worker_lines:
        line.freeze()
    with pytest.raises(NoWorker, match=r"no worker answered within 0\.3 s"):
        await world.ask(world.request())


async def test_a_frozen_worker_in_the_group_does_not_swallow_a_claim(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    model: EdgeModel,
    pool: ThreadPoolExecutor,
    executors: Executors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uplink_module, "CLAIM_EVERY_S", 0.05)
    async with make_world(ingestor, store, metrics, model, pool, claim_timeout_s=20.0) as world:
        swallowed: list[Message] = []
        frozen = world.broker.connect(name="frozen")
        await frozen.subscribe("kvtide.t.open", swallowed.append, queue="workers")
        await world.add_worker(executors)
        while not swallowed:  # the group picks at random
            await world.ask(world.request())
            assert world.tokens == await world.expected()
        assert {parse(message.data).session for message in swallowed}


async def test_broker_that_is_away_is_no_worker(world: World) -> None:
    world.broker.stop()
    with pytest.raises(NoWorker, match="broker at memory cannot be reached"):
        await world.ask(world.request())


async def test_denied_permission_is_said_and_not_silence(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    model: EdgeModel,
    pool: ThreadPoolExecutor,
) -> None:
    denied = ["kvtide.t.open"]
    async with make_world(ingestor, store, metrics, model, pool, denied=denied) as world:
        with pytest.raises(NoWorker, match=r"denies this client publish to 'kvtide\.t\.open'"):
            await world.ask(world.request())


async def test_worker_with_another_model_is_refused_with_both_identities(
    world: World, executors: Executors, tmp_path: Path
) -> None:
    other = load_engine(
        str(write_tiny_model(tmp_path / "other", seed=1)), num_threads=1, cache_dir=tmp_path / "c"
    )
    await world.add_worker(executors, model=EdgeModel(other, build_codec(other, (), 1)))
    with pytest.raises(ModelMismatch) as refused:
        await world.ask(world.request())
    assert other.identity.digest.hex() in str(refused.value)
    assert world.model.engine.identity.digest.hex() in str(refused.value)


async def test_full_worker_is_asked_again_until_the_claim_is_over(
    world: World, executors: Executors
) -> None:
    await world.add_worker(executors, memory_budget_bytes=1000)
    started = time.monotonic()
    with pytest.raises(WorkerRefused, match="memory"):
        await world.ask(world.request())
    assert 0.2 < time.monotonic() - started < 1.0


@pytest.mark.parametrize("answer", ["nothing granted", "a heartbeat"])
async def test_answer_to_a_claim_that_makes_no_sense_is_worker_lost(
    world: World, answer: str
) -> None:
    line = world.broker.connect(name="odd worker")

    def reply(message: Message) -> None:
        frame = parse(message.data)
        if answer == "a heartbeat":
            data = pack(Frame(type=FrameType.HEARTBEAT, session=frame.session, payload=b""))
        else:
            accept = Accept(
                worker="odd",
                window_bytes=0,
                segment_bytes=0,
                speeds=Speeds(1.0, 0.0, 0.0),
                queue_delay_s=0.0,
                backend="cpu",
            )
            payload = pack_body(accept)
            data = pack(Frame(type=FrameType.ACCEPT, session=frame.session, payload=payload))
        replies.append(asyncio.create_task(line.publish(message.reply, data)))

    replies: list[asyncio.Task[None]] = []
    await line.subscribe(open_subject("t"), reply, queue="workers")
    with pytest.raises(WorkerLost, match="answered with something else"):
        await world.ask(world.request())


async def test_context_too_long_for_the_worker_is_413(world: World, executors: Executors) -> None:
    # The worker counts context, question and answer; an agent with older limits may not.
    await world.add_worker(executors, max_answer_tokens=100_000)
    with pytest.raises(TooLong, match="the model takes"):
        await world.ask(world.request(max_tokens=100_000))


async def test_question_that_no_message_holds_is_413_and_leaves_nothing_behind(
    world: World, executors: Executors, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.add_worker(executors)

    def too_large(*_: Any, **__: Any) -> None:
        raise PayloadTooLarge("Ask", size_bytes=2, max_payload=1)

    with monkeypatch.context() as patch:
        patch.setattr(SenderSession, "ask", too_large)
        with pytest.raises(MessageTooLarge, match="the question"):
            await world.ask(world.request())
    await world.wait_until(lambda: worker.budget.reserved_bytes == 0)
    assert not world.uplink._shares._sessions
    await world.ask(world.request())
    assert world.tokens == await world.expected()


async def test_context_that_no_message_holds_is_413(
    world: World, executors: Executors, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.add_worker(executors)
    monkeypatch.setattr(Broker, "max_payload", 500)
    with pytest.raises(MessageTooLarge, match="the context"):
        await world.ask(world.request())


async def test_cancel_frees_the_worker_at_once(world: World, executors: Executors) -> None:
    world.broker.bytes_per_s = 50_000
    worker = await world.add_worker(executors)
    task = asyncio.create_task(world.ask(world.request()))
    await world.wait_until(lambda: worker.num_sessions == 1)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.wait_until(lambda: worker.budget.reserved_bytes == 0, within_s=1.0)
    assert world.tokens == []


async def test_request_past_its_time_limit_is_given_up_and_the_worker_freed(
    world: World, executors: Executors
) -> None:
    world.broker.bytes_per_s = 20_000
    worker = await world.add_worker(executors)
    with pytest.raises(DeadlineExceeded):
        await world.ask(world.request(give_up_at=time.monotonic() + 0.4))
    await world.wait_until(lambda: worker.budget.reserved_bytes == 0, within_s=2.0)


async def test_answer_ends_when_no_more_tokens_are_wanted(
    world: World, executors: Executors
) -> None:
    worker = await world.add_worker(executors)
    got: list[int] = []

    def take_two(token_id: int) -> bool:
        got.append(token_id)
        return len(got) < 2

    end = await world.uplink.answer(world.request(max_tokens=100), take_two)
    assert end.finish_reason == "stop"
    assert len(got) == 2
    await world.wait_until(lambda: worker.budget.reserved_bytes == 0)


async def test_lossy_broker_gives_the_same_answer(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    model: EdgeModel,
    pool: ThreadPoolExecutor,
    executors: Executors,
) -> None:
    noise = Noise(drop=0.1, duplicate=0.1, reorder=0.1, corrupt=0.1, delay_s=0.05)
    broker = MemoryBroker(seed=4)
    async with make_world(ingestor, store, metrics, model, pool, broker=broker) as world:
        await world.add_worker(executors)
        expected = await world.expected()
        # Opening is one request and one reply, which a client simply repeats.
        task = asyncio.create_task(world.ask(world.request()))
        await world.wait_until(lambda: world.workers[0].num_sessions == 1)
        broker.noise = noise
        await task
        assert world.tokens == expected


async def test_connection_that_breaks_in_mid_transfer_is_taken_up_again(
    ingestor: Ingestor,
    store: ContextStore,
    metrics: MetricSet,
    model: EdgeModel,
    pool: ThreadPoolExecutor,
    executors: Executors,
) -> None:
    faults = [Fault(FaultKind.RESTART, at=14, delay_s=0.2)]
    broker = MemoryBroker(faults=faults)
    async with make_world(ingestor, store, metrics, model, pool, broker=broker) as world:
        await world.add_worker(executors)
        end = await world.ask(world.request())
        assert world.tokens == await world.expected()
        assert end.timeline.worker_changes == 0
        assert broker.num_operations > 14


async def test_worker_that_goes_silent_is_replaced_by_another(
    world: World, executors: Executors
) -> None:
    """Three seconds of silence, by the wire's rule; then the edge sends from its own store again."""
    world.broker.bytes_per_s = 100_000
    first = await world.add_worker(executors)
    task = asyncio.create_task(world.ask(world.request()))
    await world.wait_until(lambda: first.num_sessions == 1)
    # Long enough for the acceptance, too short for the first chunk.
    await asyncio.sleep(0.05)
    for line in world.worker_lines:
        line.freeze()
    await world.worker_lines[1].close()
    await world.add_worker(executors)
    world.broker.bytes_per_s = None
    started = time.monotonic()
    end = await task
    assert time.monotonic() - started < 5.0
    assert world.tokens == await world.expected()
    assert end.timeline.worker == "w1"
    assert end.timeline.worker_changes == 1
    assert b"kvtide_edge_worker_losses_total 1.0" in world.metrics.render()


async def test_worker_that_gives_up_is_worker_lost(
    world: World, executors: Executors, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.add_worker(executors)
    original = world.model.engine.prefill

    def broken(*args: Any, **kwargs: Any) -> Any:
        from engine import EngineError

        raise EngineError("the device is gone")

    monkeypatch.setattr(world.model.engine, "prefill", broken)
    with pytest.raises(WorkerLost, match="the device is gone"):
        await world.ask(world.request())
    monkeypatch.setattr(world.model.engine, "prefill", original)
    await world.ask(world.request())


async def test_requests_at_once_do_not_mix(world: World, executors: Executors) -> None:
    await world.add_worker(executors)
    outs: list[list[int]] = [[] for _ in range(6)]

    async def one(index: int) -> None:
        def take(token_id: int) -> bool:
            outs[index].append(token_id)
            return True

        request = world.request(["fixed:fp16", "text"][index % 2], session=f"{index:02x}" * 16)
        await world.uplink.answer(request, take)

    await asyncio.gather(*(one(index) for index in range(6)))
    assert outs == [await world.expected()] * 6
