"""Level set klt through the worker: it needs layer 0 from the token ids, and the rotary tables."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from cloud_worker.executors import Executors
from cloud_worker.program import make_codec
from codec import Codec, CodecError, Geometry, Profile
from codec.calibrate_klt import Context, KltCalibration
from engine import TorchEngine
from engine.rope import unrotate
from tests.cloud_worker.agent import CONTEXT, RANGES, Agent
from tests.cloud_worker.bench import Bench, answer
from wire import Accept, ChunkBad, ChunkKind, ChunkReady, Done, OutgoingChunk
from wire.aio import MemoryBroker, Transport

NUM_CONTEXTS, NUM_TOKENS = 6, 200
STEPS = tuple(0.01 * 3 ** (k / 2) for k in range(9))


@pytest.fixture(scope="module")
def profile(engine: TorchEngine) -> Profile:
    """Calibrated on the tiny model's own KV, with made-up sensitivities."""
    geometry = engine.geometry
    codec_geometry = Geometry(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    tables = engine.rotary_tables(NUM_TOKENS)
    contexts = []
    for seed in range(NUM_CONTEXTS):
        rng = np.random.default_rng(seed)
        ids = [int(i) for i in rng.integers(3, geometry.vocab_size, NUM_TOKENS)]
        cache = engine.new_cache(NUM_TOKENS)
        engine.fill(cache, ids, 0)
        plain = cache.read(0, NUM_TOKENS).astype(np.float32)
        plain[:, 0] = unrotate(plain[:, 0], tables, token_start=0)
        flat = plain.reshape(*plain.shape[:3], -1)
        pull = rng.normal(size=flat.shape).astype(np.float32)
        contexts.append(Context(flat, pull, 1))
    calibration = KltCalibration(codec_geometry, steps=STEPS)
    for context in contexts:
        calibration.add_moments(context)
    for context in contexts:
        calibration.add_sensitivity(context)
    counter = calibration.start_counts()
    for context in contexts:
        counter.add_magnitudes(context)
    counter.finish_magnitudes()
    for context in contexts:
        counter.add_counts(context)
    return counter.build(model_digest=engine.identity.model_digest, notes={"model": "tiny"})


@pytest.fixture(scope="module")
def klt_codec(engine: TorchEngine, profile: Profile) -> Codec:
    return make_codec(engine, [profile], num_threads=1)


async def answer_loss(bench: Bench, level: str) -> float:
    """Ask over a context sent at a level; return the KL that the worker found."""
    await bench.worker()
    agent = await bench.agent(level=level)
    done = await answer(agent, evaluate=True)
    assert isinstance(done, Done)
    assert agent.ready() == dict.fromkeys(range(len(RANGES)), level)
    assert done.evaluation is not None
    return float(done.evaluation.kl)


async def test_klt_chunks_are_decoded_and_the_finer_level_loses_less(
    engine: TorchEngine, klt_codec: Codec, executors: Executors
) -> None:
    losses = []
    for level in ("klt:0", "klt:8"):
        broker = MemoryBroker()

        async def dial(broker: MemoryBroker = broker) -> Transport:
            return broker.connect()

        bench = Bench(engine, klt_codec, executors, dial)
        losses.append(await answer_loss(bench, level))
        await bench.close()
    assert losses[0] < 1e-2
    assert losses[0] < losses[1] / 10


def test_layer_0_and_positions_are_those_of_the_chunk(
    engine: TorchEngine, klt_codec: Codec
) -> None:
    cache = engine.new_cache(len(CONTEXT))
    engine.fill(cache, CONTEXT, 0)
    start, stop = RANGES[1]
    exact = cache.read(start, stop)
    layer0 = engine.layer0_kv(CONTEXT[start:stop])
    stream = klt_codec.encode(exact, level="klt:0", token_start=start, layer0=layer0)
    decoded = klt_codec.decode(stream, layer0=layer0)
    error = float(np.abs(decoded.kv - exact).max() / np.abs(exact).max())
    assert error < 0.05
    with pytest.raises(CodecError, match="layer0"):
        klt_codec.decode(stream)


@pytest.fixture
async def bench(
    engine: TorchEngine, klt_codec: Codec, executors: Executors
) -> AsyncIterator[Bench]:
    broker = MemoryBroker()

    async def dial() -> Transport:
        return broker.connect()

    made = Bench(engine, klt_codec, executors, dial)
    yield made
    await made.close()


def refinement(agent: Agent, chunk: int, name: str, part: int) -> OutgoingChunk:
    start, stop = RANGES[chunk]
    cache = agent.engine.new_cache(len(CONTEXT))
    agent.engine.fill(cache, CONTEXT, 0)
    payload = agent.codec.encode(
        cache.read(start, stop),
        level=name,
        token_start=start,
        layer0=agent.engine.layer0_kv(CONTEXT[start:stop]),
    )
    return OutgoingChunk(chunk, name, payload, part=part, kind=ChunkKind.REFINEMENT)


async def refined_answer(agent: Agent, *, parts: int) -> Done:
    """Send every chunk at klt:8, then `parts` refinements of each, and only then the question."""
    assert isinstance(await agent.open(), Accept)
    for chunk in range(len(RANGES)):
        agent.send(chunk)
        for part in range(1, parts + 1):
            name = f"klt:{10 - 2 * part}>{8 - 2 * part}"
            agent.sender.offer(refinement(agent, chunk, name, part), now=time.monotonic())
    while len(agent.ready_parts()) < len(RANGES) * (parts + 1):
        await agent.run(until=ChunkReady)
    agent.ask(evaluate=True)
    done = await agent.run()
    assert isinstance(done, Done)
    return done


async def test_refined_chunks_lose_what_the_finer_level_loses(bench: Bench) -> None:
    await bench.worker()
    losses = []
    for parts in (0, 1, 2):
        agent = await bench.agent(level="klt:8")
        done = await refined_answer(agent, parts=parts)
        assert done.evaluation is not None
        losses.append(float(done.evaluation.kl))
        last = {event.chunk: event for event in agent.events if isinstance(event, ChunkReady)}
        level = f"klt:{8 - 2 * parts}"
        assert {chunk: (e.level, e.part) for chunk, e in last.items()} == dict.fromkeys(
            range(len(RANGES)), (level, parts)
        )
    whole = await bench.agent(level="klt:4")
    done = await answer(whole, evaluate=True)
    assert done.evaluation is not None
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] == pytest.approx(float(done.evaluation.kl), rel=1e-3, abs=1e-9)


async def test_a_refinement_of_something_else_leaves_the_answer_as_it_is(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent(level="klt:8")
    assert isinstance(await agent.open(), Accept)
    for chunk in range(len(RANGES)):
        agent.send(chunk)
    other = refinement(agent, 1, "klt:6>4", 1)
    damaged = refinement(agent, 0, "klt:8>6", 1)
    of_another = OutgoingChunk(
        2, "klt:8>6", refinement(agent, 1, "klt:8>6", 1).payload, part=1, kind=ChunkKind.REFINEMENT
    )
    payload = damaged.payload[:-4] + bytes(4)
    spoilt = OutgoingChunk(0, "klt:8>6", payload, part=1, kind=ChunkKind.REFINEMENT)
    for offered in (other, spoilt, of_another):
        agent.sender.offer(offered, now=time.monotonic())
    while sum(isinstance(event, ChunkBad) for event in agent.events) < 3:
        await agent.run(until=ChunkBad)
    bad = {event.chunk: event for event in agent.events if isinstance(event, ChunkBad)}
    assert {event.part for event in bad.values()} == {1}
    assert "does not refine chunk 1" in bad[1].sentence
    assert "checksum" in bad[0].sentence
    assert "tokens" in bad[2].sentence
    agent.ask()
    assert isinstance(await agent.run(), Done)
    plain = await bench.agent(level="klt:8")
    await answer(plain)
    assert agent.tokens() == plain.tokens()


async def test_refinements_may_come_while_the_answer_is_decoded(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent(level="klt:8")
    assert isinstance(await agent.open(), Accept)
    agent.ask()
    for chunk in range(len(RANGES)):
        agent.send(chunk)
        agent.sender.offer(refinement(agent, chunk, "klt:8>6", 1), now=time.monotonic())
    done = await agent.run()
    assert isinstance(done, Done)
    assert len(agent.tokens()) > 0


async def test_a_chunk_that_was_recomputed_takes_no_refinement(bench: Bench) -> None:
    await bench.worker()
    agent = await bench.agent(level="klt:8")
    assert isinstance(await agent.open(), Accept)
    agent.recompute(0)
    agent.sender.offer(refinement(agent, 0, "klt:8>6", 1), now=time.monotonic())
    bad = await agent.run(until=ChunkBad)
    assert bad.part == 1
    assert "not kept" in bad.sentence
    agent.ask()
    agent.send(1)
    agent.send(2)
    assert isinstance(await agent.run(), Done)
