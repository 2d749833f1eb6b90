"""Level set klt through the worker: it needs layer 0 from the token ids, and the rotary tables."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_worker.executors import Executors
from cloud_worker.program import make_codec
from codec import Codec, CodecError, Geometry, Profile
from codec.calibrate_klt import Context, KltCalibration
from engine import TorchEngine
from engine.rope import unrotate
from tests.cloud_worker.agent import CONTEXT, RANGES
from tests.cloud_worker.bench import Bench, answer
from wire import Done
from wire.aio import MemoryBroker, Transport

NUM_CONTEXTS, NUM_TOKENS = 6, 200


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
    calibration = KltCalibration(codec_geometry, steps=(0.01, 0.1, 1.0))
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
    for level in ("klt:0", "klt:2"):
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
