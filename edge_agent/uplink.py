"""The agent's side of the broker: find a worker, run the session, take over when a worker dies.

Invariants: one deadline covers a whole request, claim and retries included; a worker is found within
``claim_timeout_s`` or the client is told; frames reach their session only. Must not know: HTTP, SQL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from edge_agent.broker import Broker
from edge_agent.chat import AnswerEnd, AnswerRequest
from edge_agent.config import EdgeConfig
from edge_agent.errors import (
    AgentError,
    BadRequest,
    DeadlineExceeded,
    MessageTooLarge,
    ModelMismatch,
    NoWorker,
    TooLong,
    WorkerLost,
    WorkerRefused,
)
from edge_agent.keys import chunk_spans, profile_set_digest
from edge_agent.model import EdgeModel
from edge_agent.planning import Plan, build_plan
from edge_agent.sharing import UplinkShares
from edge_agent.store import ContextStore, StoredContext
from edge_agent.threads import run_in
from edge_agent.timeline import ChunkRecord, Timeline
from edge_agent.transfer import Mailbox, SessionLoop, WorkerSilent
from edge_agent.uplink_history import UplinkHistory
from planner import PlannerError, make_estimator, make_policy
from telemetry import Event, MetricSet, get_logger
from wire import (
    Accept,
    ChunkRange,
    Failed,
    Lane,
    Open,
    PayloadTooLarge,
    Refuse,
    RefuseCode,
    SenderSession,
    WireError,
    control_subject,
    data_subject,
    open_subject,
)
from wire.aio import NoResponders, RequestTimeout, TransportError

RETRY_REFUSED_S = 0.2
"""Pause before another worker is asked when one refused for now: the queue group picks at random."""
CLAIM_EVERY_S = 0.4
"""A claim that nobody answers is made again after this time, with the same session: the queue group may have
given it to a worker that is frozen or cut off. A worker that took it already answers alike."""
MAX_WORKER_CHANGES = 3
"""Workers that may die under one request; the deadline usually ends it earlier."""

_MISMATCH = frozenset(
    {RefuseCode.IDENTITY_MISMATCH, RefuseCode.PROFILE_MISMATCH, RefuseCode.KEY_MISMATCH}
)
_FOR_NOW = frozenset({RefuseCode.NO_MEMORY, RefuseCode.BUSY, RefuseCode.DRAINING})

_log = get_logger("edge_agent")


class Uplink:
    """Runs answers over a transport that may come and go."""

    def __init__(
        self,
        config: EdgeConfig,
        *,
        broker: Broker,
        store: ContextStore,
        metrics: MetricSet,
        disk: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._broker = broker
        self._store = store
        self._metrics = metrics
        self._disk = disk
        self._clock = clock
        self._history = UplinkHistory(store.root)
        self._shares = UplinkShares()
        self._model: EdgeModel | None = None
        self._profile_digest = b""
        self._level_loss: dict[str, float | None] = {}

    def set_model(self, model: EdgeModel) -> None:
        """Learn the model, once it is loaded."""
        self._model = model
        self._profile_digest = profile_set_digest(p.digest for p in model.codec.profiles)
        # fp16 is what the edge computed, rounded once: its loss is below what profiles measure.
        self._level_loss = {
            info.name: 0.0 if info.name == "fp16" and info.kl is None else info.kl
            for info in model.codec.levels()
        }

    @property
    def is_connected(self) -> bool:
        """Whether the broker can be reached now."""
        return self._broker.is_connected

    async def answer(self, request: AnswerRequest, on_token: Callable[[int], bool]) -> AnswerEnd:
        """Get the context to a worker and the answer back.

        Raises:
            AgentError: one sentence on why there is no answer.
        """
        try:
            policy = make_policy(request.policy)
            make_estimator(request.estimator)
        except PlannerError as error:
            raise BadRequest(f"kvtide: {error}") from error
        timeline = Timeline(
            arrived_at=request.arrived_at,
            session=request.session,
            policy=policy.name,
            estimator=request.estimator,
            deadline_s=request.deadline_s,
        )
        request = self._with_context(request)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + (request.give_up_at - self._clock())
        try:
            async with asyncio.timeout_at(give_up_at):
                return await self._answer(request, timeline, on_token)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no complete answer within {self._config.request_timeout_s:g} s"
            ) from error

    async def _answer(
        self, request: AnswerRequest, timeline: Timeline, on_token: Callable[[int], bool]
    ) -> AnswerEnd:
        session_id = bytes.fromhex(request.session)
        while True:
            try:
                with self._broker.mailbox(session_id) as mailbox:
                    finish_reason = await self._one_worker(
                        request, session_id, timeline, mailbox, on_token
                    )
                self._add_exact_text(timeline)
                return AnswerEnd(finish_reason, timeline)
            except WorkerSilent as error:
                _log.warning(Event.WORKER_LOST, session_id=request.session, worker=timeline.worker)
                timeline.worker_changes += 1
                if timeline.worker_changes > MAX_WORKER_CHANGES:
                    raise WorkerLost(str(error)) from error
                # A fresh id: frames of the lost worker, should it come back, find no session.
                session_id = _next_session_id(session_id)

    async def _one_worker(
        self,
        request: AnswerRequest,
        session_id: bytes,
        timeline: Timeline,
        mailbox: Mailbox,
        on_token: Callable[[int], bool],
    ) -> str:
        context = request.context
        sizes = (
            [] if context is None else await run_in(self._disk, self._store.chunk_sizes, context)
        )
        session, accept = await self._claim(request, session_id, sizes)
        accepted_at = self._clock()
        timeline.worker, timeline.backend = accept.worker, accept.backend
        timeline.claimed_s = timeline.since_arrival(accepted_at)
        plan = self._plan(request, sizes, accept, accepted_at)
        held = {have.chunk: have.level for have in accept.have}
        timeline.chunks = [
            ChunkRecord(
                chunk.index,
                chunk.span.token_start,
                chunk.span.token_stop,
                choice="have" if chunk.index in held else "",
            )
            for chunk in plan.chunks
        ]
        subjects = {
            Lane.DATA: data_subject(self._config.tenant, accept.worker, session_id),
            Lane.CONTROL: control_subject(self._config.tenant, accept.worker, session_id),
        }

        async def publish(lane: Lane, data: bytes) -> None:
            await self._broker.publish(lane, subjects[lane], data)

        loop = SessionLoop(
            session=session,
            request=request,
            plan=plan,
            # Both learn during a session; another worker starts with fresh ones, and what the
            # estimator learned about the uplink stays with the site.
            policy=make_policy(request.policy),
            estimator=make_estimator(request.estimator, site=self._history.site),
            timeline=timeline,
            mailbox=mailbox,
            publish=publish,
            store=self._store,
            disk=self._disk,
            metrics=self._metrics,
            on_token=on_token,
            shares=self._shares,
            clock=self._clock,
        )
        try:
            return await loop.run()
        except TransportError as error:
            raise NoWorker(f"the connection to the broker failed: {error}") from error
        except PayloadTooLarge as error:
            raise MessageTooLarge(f"the question does not fit in one message: {error}") from error
        finally:
            # Read here: other requests teach the site on this thread while the file is written.
            await run_in(self._disk, self._history.write, self._history.snapshot())

    async def _claim(
        self,
        request: AnswerRequest,
        session_id: bytes,
        sizes: list[dict[str, int]],
    ) -> tuple[SenderSession, Accept]:
        """Ask the queue group for a worker until one accepts or the time to claim is over.

        A worker that has taken the session and whose answer came too late is left with it; hearing nothing more,
        it lets go of its memory after its own idle timeout.
        """
        subject = open_subject(self._config.tenant)
        give_up_at = self._clock() + self._config.claim_timeout_s
        refusal: Refuse | None = None
        while (left_s := give_up_at - self._clock()) > 0:
            session = self._session(request, session_id, sizes)
            try:
                wait_s = min(CLAIM_EVERY_S, left_s)
                reply = await self._broker.request(subject, session.open_frame(), timeout_s=wait_s)
                session.receive(reply, now=self._clock())
            # A denied permission looks like silence, but for what the broker says on the side.
            except NoResponders as error:
                raise NoWorker(
                    self._broker.failure
                    or f"no worker serves tenant {self._config.tenant!r} at this broker"
                ) from error
            except RequestTimeout as error:
                if self._broker.failure:
                    raise NoWorker(self._broker.failure) from error
                continue
            except TransportError as error:
                raise NoWorker(f"the broker cannot be reached: {error}") from error
            except WireError as error:
                raise WorkerLost(f"a worker answered with something else: {error}") from error
            event = session.next_event()
            if isinstance(event, Accept):
                return session, event
            if not isinstance(event, Refuse):
                said = event.sentence if isinstance(event, Failed) else "no answer"
                raise WorkerLost(f"a worker answered with something else: {said}")
            refusal = event
            if event.code not in _FOR_NOW:
                raise _refused(event)
            await asyncio.sleep(min(RETRY_REFUSED_S, max(0.0, give_up_at - self._clock())))
        if refusal is None:
            raise NoWorker(f"no worker answered within {self._config.claim_timeout_s:g} s")
        raise _refused(refusal)

    def _session(
        self,
        request: AnswerRequest,
        session_id: bytes,
        sizes: list[dict[str, int]],
    ) -> SenderSession:
        assert self._model is not None
        context = request.context
        spans = () if context is None else context.spans
        now = self._clock()
        opening = Open(
            tenant=self._config.tenant,
            inbox=self._broker.inbox,
            model_name=self._config.model,
            model_digest=self._model.engine.identity.digest,
            profile_digest=self._profile_digest,
            chunks=tuple(ChunkRange(s.token_start, s.token_stop, s.key) for s in spans),
            max_chunk_bytes=max((n for entry in sizes for n in entry.values()), default=1),
            question_tokens=len(request.question_ids),
            max_tokens=request.max_tokens,
            deadline_s=max(0.0, request.arrived_at + request.deadline_s - now),
            evaluate=request.evaluate,
        )
        try:
            return SenderSession(
                opening,
                () if context is None else context.token_ids,
                session=session_id,
                now=now,
                max_payload=self._broker.max_payload,
                peer_timeout_s=self._config.silence_timeout_s,
            )
        except PayloadTooLarge as error:
            raise MessageTooLarge(f"the context does not fit in one message: {error}") from error

    def _with_context(self, request: AnswerRequest) -> AnswerRequest:
        """Give a plain chat a context that was never stored: its tokens, to be recomputed.

        The protocol knows contexts only. All but the last token become one, with text as the only
        choice of each chunk.
        """
        if request.context is not None:
            return request
        assert self._model is not None
        ids = request.question_ids
        context = StoredContext(
            context_id="",
            tenant=self._config.tenant,
            model_digest=self._model.engine.identity.digest,
            profile_digest=self._profile_digest,
            text_digest=b"",
            text_chars=0,
            token_ids=ids[:-1],
            spans=chunk_spans(
                ids[:-1],
                chunk_tokens=self._config.chunk_tokens,
                model_digest=self._model.engine.identity.digest,
                profile_digest=self._profile_digest,
                tenant=self._config.tenant,
            ),
            created_at=0.0,
        )
        return replace(request, context=context, question_ids=ids[-1:], policy="text")

    def _add_exact_text(self, timeline: Timeline) -> None:
        if timeline.evaluation is not None and self._model is not None:
            ids = timeline.evaluation["exact_token_ids"]
            timeline.evaluation["exact_text"] = self._model.engine.tokenizer.decode(ids)

    def _plan(
        self,
        request: AnswerRequest,
        sizes: list[dict[str, int]],
        accept: Accept,
        accepted_at: float,
    ) -> Plan:
        assert self._model is not None
        return build_plan(
            spans=() if request.context is None else request.context.spans,
            sizes=sizes,
            level_loss=self._level_loss,
            accept=accept,
            kv_bytes_per_token=self._model.engine.geometry.num_bytes_per_token(2),
            question_tokens=len(request.question_ids),
            deadline_s=request.deadline_s,
            arrived_at=request.arrived_at,
            accepted_at=accepted_at,
        )


def _refused(refuse: Refuse) -> AgentError:
    """Turn a refusal into the error that the client sees; the worker's sentence names both sides."""
    if refuse.code in _MISMATCH:
        return ModelMismatch(f"the worker refused the context: {refuse.sentence}")
    if refuse.code is RefuseCode.CONTEXT_TOO_LONG:
        return TooLong(f"the worker refused the request: {refuse.sentence}")
    if refuse.code is RefuseCode.BAD_REQUEST:
        return BadRequest(f"the worker refused the request: {refuse.sentence}")
    return WorkerRefused(f"no worker takes the request now: {refuse.sentence}")


def _next_session_id(session_id: bytes) -> bytes:
    number = (int.from_bytes(session_id) + 1) % (1 << (8 * len(session_id)))
    return number.to_bytes(len(session_id))
