"""The agent: starts the parts, counts what runs, stops in order.

HTTP is up at once; the model loads and the broker connects in the background. Invariants: no new
work is taken while the agent drains; running answers finish before it ends, within
``drain_timeout_s``. Must not know: frames, bitstreams, SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edge_agent.api import ChatRequest, NewContext
from edge_agent.broker import Broker
from edge_agent.chat import Answer, ChatService, Transfer
from edge_agent.config import EdgeConfig
from edge_agent.errors import (
    AgentError,
    DeadlineExceeded,
    Draining,
    NotReady,
    NoWorker,
    TooBusy,
    WorkerRefused,
)
from edge_agent.ingest import Ingestor, IngestResult, Progress
from edge_agent.model import EdgeModel, load_model
from edge_agent.store import ContextInfo, ContextStore, StoreUsage
from edge_agent.threads import run_in
from edge_agent.timeline import Timeline
from edge_agent.uplink import Uplink
from telemetry import Event, MetricSet, get_logger, level_label, names

DISK_THREADS = 4
"""Threads for files, hashing and encoding: enough to overlap a read with an encode."""

_log = get_logger("edge_agent")

_Service = TypeVar("_Service")


class Agent:
    """The services behind the HTTP API."""

    def __init__(
        self,
        config: EdgeConfig,
        *,
        store: ContextStore,
        uplink: Transfer,
        metrics: MetricSet,
        disk: ThreadPoolExecutor,
        compute: ThreadPoolExecutor,
        load: Callable[[EdgeConfig], EdgeModel] = load_model,
    ) -> None:
        self.model_name = config.model
        self.metrics = metrics
        self._config = config
        self._store = store
        self._uplink = uplink
        self._disk = disk
        self._compute = compute
        self._load = load
        self._ingestor: Ingestor | None = None
        self._chat: ChatService | None = None
        self._is_draining = False
        self._num_requests = 0
        self._num_ingests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._evictions_seen = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: EdgeConfig) -> AsyncIterator[Agent]:
        """Open store and uplink; the model is loaded by ``load``."""
        metrics = MetricSet(names.EDGE_METRICS, slo_s=config.deadline_s)
        with (
            ContextStore(
                config.store_dir,
                quota_bytes=config.store_quota_bytes,
                on_evict=lambda context_id: _log.info(Event.CONTEXT_EVICTED, context_id=context_id),
            ) as store,
            # The pools are left before the store is closed, so that no thread meets a closed store.
            ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk") as disk,
            ThreadPoolExecutor(1, thread_name_prefix="compute") as compute,
        ):
            _log.info(
                Event.STARTING,
                model=config.model,
                tenant=config.tenant,
                contexts=store.usage().num_contexts,
                repaired=store.num_repaired,
            )
            async with Broker.of(config).open() as broker:
                uplink = Uplink(config, broker=broker, store=store, metrics=metrics, disk=disk)
                yield cls(
                    config, store=store, uplink=uplink, metrics=metrics, disk=disk, compute=compute
                )

    async def load(self) -> None:
        """Load the model; until it is there, ``/readyz`` says 503.

        Raises:
            ConfigError: the model, a profile or a level cannot be used.
        """
        started = time.monotonic()
        model = await run_in(self._compute, self._load, self._config)
        ingestor = Ingestor(
            engine=model.engine,
            codec=model.codec,
            store=self._store,
            metrics=self.metrics,
            tenant=self._config.tenant,
            levels=self._config.levels,
            chunk_tokens=self._config.chunk_tokens,
            compute=self._compute,
            disk=self._disk,
        )
        self._uplink.set_model(model)
        self._chat = ChatService(
            config=self._config,
            model=model,
            profile_digest=ingestor.profile_digest,
            store=self._store,
            transfer=self._uplink,
            disk=self._disk,
        )
        self._ingestor = ingestor
        _log.info(
            Event.MODEL_LOADED,
            model=self._config.model,
            identity=model.engine.identity.digest.hex(),
            levels=list(ingestor.levels),
            seconds=round(time.monotonic() - started, 3),
        )

    @property
    def num_requests(self) -> int:
        """Chat requests that run now."""
        return self._num_requests

    @property
    def num_ingests(self) -> int:
        """Ingests that run or wait now."""
        return self._num_ingests

    def readiness(self) -> dict[str, bool]:
        """Return each condition of being ready, by name."""
        return {
            "engine": self._ingestor is not None,
            "broker": self._uplink.is_connected,
            "draining": self._is_draining,
        }

    def start_draining(self) -> None:
        """Take no new work from now on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until nothing runs any more, at most this long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def refresh_metrics(self) -> None:
        """Bring the store's gauges up to date."""
        usage = await run_in(self._disk, self._store.usage)
        self.metrics.set(names.EDGE_STORE_BYTES, usage.num_bytes)
        self.metrics.set(names.EDGE_STORE_CONTEXTS, usage.num_contexts)
        self.metrics.set(names.EDGE_STORE_QUOTA_BYTES, self._config.store_quota_bytes)
        self.metrics.set(names.EDGE_ACTIVE_REQUESTS, self._num_requests)
        self._count_evictions(usage)

    async def ingest(
        self, new: NewContext, on_progress: Callable[[Progress], None]
    ) -> IngestResult:
        """Store a context."""
        ingestor = self._ready(self._ingestor)
        if self._num_ingests >= self._config.max_ingests:
            raise TooBusy(f"{self._num_ingests} ingests are running already")
        with self._counted(ingests=1):
            _log.info(Event.INGEST_STARTED, chars=len(new.text))
            try:
                async with asyncio.timeout(self._config.ingest_timeout_s):
                    result = await ingestor.ingest(
                        new.text,
                        context_id=new.context_id,
                        levels=new.levels,
                        on_progress=on_progress,
                    )
            except BaseException as error:
                self.metrics.add(names.EDGE_INGESTS, 1, _outcome(error))
                _log.warning(Event.INGEST_FAILED, outcome=_outcome(error), error=_sentence(error))
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        f"the ingest took longer than {self._config.ingest_timeout_s:g} s"
                    ) from error
                raise
        self.metrics.add(names.EDGE_INGESTS, 1, "ok")
        self.metrics.add(names.EDGE_INGESTED_TOKENS, result.context.num_tokens)
        _log.info(
            Event.INGEST_COMPLETE,
            context_id=result.context.context_id,
            num_tokens=result.context.num_tokens,
            num_chunks=len(result.context.spans),
            prefilled_tokens=result.prefilled_tokens,
            bytes_by_level=result.bytes_by_level,
            seconds=round(result.duration_s, 3),
        )
        return result

    async def list_contexts(self) -> list[ContextInfo]:
        """Return all stored contexts."""
        return await run_in(self._disk, self._store.list_contexts)

    async def describe_context(self, context_id: str) -> ContextInfo:
        """Return one stored context."""
        return await run_in(self._disk, self._store.describe, context_id)

    async def delete_context(self, context_id: str) -> None:
        """Remove a context."""
        await run_in(self._disk, self._store.delete, context_id)
        _log.info(Event.CONTEXT_DELETED, context_id=context_id)

    @contextlib.asynccontextmanager
    async def chat(self, request: ChatRequest, *, arrived_at: float) -> AsyncIterator[Answer]:
        """Answer a chat request; leaving the block early cancels it."""
        service = self._ready(self._chat)
        if self._num_requests >= self._config.max_requests:
            raise TooBusy(f"{self._num_requests} requests are running already")
        with self._counted(requests=1):
            try:
                async with service.open(request, arrived_at=arrived_at) as answer:
                    yield answer
            except BaseException as error:
                self.metrics.add(names.EDGE_REQUESTS, 1, _outcome(error))
                _log.warning(Event.TRANSFER_DONE, outcome=_outcome(error), error=_sentence(error))
                raise
        if answer.failure is not None:
            # After the first token a failure is told in the stream, and the block ends quietly.
            outcome = _outcome(answer.failure)
            _log.warning(Event.TRANSFER_DONE, outcome=outcome, error=_sentence(answer.failure))
        else:
            outcome = "ok" if answer.end is not None else "cancelled"
        self.metrics.add(names.EDGE_REQUESTS, 1, outcome)
        if answer.end is not None:
            self._record(answer, answer.end.timeline)

    def _record(self, answer: Answer, timeline: Timeline) -> None:
        policy = timeline.policy.partition(":")[0]
        policy = policy if policy in names.Label.POLICY.allowed else "other"
        if timeline.first_token_s is not None:
            self.metrics.observe(names.EDGE_TTFT_SECONDS, timeline.first_token_s, policy)
        if not timeline.is_slo_met:
            self.metrics.add(names.EDGE_SLO_VIOLATIONS, 1, policy)
        self.metrics.add(names.EDGE_RESENT_BYTES, timeline.num_resent_bytes)
        if timeline.delivery:
            self.metrics.set(names.EDGE_DELIVERY_BYTES_PER_SECOND, timeline.delivery[-1][1])
        for chunk in timeline.chunks:
            self.metrics.add(names.EDGE_CHUNKS, 1, level_label(chunk.choice))
            self.metrics.add(names.EDGE_SENT_BYTES, chunk.num_bytes, level_label(chunk.choice))
        _log.info(
            Event.TRANSFER_DONE,
            outcome="ok",
            session_id=timeline.session,
            worker=timeline.worker,
            policy=timeline.policy,
            model=self.model_name,
            context_tokens=answer.context_tokens,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            chunks=len(timeline.chunks),
            levels=[chunk.choice for chunk in timeline.chunks],
            bytes_sent=timeline.num_payload_bytes,
            bytes_resent=timeline.num_resent_bytes,
            ttft_s=timeline.first_token_s,
            slo_s=timeline.deadline_s,
            slo_met=timeline.is_slo_met,
        )

    def _count_evictions(self, usage: StoreUsage) -> None:
        self.metrics.add(names.EDGE_STORE_EVICTIONS, usage.num_evicted - self._evictions_seen)
        self._evictions_seen = usage.num_evicted

    def _ready(self, service: _Service | None) -> _Service:
        if self._is_draining:
            raise Draining("the agent is stopping and takes no new work")
        if service is None:
            raise NotReady("the agent is still loading its model")
        return service

    @contextlib.contextmanager
    def _counted(self, *, requests: int = 0, ingests: int = 0) -> Iterator[None]:
        self._num_requests += requests
        self._num_ingests += ingests
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= requests
            self._num_ingests -= ingests
            if not self._num_requests and not self._num_ingests:
                self._idle.set()


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError):
        return "cancelled"
    if isinstance(error, NoWorker | WorkerRefused):
        return "refused"
    if isinstance(error, DeadlineExceeded | TimeoutError):
        return "timeout"
    return "failed"


def _sentence(error: BaseException) -> str:
    # Only our own errors are known to say nothing of a prompt.
    return str(error) if isinstance(error, AgentError) else type(error).__name__
