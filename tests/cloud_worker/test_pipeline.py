from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from cloud_worker.executors import Executors
from cloud_worker.order import ChunkState
from cloud_worker.pipeline import (
    AnswerDone,
    AnswerToken,
    ChunkReady,
    ChunkUnusable,
    PipelineEvent,
    Question,
    SessionPipeline,
)
from cloud_worker.speeds import SpeedModel
from codec import Codec, DecodedChunk
from engine import Sampling, TorchEngine

CONTEXT = tuple(int(i) for i in np.random.default_rng(7).integers(3, 256, 50))
QUESTION = tuple(int(i) for i in np.random.default_rng(8).integers(3, 256, 9))
RANGES = ((0, 20), (20, 40), (40, 50))
MAX_TOKENS = 8
GREEDY = Question(QUESTION, Sampling(), MAX_TOKENS)


def exact_answer(engine: TorchEngine, question: Question = GREEDY) -> tuple[int, ...]:
    cache = engine.new_cache(100)
    logits = engine.prefill(cache, CONTEXT + question.token_ids, 0)
    start = len(CONTEXT) + len(question.token_ids)
    return tuple(engine.generate(cache, logits, start, question.sampling, question.max_tokens))


def bitstreams(engine: TorchEngine, codec: Codec, level: str = "fp16") -> list[bytes]:
    cache = engine.new_cache(len(CONTEXT))
    engine.fill(cache, CONTEXT, 0)
    return [
        codec.encode(cache.read(start, stop), level=level, token_start=start)
        for start, stop in RANGES
    ]


class Session:
    def __init__(
        self,
        engine: TorchEngine,
        codec: Codec,
        executors: Executors,
        step_tokens: int = 8,
        deadline_s: float = 0.0,
    ) -> None:
        self.events: list[PipelineEvent] = []
        self._emitted = asyncio.Event()
        self.pipeline = SessionPipeline(
            engine=engine,
            codec=codec,
            executors=executors,
            speeds=SpeedModel(),
            capacity_tokens=len(CONTEXT) + len(QUESTION) + MAX_TOKENS,
            token_ids=CONTEXT,
            ranges=RANGES,
            step_tokens=step_tokens,
            deadline_s=deadline_s,
            base_bytes=1 << 20,
            emit=self._emit,
        )

    def _emit(self, event: PipelineEvent) -> None:
        self.events.append(event)
        self._emitted.set()

    async def until(self, kind: type[ChunkReady | ChunkUnusable], count: int = 1) -> None:
        """Wait for that many events of a kind."""
        while sum(isinstance(event, kind) for event in self.events) < count:
            self._emitted.clear()
            await self._emitted.wait()

    def ready(self) -> list[tuple[int, str]]:
        return [(e.chunk, e.level) for e in self.events if isinstance(e, ChunkReady)]

    async def answer(self) -> AnswerDone:
        async with asyncio.timeout(30):
            return await self.pipeline.run()


@pytest.mark.parametrize("text_chunks", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
async def test_any_mix_of_text_and_exact_kv_gives_the_answer_of_a_full_prefill(
    engine: TorchEngine, codec: Codec, executors: Executors, text_chunks: Iterable[int]
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    session.pipeline.question_arrived(GREEDY)
    for chunk in (2, 0, 1):
        if chunk in text_chunks:
            assert session.pipeline.text_ordered(chunk, 0, now=0.0)
        else:
            assert session.pipeline.bitstream_arrived(chunk, 0, "fp16", streams[chunk], now=0.0)
    done = await session.answer()
    assert done.token_ids == exact_answer(engine)
    tokens = [e.token_id for e in session.events if isinstance(e, AnswerToken)]
    assert tuple(tokens) == done.token_ids
    assert sorted(session.ready()) == [
        (chunk, "text" if chunk in text_chunks else "fp16") for chunk in range(3)
    ]


async def test_the_cache_of_a_mix_is_close_to_the_exact_one(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    session.pipeline.question_arrived(GREEDY)
    session.pipeline.text_ordered(0, 0, now=0.0)
    session.pipeline.bitstream_arrived(1, 0, "fp16", streams[1], now=0.0)
    session.pipeline.text_ordered(2, 0, now=0.0)
    await session.answer()
    exact = engine.new_cache(len(CONTEXT))
    engine.fill(exact, CONTEXT, 0)
    got, want = session.pipeline.cache.read(0, len(CONTEXT)), exact.read(0, len(CONTEXT))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * float(np.abs(want).max()))


async def test_chunks_that_come_late_are_waited_for(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    running = asyncio.create_task(session.answer())
    for count, chunk in enumerate((1, 2, 0), start=1):
        session.pipeline.bitstream_arrived(chunk, 0, "fp16", streams[chunk], now=0.0)
        await session.until(ChunkReady, count)
    assert [chunk for chunk, _ in session.ready()] == [1, 2, 0]
    assert not running.done()
    session.pipeline.question_arrived(GREEDY)
    assert (await running).token_ids == exact_answer(engine)


async def test_a_corrupt_bitstream_is_reported_and_never_reaches_the_cache(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    bad = bytearray(streams[1])
    bad[len(bad) // 2] ^= 1
    session.pipeline.question_arrived(GREEDY)
    for chunk, payload in ((0, streams[0]), (1, bytes(bad)), (2, streams[2])):
        session.pipeline.bitstream_arrived(chunk, 0, "fp16", payload, now=0.0)
    running = asyncio.create_task(session.answer())
    await session.until(ChunkUnusable)
    unusable = next(e for e in session.events if isinstance(e, ChunkUnusable))
    assert (unusable.chunk, unusable.epoch, unusable.level) == (1, 0, "fp16")
    assert unusable.reason
    assert not running.done()
    assert not session.pipeline.cache.read(20, 40).any()
    assert session.pipeline.bitstream_arrived(1, 1, "fp16", streams[1], now=0.0)
    assert (await running).token_ids == exact_answer(engine)


@pytest.mark.parametrize("wrong", ["range", "level"])
async def test_a_bitstream_that_is_not_the_announced_one_is_refused(
    engine: TorchEngine, codec: Codec, executors: Executors, wrong: str
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    payload = streams[1] if wrong == "range" else bitstreams(engine, codec, "int8")[0]
    session.pipeline.bitstream_arrived(0, 0, "fp16", payload, now=0.0)
    running = asyncio.create_task(session.answer())
    await session.until(ChunkUnusable)
    (event,) = session.events
    assert isinstance(event, ChunkUnusable)
    assert "announced were tokens 0 to 20 at fp16" in event.reason
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_cancelled_session_ends_with_its_step_and_leaves_the_threads_free(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors, step_tokens=4)
    session.pipeline.question_arrived(GREEDY)
    for chunk in range(3):
        session.pipeline.text_ordered(chunk, 0, now=0.0)
    running = asyncio.create_task(session.answer())
    await session.until(ChunkReady)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert executors.pending_compute_s == 0.0
    assert (await executors.compute(lambda: 42, deadline_s=0.0)).value == 42


async def held_decoder(executors: Executors) -> tuple[threading.Event, asyncio.Task[object]]:
    """Keep the decoder's thread busy until the event is set."""
    release, began = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        release.wait(10)

    task: asyncio.Task[object] = asyncio.create_task(executors.decode(hold))
    while not began.is_set():  # noqa: ASYNC110 # set by a thread
        await asyncio.sleep(0.001)
    return release, task


@pytest.mark.parametrize("later", ["text", "bitstream"])
@pytest.mark.parametrize("is_bad", [True, False])
async def test_an_attempt_that_comes_during_a_decode_is_used_only_if_the_decode_fails(
    engine: TorchEngine, codec: Codec, executors: Executors, later: str, is_bad: bool
) -> None:
    session = Session(engine, codec, executors)
    pipeline, streams = session.pipeline, bitstreams(engine, codec)
    pipeline.question_arrived(GREEDY)
    running = asyncio.create_task(session.answer())
    pipeline.bitstream_arrived(1, 0, "fp16", streams[1], now=0.0)
    pipeline.bitstream_arrived(2, 0, "fp16", streams[2], now=0.0)
    await session.until(ChunkReady, 2)
    release, holding = await held_decoder(executors)
    payload = b"not a bitstream" if is_bad else streams[0]
    pipeline.bitstream_arrived(0, 0, "fp16", payload, now=0.0)
    while pipeline.order.state(0) is not ChunkState.DECODING:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if later == "text":
        assert pipeline.text_ordered(0, 1, now=0.0)
    else:
        assert pipeline.bitstream_arrived(0, 1, "fp16", streams[0], now=0.0)
    assert pipeline.holds(0, 0, 0)
    assert pipeline.holds(0, 0, 1) == (later == "bitstream")
    release.set()
    await holding
    assert (await running).token_ids == exact_answer(engine)
    ready = {e.chunk: (e.epoch, e.level) for e in session.events if isinstance(e, ChunkReady)}
    assert ready[0] == ((1, "text" if later == "text" else "fp16") if is_bad else (0, "fp16"))
    assert not pipeline.holds(0, 0, 0)
    assert not pipeline.holds(0, 0, 1)
    assert pipeline.waiting_bytes == 0


async def test_a_session_cancelled_twice_still_waits_for_its_decode(
    engine: TorchEngine, codec: Codec, executors: Executors, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(engine, codec, executors)
    running = asyncio.create_task(session.pipeline.run())
    streams = bitstreams(engine, codec)
    session.pipeline.bitstream_arrived(0, 0, "fp16", streams[0], now=0.0)
    await session.until(ChunkReady)
    began, release = threading.Event(), threading.Event()
    decode = Codec.decode

    def slow_decode(*arguments: Any, **options: Any) -> DecodedChunk:
        began.set()
        release.wait(10)
        return decode(*arguments, **options)

    monkeypatch.setattr(Codec, "decode", slow_decode)
    session.pipeline.bitstream_arrived(1, 0, "fp16", streams[1], now=0.0)
    while not began.is_set():  # noqa: ASYNC110 # set by a thread
        await asyncio.sleep(0.001)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_two_sessions_take_turns_and_both_are_right(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    sessions = [Session(engine, codec, executors, step_tokens=4) for _ in range(2)]
    for session in sessions:
        session.pipeline.question_arrived(GREEDY)
        for chunk in range(3):
            session.pipeline.text_ordered(chunk, 0, now=0.0)
    answers = await asyncio.gather(*(session.answer() for session in sessions))
    assert [done.token_ids for done in answers] == [exact_answer(engine)] * 2
    starts = [[e.start_s for e in s.events if isinstance(e, ChunkReady)] for s in sessions]
    assert starts[0][1] < starts[1][2]
    assert starts[1][1] < starts[0][2], "one session ran to its end before the other began"


async def test_the_session_with_the_earlier_deadline_is_prefilled_first(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    late = Session(engine, codec, executors, step_tokens=2, deadline_s=2e9)
    early = Session(engine, codec, executors, step_tokens=2, deadline_s=1e9)
    # The thread is held until both wait for it: who came first must not matter.
    gate = threading.Event()
    held = asyncio.create_task(executors.compute(gate.wait, deadline_s=0.0))
    for session in (late, early):
        session.pipeline.question_arrived(GREEDY)
        for chunk in range(3):
            session.pipeline.text_ordered(chunk, 0, now=0.0)
    answers = asyncio.gather(late.answer(), early.answer())
    while executors.num_waiting < 2:  # noqa: ASYNC110 - the queue tells nobody
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(held, answers)
    ends = [
        max(e.end_s for e in session.events if isinstance(e, ChunkReady))
        for session in (late, early)
    ]
    assert ends[1] < ends[0]


async def test_timings_are_in_the_order_of_things(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    now = asyncio.get_running_loop().time()
    session.pipeline.question_arrived(GREEDY)
    session.pipeline.text_ordered(0, 0, now=now)
    for chunk in (1, 2):
        session.pipeline.bitstream_arrived(chunk, 0, "fp16", streams[chunk], now=now)
    done = await session.answer()
    ready = [e for e in session.events if isinstance(e, ChunkReady)]
    assert all(now <= e.arrived_s <= e.start_s <= e.end_s for e in ready)
    assert max(e.end_s for e in ready) <= done.prefill_start_s <= done.prefill_end_s
    first = next(e for e in session.events if isinstance(e, AnswerToken))
    assert done.prefill_end_s <= first.at_s


async def test_an_answer_cut_by_its_limit_says_so(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors)
    question = Question(QUESTION, Sampling(), 2)
    session.pipeline.question_arrived(question)
    for chunk in range(3):
        session.pipeline.text_ordered(chunk, 0, now=0.0)
    done = await session.answer()
    expected = exact_answer(engine, question)
    assert done.token_ids == expected
    assert done.finish_reason == ("length" if len(expected) == 2 else "stop")


async def test_an_aborted_bitstream_is_forgotten(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    session = Session(engine, codec, executors)
    streams = bitstreams(engine, codec)
    session.pipeline.bitstream_arrived(0, 0, "fp16", streams[0], now=0.0)
    assert session.pipeline.waiting_bytes == len(streams[0])
    session.pipeline.aborted(0, 0)
    assert session.pipeline.waiting_bytes == 0


def test_a_question_without_tokens_is_refused(
    engine: TorchEngine, codec: Codec, executors: Executors
) -> None:
    async def ask() -> None:
        Session(engine, codec, executors).pipeline.question_arrived(Question((), Sampling(), 1))

    with pytest.raises(ValueError, match="at least one token"):
        asyncio.run(ask())
