"""The worker's process: load, measure, connect, serve, drain.

Invariant: the health page is up before the model is loaded, and the worker joins the queue group only
when it can serve; on SIGTERM it leaves the group first and exits when the last session has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from cloud_worker.calibration import calibrate
from cloud_worker.config import WorkerConfig
from cloud_worker.errors import BrokerUnavailable, ModelUnavailable
from cloud_worker.evaluation import Evaluator, ExactCaches
from cloud_worker.executors import Executors
from cloud_worker.http import start_http
from cloud_worker.speeds import SpeedModel
from cloud_worker.worker import Worker
from codec import Codec, CodecError, Geometry, LevelSet, Profile, Rotary, bundled_profiles
from engine import EngineError, TorchEngine, cache_root, load_engine
from telemetry import Event, MetricSet, announce, configure_logging, get_logger, names
from wire.aio import ConnectionChange, NatsTransport, TransportError

log = get_logger("cloud_worker")


def run(config: WorkerConfig) -> None:
    """Run one worker until a signal ends it.

    Raises:
        WorkerError: it cannot start; each kind has an exit code.
    """
    configure_logging(config.log_level, program="kvtide-worker")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Program(config).serve())


class _Program:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._worker_id = config.worker_id or f"w-{secrets.token_hex(4)}"
        self._metrics = MetricSet(names.WORKER_METRICS, slo_s=config.slo_s)
        self._worker: Worker | None = None
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()

    async def serve(self) -> None:
        config = self._config
        log.info(Event.STARTING, worker=self._worker_id, model=config.model, device=config.device)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        status = await start_http(
            host=config.http_host,
            port=config.http_port,
            metrics=self._metrics,
            refresh=self._refresh_metrics,
            unready_reason=self._unready_reason,
        )
        try:
            announce(Event.LISTENING, port=status.port)
            serving = asyncio.create_task(self._load_and_work())
            stopping = asyncio.create_task(self._stop.wait())
            # A stop while the model is loading ends at once: nothing has been promised yet.
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and self._worker is None:
                serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            stopping.cancel()
        finally:
            await status.close()
        log.info(Event.STOPPED, worker=self._worker_id)

    async def _load_and_work(self) -> None:
        config = self._config
        engine, codec, speeds = await asyncio.to_thread(_load, config)
        log.info(Event.MODEL_LOADED, model=config.model, identity=engine.identity.digest.hex())
        executors = Executors()
        try:
            async with contextlib.AsyncExitStack() as stack:
                transports = []
                for lane in ("data", "control"):
                    transport = await self._connect(lane)
                    stack.push_async_callback(transport.close)
                    stack.callback(transport.watch(self._on_change))
                    transports.append(transport)
                self._worker = Worker(
                    config=config,
                    worker_id=self._worker_id,
                    engine=engine,
                    codec=codec,
                    executors=executors,
                    speeds=speeds,
                    evaluator=self._evaluator(engine, executors),
                    metrics=self._metrics,
                    data=transports[0],
                    control=transports[1],
                )
                await self._worker.start()
                log.info(Event.READY, worker=self._worker_id, levels=_level_names(codec))
                await self._stop.wait()
                failures = [t.failure for t in transports if t.failure is not None]
                # Without a broker no session can be finished.
                await self._drain(
                    self._worker, timeout_s=0.0 if failures else config.drain_timeout_s
                )
                if failures:
                    raise BrokerUnavailable(str(failures[0])) from failures[0]
        finally:
            executors.close()

    async def _drain(self, worker: Worker, *, timeout_s: float) -> None:
        log.info(Event.DRAINING, sessions=worker.num_sessions)
        draining = asyncio.create_task(worker.drain(timeout_s=timeout_s))
        aborting = asyncio.create_task(self._abort.wait())
        await asyncio.wait({draining, aborting}, return_when=asyncio.FIRST_COMPLETED)
        aborting.cancel()
        if not draining.done():
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
        await worker.close()

    async def _connect(self, lane: str) -> NatsTransport:
        config = self._config
        try:
            transport = await NatsTransport.connect(
                config.nats_url,
                name=f"kvtide-worker {self._worker_id} {lane}",
                token=config.broker_token() or "",
                creds_file=config.nats_creds_file,
                ca_file=config.nats_ca_file,
                timeout_s=config.connect_timeout_s,
            )
        except TransportError as error:
            raise BrokerUnavailable(str(error)) from error
        log.info(Event.BROKER_CONNECTED, lane=lane)
        return transport

    def _on_change(self, change: ConnectionChange) -> None:
        # A broker that is away comes back; one that will not have this worker does not.
        if change is ConnectionChange.FAILED:
            self._stop.set()

    def _evaluator(self, engine: TorchEngine, executors: Executors) -> Evaluator | None:
        if self._config.evaluation_cache_bytes == 0:
            return None
        return Evaluator(
            engine=engine,
            executors=executors,
            caches=ExactCaches(self._config.evaluation_cache_bytes),
            step_tokens=self._config.prefill_step_tokens,
        )

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._abort.set()
        self._stop.set()

    def _unready_reason(self) -> str | None:
        if self._stop.is_set():
            return "draining"
        if self._worker is None:
            return "loading"
        return self._worker.unready_reason()

    def _refresh_metrics(self) -> None:
        if self._worker is not None:
            self._worker.refresh_metrics()


def _load(config: WorkerConfig) -> tuple[TorchEngine, Codec, SpeedModel]:
    try:
        engine = load_engine(
            config.model,
            device=config.device,
            dtype=config.dtype,
            num_threads=config.num_threads or None,
            cache_dir=config.cache_dir,
        )
        codec = build_codec(engine, config.profiles, config.codec_threads)
        speeds = calibrate(
            engine,
            codec,
            step_tokens=config.prefill_step_tokens,
            mode=config.calibrate,
            cache_dir=cache_root(config.cache_dir),
        )
    except EngineError as error:
        raise ModelUnavailable(str(error)) from error
    return engine, codec, speeds


def build_codec(engine: TorchEngine, profile_paths: tuple[str, ...], num_threads: int) -> Codec:
    """Build the decoder for an engine's KV cache.

    Args:
        engine: the loaded model.
        profile_paths: profile files; empty takes the bundled ones.
        num_threads: threads per decode.

    Raises:
        ModelUnavailable: a profile cannot be read or belongs to another model.
    """
    try:
        profiles = (
            [Profile.load(Path(path).expanduser()) for path in profile_paths]
            if profile_paths
            # Profiles hold for a model in every compute dtype; sessions compare the full identity.
            else bundled_profiles(engine.identity.model_digest)
        )
        return make_codec(engine, profiles, num_threads=num_threads)
    except (OSError, CodecError, EngineError) as error:
        raise ModelUnavailable(f"profiles: {error}") from error


def make_codec(engine: TorchEngine, profiles: Sequence[Profile], *, num_threads: int) -> Codec:
    """Build the decoder for an engine's KV cache from loaded profiles.

    Raises:
        CodecError: a profile belongs to another model.
        EngineError: level set ``klt`` cannot be used with this model's rotary embedding.
    """
    geometry = engine.geometry
    rotary = None
    if any(profile.level_set is LevelSet.KLT for profile in profiles):
        tables = engine.rotary_tables(geometry.context_tokens)
        rotary = Rotary(
            tables.cos, tables.sin, tables.table_of_layer.astype(np.int64), tables.interleaved
        )
    return Codec(
        Geometry(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim),
        model_digest=engine.identity.model_digest,
        profiles=profiles,
        num_threads=num_threads,
        rotary=rotary,
    )


def _level_names(codec: Codec) -> list[str]:
    return [level.name for level in codec.levels()]
