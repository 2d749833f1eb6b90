"""The worker's shell: claims sessions, gives each its memory, its subjects and its pipeline.

Invariant: a session's subjects are subscribed and its memory is reserved before the agent is told
that it was accepted; both are given back whatever its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from cloud_worker.admission import SessionPlan, examine, terms_of
from cloud_worker.budget import MemoryBudget
from cloud_worker.config import WorkerConfig
from cloud_worker.errors import NoMemory
from cloud_worker.evaluation import Evaluator
from cloud_worker.executors import Executors
from cloud_worker.pipeline import PipelineEvent, SessionPipeline
from cloud_worker.session import SessionContext, WorkerSession
from cloud_worker.speeds import SpeedModel
from codec import Codec
from engine import TorchEngine
from engine.chunk_keys import profile_set_digest
from telemetry import Event, MetricSet, get_logger, names
from wire import (
    WORKER_QUEUE,
    Accept,
    FailCode,
    FrameError,
    Open,
    ReceiverSession,
    Refuse,
    RefuseCode,
    RemoteProtocolError,
    Speeds,
    control_subject,
    data_subject,
    open_subject,
    parse_open,
    refusal_frame,
    reply_subject,
)
from wire.aio import ConnectionChange, Message, Subscription, Transport, TransportError
from wire.frames import parse

MIN_RETRY_AFTER_S = 1.0
"""Least time that a refused agent is told to wait; sessions last seconds."""

LAST_WORD_S = 3.0
"""How long a worker that stops waits for agents to acknowledge that their sessions are over."""

log = get_logger("cloud_worker")


class Worker:
    """Serves the sessions of one tenant with one model."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        worker_id: str,
        engine: TorchEngine,
        codec: Codec,
        executors: Executors,
        speeds: SpeedModel,
        evaluator: Evaluator | None,
        metrics: MetricSet,
        data: Transport,
        control: Transport,
    ) -> None:
        """Prepare the worker; ``start`` joins the queue group.

        Args:
            config: its settings.
            worker_id: its name in subjects, logs and answers.
            engine: the model.
            codec: decoder for the model's geometry and profiles.
            executors: its threads.
            speeds: what it tells planners; corrected by every step.
            evaluator: None where evaluations are turned off.
            metrics: where sessions are counted.
            data: connection on which segments arrive.
            control: connection for everything else, never behind the segments of other sessions.
        """
        self._config = config
        self._worker_id = worker_id
        self._engine = engine
        self._codec = codec
        self._executors = executors
        self._speeds = speeds
        self._evaluator = evaluator
        self._metrics = metrics
        self._data = data
        self._control = control
        self._terms = terms_of(
            codec,
            tenant=config.tenant,
            model_name=engine.name,
            model_digest=engine.identity.digest,
            profile_digest=profile_set_digest(profile.digest for profile in codec.profiles),
            vocab_size=engine.geometry.vocab_size,
            context_tokens=engine.geometry.context_tokens,
            element_bytes=engine.dtype.itemsize,
            max_answer_tokens=config.max_answer_tokens,
            window_bytes=config.window_bytes,
        )
        self._budget = MemoryBudget(config.memory_budget_bytes)
        self._sessions: dict[bytes, WorkerSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_subscription: Subscription | None = None
        self._is_draining = False
        self._was_up = True
        self._unwatch = [transport.watch(self._on_change) for transport in (data, control)]

    @property
    def num_sessions(self) -> int:
        """Sessions that are open now."""
        return len(self._sessions)

    @property
    def budget(self) -> MemoryBudget:
        """Who holds how much memory."""
        return self._budget

    async def start(self) -> None:
        """Join the queue group; sessions come from now on."""
        self._open_subscription = await self._control.subscribe(
            open_subject(self._config.tenant), self._on_open, queue=WORKER_QUEUE
        )

    def unready_reason(self) -> str | None:
        """None while sessions are taken, else why not."""
        if self._is_draining:
            return "draining"
        if not self._is_connected:
            return "the broker is away"
        return None

    @property
    def _is_connected(self) -> bool:
        return self._data.is_connected and self._control.is_connected

    def _on_change(self, _change: ConnectionChange) -> None:
        is_up = self._is_connected
        if is_up == self._was_up:
            return
        self._was_up = is_up
        log.warning(Event.BROKER_RECONNECTED if is_up else Event.BROKER_DISCONNECTED)
        for session in list(self._sessions.values()):
            session.on_connection(is_up=is_up)

    async def drain(self, *, timeout_s: float) -> None:
        """Leave the queue group and wait for the open sessions; those that remain are failed."""
        self._is_draining = True
        if self._open_subscription is not None:
            await self._open_subscription.unsubscribe()
            self._open_subscription = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await self.close()

    async def close(self) -> None:
        """End every session now; their agents are told, for another worker to take over."""
        self._is_draining = True
        for session in list(self._sessions.values()):
            session.fail(FailCode.DRAINING, "the worker is stopping")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORD_S)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch.clear()

    def refresh_metrics(self) -> None:
        """Set the gauges that are read from state."""
        metrics = self._metrics
        metrics.set(names.WORKER_ACTIVE_SESSIONS, len(self._sessions))
        metrics.set(names.WORKER_MEMORY_BUDGET_BYTES, self._budget.total_bytes)
        metrics.set(names.WORKER_MEMORY_RESERVED_BYTES, self._budget.reserved_bytes)
        metrics.set(names.WORKER_CACHE_BYTES, self._budget.cache_bytes)
        metrics.set(names.WORKER_QUEUE_DELAY_SECONDS, self._executors.pending_compute_s)

    def _on_open(self, incoming: Message) -> None:
        task = asyncio.create_task(self._open(incoming))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(Event.TASK_FAILED, error=type(error).__name__, exc_info=error)

    async def _open(self, incoming: Message) -> None:
        accepted_s = time.monotonic()
        try:
            frame = parse(incoming.data)
        except FrameError as error:
            log.warning(Event.BROKER_ERROR, reason=str(error))
            return  # not ours: there is no session to answer to
        known = self._sessions.get(frame.session)
        if known is not None:
            await self._reply(incoming, known.accept_frame())
            return
        try:
            open_, token_ids, session_id = parse_open(incoming.data)
        except RemoteProtocolError as error:
            await self._refuse(incoming, frame.session, Refuse(RefuseCode.BAD_REQUEST, str(error)))
            return
        plan = self._plan(open_, token_ids, session_id)
        if isinstance(plan, Refuse):
            await self._refuse(incoming, session_id, plan)
            return
        await self._serve(incoming, open_, token_ids, session_id, plan, accepted_s)

    def _plan(
        self, open_: Open, token_ids: tuple[int, ...], session_id: bytes
    ) -> SessionPlan | Refuse:
        """Reserve a session's memory, or say why not."""
        retry_after_s = max(MIN_RETRY_AFTER_S, self._executors.pending_compute_s)
        if self._is_draining:
            return Refuse(
                RefuseCode.DRAINING,
                f"worker {self._worker_id} is stopping",
                retry_after_s=MIN_RETRY_AFTER_S,
            )
        plan = examine(open_, token_ids, self._terms)
        if isinstance(plan, Refuse):
            return plan
        if len(self._sessions) >= self._config.max_sessions:
            return Refuse(
                RefuseCode.BUSY,
                f"worker {self._worker_id} has {len(self._sessions)} sessions open, its most",
                retry_after_s=retry_after_s,
            )
        try:
            self._budget.reserve(session_id.hex(), plan.need)
        except NoMemory as error:
            return Refuse(
                RefuseCode.NO_MEMORY,
                str(error),
                expected=str(error.free_bytes),
                actual=str(error.needed_bytes),
                retry_after_s=retry_after_s if error.can_ever_fit else 0.0,
            )
        return plan

    async def _serve(
        self,
        incoming: Message,
        open_: Open,
        token_ids: tuple[int, ...],
        session_id: bytes,
        plan: SessionPlan,
        accepted_s: float,
    ) -> None:
        name = session_id.hex()
        release = partial(self._budget.release, name)
        subscriptions: list[Subscription] = []
        try:
            session = self._new_session(open_, token_ids, session_id, plan, accepted_s, release)
            self._sessions[session_id] = session
            for transport, subject in (
                (self._data, data_subject),
                (self._control, control_subject),
            ):
                subscriptions.append(
                    await transport.subscribe(
                        subject(self._config.tenant, self._worker_id, session_id),
                        partial(_feed, session),
                    )
                )
            await self._reply(incoming, session.accept_frame())
            await session.run()
        except TransportError as error:
            # No subscription, no session: the agent's request times out, and it asks again.
            log.warning(Event.BROKER_ERROR, session_id=name, reason=str(error))
        finally:
            self._sessions.pop(session_id, None)
            release()
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def _new_session(
        self,
        open_: Open,
        token_ids: tuple[int, ...],
        session_id: bytes,
        plan: SessionPlan,
        accepted_s: float,
        release: Callable[[], None],
    ) -> WorkerSession:
        accept = Accept(
            worker=self._worker_id,
            window_bytes=plan.window_bytes,
            segment_bytes=self._config.segment_bytes,
            speeds=self._speeds_now(),
            queue_delay_s=self._executors.pending_compute_s,
            backend=self._engine.device.type,
        )
        subject = reply_subject(open_.inbox, session_id)

        def make_pipeline(emit: Callable[[PipelineEvent], None]) -> SessionPipeline:
            return SessionPipeline(
                engine=self._engine,
                codec=self._codec,
                executors=self._executors,
                speeds=self._speeds,
                capacity_tokens=plan.capacity_tokens,
                token_ids=token_ids,
                ranges=plan.ranges,
                step_tokens=self._config.prefill_step_tokens,
                deadline_s=accepted_s + open_.deadline_s,
                base_bytes=plan.need.base_bytes,
                emit=emit,
            )

        return WorkerSession(
            context=SessionContext(session_id.hex(), open_, token_ids, accepted_s),
            receiver=ReceiverSession(
                open_,
                accept,
                session=session_id,
                now=accepted_s,
                max_payload=min(self._control.max_payload, self._data.max_payload),
                peer_timeout_s=self._config.session_idle_timeout_s,
            ),
            make_pipeline=make_pipeline,
            evaluator=self._evaluator,
            publish=partial(self._control.publish, subject),
            metrics=self._metrics,
            on_work_ended=release,
        )

    def _speeds_now(self) -> Speeds:
        cost = self._speeds.prefill_cost()
        return Speeds(
            decode_bytes_per_s=self._speeds.slowest_decode_bytes_per_s(),
            prefill_base_s=cost.a_s,
            prefill_slope_s=cost.b_s,
            prefill_call_s=cost.call_s,
        )

    async def _refuse(self, incoming: Message, session_id: bytes, refuse: Refuse) -> None:
        log.info(
            Event.SESSION_REFUSED,
            session_id=session_id.hex(),
            code=refuse.code.value,
            reason=refuse.sentence,
        )
        self._metrics.add(names.WORKER_REFUSALS, 1, refuse.code.value)
        await self._reply(incoming, refusal_frame(session_id, refuse))

    async def _reply(self, incoming: Message, data: bytes) -> None:
        if not incoming.reply:
            return  # not a request: nobody waits for an answer
        try:
            await self._control.publish(incoming.reply, data)
        except TransportError as error:
            # The agent's request times out, and it asks again.
            log.warning(Event.BROKER_ERROR, reason=str(error))


def _feed(session: WorkerSession, incoming: Message) -> None:
    session.receive(incoming.data)
