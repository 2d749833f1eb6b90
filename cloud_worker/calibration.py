"""Measures this machine once: seconds per prefilled token, and decoded bytes per second.

The planner needs the numbers before the first session. They are kept beside the model's weights, in
a file named by everything that they depend on, and corrected by every step of real sessions.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from cloud_worker.speeds import DecodeSample, PrefillSample, SpeedModel
from codec import Codec, CodecError
from engine import KvCache, TorchEngine

REPEATS = 2
"""Each measurement is made this often and the fastest one counts: noise only ever adds time."""
MAX_DRIFT = 1.7
"""Kept measurements are made anew when a short step now takes this many times as long, or as short."""
SHORT_STEP_TOKENS = 8
"""Tokens of a short step, which is mostly the reading of the weights."""
MAX_STEP_TOKENS = 128
"""Most tokens of a measured prefill step and of the decoded chunk: start-up has to stay short, and a
longer step only costs less per token."""
FAR_SHARE = 0.5
"""Second position measured, as a share of the model's context window."""
MAX_FAR_TOKENS = 2048
"""Largest second position: a longer cache would only cost memory at start."""

Samples = tuple[tuple[PrefillSample, ...], tuple[DecodeSample, ...]]


def calibrate(
    engine: TorchEngine, codec: Codec, *, step_tokens: int, mode: str, cache_dir: Path
) -> SpeedModel:
    """Return a speed model from this machine's measurements.

    Args:
        engine: the model.
        codec: decoder to measure, at one level of each level set.
        step_tokens: tokens of one prefill step.
        mode: ``cached`` reads the kept measurements if there are any, ``measure`` makes new ones,
            ``none`` makes and reads none.
        cache_dir: folder that keeps measurements.
    """
    if mode == "none":
        return SpeedModel()
    path = cache_dir / "calibration" / f"{_machine_key(engine, codec, step_tokens)}.json"
    samples = _read(path) if mode == "cached" else None
    if samples is None or not _still_holds(engine, samples):
        samples = measure(engine, codec, step_tokens=step_tokens)
        _write(path, samples)
    return SpeedModel(*samples)


def _still_holds(engine: TorchEngine, samples: Samples) -> bool:
    """Whether the fastest short step of today is about as long as the kept one.

    A machine that was crowded when it was measured, or is now limited to fewer cores, has the same
    name and the same processor; this costs some tens of milliseconds.
    """
    kept = min(samples[0], key=lambda sample: sample.num_tokens)
    cache = engine.new_cache(kept.num_tokens)
    ids = (0,) * kept.num_tokens
    engine.fill(cache, ids, 0)  # the first call pays for what torch sets up lazily
    now = min(_timed_fill(engine, cache, ids, 0) for _ in range(REPEATS))
    return 1 / MAX_DRIFT < now / kept.seconds < MAX_DRIFT


def _timed_fill(engine: TorchEngine, cache: KvCache, ids: tuple[int, ...], start: int) -> float:
    started = time.perf_counter()
    engine.fill(cache, ids, start)
    return time.perf_counter() - started


def measure(engine: TorchEngine, codec: Codec, *, step_tokens: int) -> Samples:
    """Measure short and long prefill steps, near and far, and the decoding of one chunk per level set."""
    window = engine.geometry.context_tokens
    num_tokens = min(step_tokens, MAX_STEP_TOKENS, window // 2)
    far = min(int(window * FAR_SHARE), MAX_FAR_TOKENS, window - num_tokens)
    cache = engine.new_cache(far + num_tokens)
    rng = np.random.default_rng(0)
    ids = tuple(int(i) for i in rng.integers(0, engine.geometry.vocab_size, num_tokens))
    engine.fill(cache, ids[:1], 0)  # the first call pays for what torch sets up lazily
    prefill = []
    steps = ((0, SHORT_STEP_TOKENS), (0, num_tokens), (far, num_tokens))
    # Interleaved, so that a neighbour's burst does not fall on one kind of step only.
    for start, size in steps * REPEATS:
        seconds = _timed_fill(engine, cache, ids[:size], start)
        prefill.append(PrefillSample(start, size, seconds))
    fastest = tuple(
        min((s for s in prefill if (s.token_start, s.num_tokens) == step), key=lambda s: s.seconds)
        for step in steps
    )
    return fastest, _measure_decode(engine, codec, cache, ids)


def _measure_decode(
    engine: TorchEngine, codec: Codec, cache: KvCache, ids: tuple[int, ...]
) -> tuple[DecodeSample, ...]:
    num_tokens = len(ids)
    kv = cache.read(0, num_tokens)
    layer0 = engine.layer0_kv(ids)
    kv_bytes = engine.geometry.num_bytes_per_token(2) * num_tokens
    samples = []
    # The finest level of each set: reversed, so that it is the one that stays.
    finest = {level.name.partition(":")[0]: level.name for level in reversed(codec.levels())}
    for level_set, name in finest.items():
        try:
            bitstream = codec.encode(kv, level=name, token_start=0, layer0=layer0)
        except CodecError:
            continue  # a level that this codec can read but not write is learned from real chunks
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            decoded = codec.decode(bitstream, layer0=layer0, dtype=np.float16)
            cache.write(0, decoded.kv)
            seconds.append(time.perf_counter() - started)
        samples.append(DecodeSample(level_set, kv_bytes, min(seconds)))
    return tuple(samples)


def _machine_key(engine: TorchEngine, codec: Codec, step_tokens: int) -> str:
    parts = [
        engine.identity.digest.hex(),
        platform.node(),
        platform.machine(),
        _processor(),
        str(os.cpu_count()),
        str(torch.get_num_threads()),
        str(engine.device),
        torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "",
        torch.__version__,
        str(step_tokens),
        *(level.name for level in codec.levels()),
    ]
    return blake3("\0".join(parts).encode()).hexdigest(length=16)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), "")


def _read(path: Path) -> Samples | None:
    try:
        record = json.loads(path.read_text())
        return (
            tuple(PrefillSample(**sample) for sample in record["prefill"]),
            tuple(DecodeSample(**sample) for sample in record["decode"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, or of another version: it is measured again


def _write(path: Path, samples: Samples) -> None:
    record = {
        "prefill": [asdict(sample) for sample in samples[0]],
        "decode": [asdict(sample) for sample in samples[1]],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w") as sink:
            json.dump(record, sink)
        Path(partial).replace(path)
    except OSError:
        return  # a read-only folder costs the measurement at the next start, no more
