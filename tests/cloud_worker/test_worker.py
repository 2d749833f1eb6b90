from __future__ import annotations

import asyncio
import gc
import os
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cloud_worker.executors import Executors
from codec import Codec
from engine import KvCache, TorchEngine
from tests.cloud_worker.agent import CONTEXT, MAX_TOKENS, QUESTION, TENANT, exact_answer
from tests.cloud_worker.bench import Bench, answer, settle, until
from wire import (
    Accept,
    Answered,
    ChunkBad,
    ChunkReady,
    Done,
    FailCode,
    Failed,
    OutgoingChunk,
    Refuse,
    RefuseCode,
    Token,
    data_subject,
    open_subject,
)
from wire.aio import NatsServer, NatsTransport, NoResponders, Transport
from wire.aio.memory import MemoryBroker
from wire.frames import Frame, FrameType, pack


@pytest.fixture
async def bench(engine: TorchEngine, codec: Codec, executors: Executors) -> AsyncIterator[Bench]:
    """On the broker in memory."""
    broker = MemoryBroker()

    async def dial() -> Transport:
        return broker.connect()

    bench = Bench(engine, codec, executors, dial)
    yield bench
    await bench.close()


@pytest.mark.nats
async def test_a_real_broker_carries_a_request(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    with NatsServer() as server:

        async def dial() -> Transport:
            return await NatsTransport.connect(server.url, token=server.token)

        bench = Bench(engine, codec, executors, dial)
        worker = await bench.worker()
        agent = await bench.agent()
        assert isinstance(await answer(agent, (0,), evaluate=True), Done)
        assert agent.tokens() == exact_answer(engine)
        await settle(worker)
        assert worker.budget.reserved_bytes == 0
        await bench.close()


@pytest.mark.parametrize("text_chunks", [(), (0,), (1, 2), (0, 1, 2)])
async def test_a_request_is_answered_like_a_full_prefill(
    bench: Bench, text_chunks: tuple[int, ...]
) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    assert isinstance(await answer(agent, text_chunks), Done)
    assert agent.tokens() == exact_answer(bench.engine)
    assert agent.ready() == {i: "text" if i in text_chunks else "fp16" for i in range(3)}
    await settle(worker)
    assert worker.budget.reserved_bytes == 0
    assert bench.count('kvtide_worker_sessions_total{outcome="ok"}') == 1


async def test_what_the_worker_says_of_itself_is_in_the_accept(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent()
    accept = await agent.open()
    assert isinstance(accept, Accept)
    assert accept.worker == "w-1"
    assert accept.backend == "cpu"
    assert accept.speeds.prefill_base_s > 0
    assert accept.speeds.decode_bytes_per_s > 0
    assert accept.window_bytes >= 2 * max(map(len, agent.streams))
    assert accept.have == ()


async def test_times_count_from_the_acceptance_and_are_in_order(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent()
    await answer(agent, (0,))
    ready = [e for e in agent.events if isinstance(e, ChunkReady)]
    assert all(0 <= e.arrived_s <= e.start_s <= e.end_s < 30 for e in ready)
    (answered,) = [e for e in agent.events if isinstance(e, Answered)]
    first = next(e for e in agent.events if isinstance(e, Token))
    assert max(e.end_s for e in ready) <= answered.prefill_start_s
    assert answered.prefill_start_s <= answered.prefill_end_s <= first.at_s


async def test_an_evaluation_of_exact_kv_finds_no_loss(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent(level="fp16")
    done = await answer(agent, evaluate=True)
    assert done.evaluation is not None
    assert done.evaluation.kl < 1e-3
    assert done.evaluation.greedy_match == 1.0
    assert done.evaluation.exact_token_ids == exact_answer(bench.engine)


async def test_an_evaluation_of_int8_finds_some_loss(bench: Bench) -> None:
    await bench.worker()
    exact = (await answer(await bench.agent(level="fp16"), evaluate=True)).evaluation
    lossy = (await answer(await bench.agent(level="int8"), evaluate=True)).evaluation
    assert lossy.kl > exact.kl


async def test_another_model_is_refused_before_any_byte_with_both_digests(bench: Bench) -> None:
    worker = await bench.worker()
    agent = await bench.agent(changes={"model_digest": b"x" * 32})
    refuse = await agent.open()
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.IDENTITY_MISMATCH
    assert bench.engine.identity.digest.hex() in refuse.sentence
    assert (b"x" * 32).hex() in refuse.sentence
    assert worker.num_sessions == 0
    assert worker.budget.reserved_bytes == 0
    assert bench.count('kvtide_worker_refusals_total{reason="identity_mismatch"}') == 1


async def test_a_session_without_memory_is_refused_with_a_time_to_wait(bench: Bench) -> None:
    agent = await bench.agent()
    cache = 3 * 2 * 2 * 16 * 4 * (len(CONTEXT) + len(QUESTION) + MAX_TOKENS)
    # The cache, an eighth of it for the bases kept for refinements, one decoded chunk and what
    # may be in flight.
    need = cache + cache // 8 + 3 * 2 * 2 * 16 * 2 * 40
    need += max(4096, 2 * max(map(len, agent.streams)))
    worker = await bench.worker(memory_budget_bytes=2 * need - 1, window_bytes=4096)
    assert isinstance(await agent.open(), Accept)
    assert worker.budget.reserved_bytes == need
    refuse = await (await bench.agent()).open()
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.NO_MEMORY
    assert refuse.retry_after_s > 0
    agent.cancel()
    await agent.flush()
    await settle(worker)
    assert isinstance(await (await bench.agent()).open(), Accept)


async def test_a_session_that_never_fits_is_not_told_to_wait(bench: Bench) -> None:
    await bench.worker(memory_budget_bytes=1000)
    refuse = await (await bench.agent()).open()
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.NO_MEMORY
    assert refuse.retry_after_s == 0


async def test_one_session_too_many_is_refused(bench: Bench) -> None:
    await bench.worker(max_sessions=1)
    assert isinstance(await (await bench.agent()).open(), Accept)
    refuse = await (await bench.agent()).open()
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.BUSY


async def test_an_opening_that_is_asked_twice_gets_the_same_answer(bench: Bench) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    again = await agent.control.request(
        open_subject(TENANT), agent.sender.open_frame(), timeout_s=5.0
    )
    assert again
    assert worker.num_sessions == 1


async def test_nonsense_on_the_open_subject_harms_nobody(bench: Bench) -> None:
    await bench.worker()
    transport = await bench.connect()
    await transport.publish(open_subject(TENANT), b"hello")
    await transport.publish(open_subject(TENANT), b"")
    agent = await bench.agent()
    frame = bytearray(agent.sender.open_frame())
    frame[50] ^= 1
    await transport.publish(open_subject(TENANT), bytes(frame))
    assert isinstance(await answer(agent), Done)


async def test_nonsense_on_the_data_subject_harms_nobody(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent()
    assert isinstance(await agent.open(), Accept)
    subject = data_subject(TENANT, "w-1", agent.session_id)
    for junk in (b"", b"KT", os.urandom(100)):
        await agent.data.publish(subject, junk)
    agent.ask()
    for chunk in range(3):
        agent.send(chunk)
    assert isinstance(await agent.run(), Done)
    assert agent.tokens() == exact_answer(bench.engine)


async def test_a_corrupt_bitstream_is_asked_for_again_and_the_answer_is_exact(
    bench: Bench,
) -> None:
    await bench.worker()
    agent = await bench.agent()
    await agent.open()
    agent.ask()
    bad = bytearray(agent.streams[1])
    bad[len(bad) // 2] ^= 1
    agent.send(0)
    agent.send(1, bytes(bad))
    agent.send(2)
    assert (await agent.run(until=ChunkBad)).chunk == 1
    agent.send(1)
    assert isinstance(await agent.run(), Done)
    assert agent.tokens() == exact_answer(bench.engine)
    assert bench.count('kvtide_worker_corrupt_chunks_total{level="fp16"}') == 1


async def test_a_chunk_that_is_corrupt_every_time_ends_the_session_with_a_sentence(
    bench: Bench,
) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    bad = b"not a bitstream"
    for _ in range(3):
        agent.send(1, bad)
        await agent.run(until=ChunkBad)
    agent.send(1, bad)
    failed = await agent.run(until=Failed)
    assert failed.code is FailCode.CORRUPT_CHUNK
    assert "chunk 1 was unusable 4 times" in failed.sentence
    await settle(worker)
    assert worker.budget.reserved_bytes == 0


async def test_a_chunk_can_be_recomputed_after_it_came_corrupt(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent()
    await agent.open()
    agent.ask()
    agent.send(0, b"not a bitstream")
    await agent.run(until=ChunkBad)
    agent.recompute(0)
    agent.send(1)
    agent.send(2)
    assert isinstance(await agent.run(), Done)
    assert agent.ready() == {0: "text", 1: "fp16", 2: "fp16"}
    assert agent.tokens() == exact_answer(bench.engine)


async def test_a_cancel_frees_the_memory_within_a_second(bench: Bench) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    agent.ask()
    agent.send(0)
    await agent.run(until=ChunkReady)
    agent.cancel()
    await agent.flush()
    await until(lambda: not worker.budget.reserved_bytes, within_s=1)
    await settle(worker)
    assert bench.count('kvtide_worker_sessions_total{outcome="cancelled"}') == 1


@pytest.mark.parametrize("ending", ["done", "cancelled", "failed"])
async def test_the_memory_of_a_session_is_really_gone_after_it(
    bench: Bench, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    tensors: list[weakref.ref[object]] = []
    make = engine.new_cache

    def recorded(capacity_tokens: int) -> KvCache:
        cache = make(capacity_tokens)
        tensors.append(weakref.ref(cache.storage))
        return cache

    monkeypatch.setattr(engine, "new_cache", recorded)
    await agent.open()
    agent.ask()
    agent.recompute(0)
    agent.send(1)
    await agent.run(until=ChunkReady)
    if ending == "cancelled":
        agent.cancel()
    elif ending == "failed":
        next(iter(worker._sessions.values())).fail(FailCode.INTERNAL, "for the test")
        await agent.run(until=Failed)
    else:
        agent.send(2)
        await agent.run()
    await agent.flush()
    await settle(worker)
    gc.collect()
    assert len(tensors) == 1
    assert tensors[0]() is None


async def test_a_silent_agent_loses_its_session(bench: Bench) -> None:
    worker = await bench.worker(session_idle_timeout_s=0.3)
    agent = await bench.agent()
    await agent.open()
    assert worker.budget.reserved_bytes > 0
    await until(lambda: not worker.budget.reserved_bytes, within_s=5)
    await settle(worker)
    assert bench.count('kvtide_worker_sessions_total{outcome="timeout"}') == 1


@pytest.mark.parametrize(
    ("ask", "named"),
    [({"max_tokens": 999}, "max_tokens is 999"), ({"temperature": 9.0}, "temperature 9.0")],
)
async def test_a_question_that_breaks_its_word_ends_the_session(
    bench: Bench, ask: dict[str, Any], named: str
) -> None:
    await bench.worker()
    agent = await bench.agent()
    await agent.open()
    agent.ask(**ask)
    failed = await agent.run(until=Failed)
    assert failed.code is FailCode.PROTOCOL
    assert named in failed.sentence


async def test_an_agent_that_breaks_the_protocol_loses_its_session_and_its_memory(
    bench: Bench,
) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    frame = Frame(
        type=FrameType.SEGMENT, session=agent.session_id, payload=b"x", chunk=99, sequence=1
    )
    await agent.data.publish(data_subject(TENANT, "w-1", agent.session_id), pack(frame))
    failed = await agent.run(until=Failed)
    assert failed.code is FailCode.PROTOCOL
    await agent.flush()
    await until(lambda: not worker.budget.reserved_bytes, within_s=2)
    await settle(worker)
    assert bench.count('kvtide_worker_sessions_total{outcome="failed"}') == 1


async def test_a_bitstream_that_calls_itself_text_is_refused(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent()
    await agent.open()
    agent.ask()
    agent.sender.offer(OutgoingChunk(0, "text", agent.streams[0]), now=time.monotonic())
    bad = await agent.run(until=ChunkBad)
    assert (bad.chunk, bad.sentence) == (0, "text is ordered and not sent as a bitstream")
    for chunk in range(3):
        agent.send(chunk)
    assert isinstance(await agent.run(), Done)
    assert agent.tokens() == exact_answer(bench.engine)


async def test_a_draining_worker_finishes_its_session_and_takes_no_other(bench: Bench) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    agent.ask()
    agent.send(0)
    await agent.run(until=ChunkReady)
    draining = asyncio.create_task(worker.drain(timeout_s=20))
    await asyncio.sleep(0)
    assert worker.unready_reason() == "draining"
    late = await bench.agent()
    with pytest.raises(NoResponders):
        await late.open()
    agent.send(1)
    agent.send(2)
    assert isinstance(await agent.run(), Done)
    await agent.flush()
    await draining
    assert agent.tokens() == exact_answer(bench.engine)


async def test_a_drain_that_takes_too_long_tells_the_agents(bench: Bench) -> None:
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    draining = asyncio.create_task(worker.drain(timeout_s=0.05))
    failed = await agent.run(until=Failed)
    assert failed.code is FailCode.DRAINING
    await agent.flush()
    await draining
    assert worker.budget.reserved_bytes == 0


async def test_a_stop_does_not_wait_for_an_agent_that_has_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_worker.worker.LAST_WORD_S", 0.05)
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    await agent.control.close()
    await agent.data.close()
    async with asyncio.timeout(5):
        await worker.close()
    assert worker.num_sessions == 0
    assert worker.budget.reserved_bytes == 0
    bench.agents.clear()


async def test_several_requests_at_once_all_get_their_answers(bench: Bench) -> None:
    worker = await bench.worker()
    agents = [await bench.agent() for _ in range(5)]
    plans = [(), (0,), (1,), (0, 1, 2), (2,)]
    done = await asyncio.gather(
        *(answer(agent, plan) for agent, plan in zip(agents, plans, strict=True))
    )
    assert all(isinstance(result, Done) for result in done)
    assert {agent.tokens() for agent in agents} == {exact_answer(bench.engine)}
    await settle(worker)
    assert worker.budget.reserved_bytes == 0


async def test_the_gauges_show_what_is_open(bench: Bench) -> None:
    worker = await bench.worker()
    await (await bench.agent()).open()
    worker.refresh_metrics()
    assert bench.count("kvtide_worker_active_sessions") == 1
    assert bench.count("kvtide_worker_memory_reserved_bytes") == worker.budget.reserved_bytes
    assert bench.count("kvtide_worker_cache_bytes") > 0
