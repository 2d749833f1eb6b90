"""One session with one worker: the loop between wire, planner and store.

Frames in, events out, frames to send, timer: the protocol's rules are in ``wire``, the choices in
``planner``. Invariant: whatever ends the session (answer, error, cancel) the worker is told, unless
it is the one that is gone. Must not know: NATS, HTTP, how a worker is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Protocol, runtime_checkable

from edge_agent.chat import AnswerRequest
from edge_agent.errors import BadRequest, CorruptChunk, DeadlineRefused, WorkerLost
from edge_agent.planning import Plan, TrackedChunk
from edge_agent.sharing import UplinkShares
from edge_agent.store import ContextStore
from edge_agent.threads import run_in
from edge_agent.timeline import Timeline
from planner import (
    Decision,
    DeliverySample,
    Estimator,
    LevelUnavailable,
    Policy,
    Stage,
    TransferState,
)
from planner.log import decision_record
from telemetry import Event, MetricSet, get_logger, level_label, names
from wire import (
    Answered,
    Ask,
    ChunkBad,
    ChunkReady,
    ChunkSent,
    Delivered,
    Done,
    Failed,
    Lane,
    OutgoingChunk,
    PeerLost,
    PeerSilent,
    SenderSession,
    Token,
    WireError,
    bitstream_digest,
)
from wire.aio import TransportError

READ_AHEAD_S = 0.1
"""A chunk is chosen this long before the link would run dry: reading and checking 5 MB took 30-90 ms on
two busy cores. Longer would decide on an older estimate. Unit: seconds."""
RECONSIDER_EVERY_S = 0.05
"""Least time between two looks at what is in flight: a plan takes 1 ms. Unit: seconds."""
SILENCE_CHECK_S = 0.1
"""How often overdue acknowledgements are looked at. Unit: seconds."""

_log = get_logger("edge_agent")


class WorkerSilent(WorkerLost):
    """The worker went silent before its first token; another one may take over."""


@runtime_checkable
class Reconsidering(Protocol):
    """A policy that may change its mind while a chunk is in flight."""

    def reconsider(self, state: TransferState, estimator: Estimator, now: float) -> Decision | None:
        """Return a text order or an abandonment, or None to go on."""


class Mailbox:
    """Frames from the worker, and a bell for everything that the loop should look at."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.connection_changes: deque[bool] = deque()
        self.bell = asyncio.Event()

    def deliver(self, frame: bytes) -> None:
        """Take in a frame from the transport."""
        self.frames.append(frame)
        self.bell.set()

    def connection_changed(self, *, is_up: bool) -> None:
        """Take in that the broker went away or came back."""
        self.connection_changes.append(is_up)
        self.bell.set()


Publish = Callable[[Lane, bytes], Awaitable[None]]


class SessionLoop:
    """Runs an accepted session to its end."""

    def __init__(
        self,
        *,
        session: SenderSession,
        request: AnswerRequest,
        plan: Plan,
        policy: Policy,
        estimator: Estimator,
        timeline: Timeline,
        mailbox: Mailbox,
        publish: Publish,
        store: ContextStore,
        disk: Executor,
        metrics: MetricSet,
        on_token: Callable[[int], bool],
        shares: UplinkShares,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over a session that a worker has accepted.

        Args:
            session: in state SENDING.
            request: what is asked.
            plan: the chunks and their choices.
            policy: for this request alone.
            estimator: for this request alone.
            timeline: where times are recorded.
            mailbox: frames for this session.
            publish: sends one frame on a lane.
            store: where bitstreams come from.
            disk: threads for reading them.
            metrics: the agent's metrics.
            on_token: called with each answer token; False ends the answer.
            shares: the sessions that share this uplink.
            clock: monotonic seconds.
        """
        self._session = session
        self._request = request
        self._plan = plan
        self._policy = policy
        self._estimator = estimator
        self._timeline = timeline
        self._mailbox = mailbox
        self._publish = publish
        self._store = store
        self._disk = disk
        self._metrics = metrics
        self._on_token = on_token
        self._shares = shares
        self._clock = clock
        self._loading: asyncio.Task[None] | None = None
        self._has_news = False
        self._reconsidered_at = 0.0
        self._finish_reason: str | None = None
        # The worker's clock starts when it accepts; the earliest arrival of any of its times bounds
        # that moment from above, to within the one-way delay.
        self._accepted_at = plan.accepted_at
        self._worker_times: list[Callable[[], None]] = []

    async def run(self) -> str:
        """Send, wait and read until the answer is complete.

        Returns:
            Why the answer ended: stop or length.

        Raises:
            WorkerSilent: the worker is gone; what it had is lost, nothing was answered yet.
            WorkerLost: the worker failed, or went silent after its first token.
            BadRequest: the policy cannot work with what is stored.
            DeadlineRefused: the deadline was asked for or nothing, and it cannot be met.
        """
        session, request = self._session, self._request
        try:
            now = self._clock()
            state = self._plan.state(bytes_in_flight=0, now=now)
            self._shares.enter(
                request.session, session, state, self._estimator, is_strict=request.strict, now=now
            )
        except DeadlineRefused:
            await self._close("the deadline cannot be met")
            raise
        reason = "the request ended"
        try:
            self._ask()
            while True:
                self._mailbox.bell.clear()
                self._read_frames()
                if self._take_events():
                    break
                self._finish_load()
                self._begin_chunks()
                await self._send()
                await self._wait()
            return self._finish_reason or "stop"
        except asyncio.CancelledError:
            reason = "the client is gone"
            raise
        finally:
            self._shares.leave(request.session)
            self._estimator.on_end(now=self._clock())
            if self._loading is not None:
                self._loading.cancel()
                await asyncio.gather(self._loading, return_exceptions=True)
            await self._close(reason)

    def _ask(self) -> None:
        request = self._request
        self._session.ask(
            Ask(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                evaluate=request.evaluate,
            ),
            request.question_ids,
            now=self._clock(),
        )
        self._timeline.question_sent_s = self._timeline.since_arrival(self._clock())

    async def _close(self, reason: str) -> None:
        session = self._session
        session.cancel(reason, now=self._clock())
        # Whatever ended the session is what the caller has to hear, not that the broker is gone too.
        with contextlib.suppress(TransportError):
            await self._send()
        for settle in self._worker_times:
            settle()
        self._timeline.num_payload_bytes += session.num_bytes_sent
        self._timeline.num_resent_bytes += session.num_bytes_resent

    def _read_frames(self) -> None:
        session, mailbox = self._session, self._mailbox
        while mailbox.connection_changes:
            session.on_connection(is_up=mailbox.connection_changes.popleft(), now=self._clock())
        while mailbox.frames:
            try:
                session.receive(mailbox.frames.popleft(), now=self._clock())
            except WireError as error:
                # A frame that is not ours or came damaged leaves the session as it was; what it
                # carried comes again.
                _log.debug(Event.BROKER_ERROR, session_id=self._timeline.session, error=str(error))
        now = self._clock()
        timer = session.next_timer()
        if timer is not None and timer <= now:
            session.handle_timer(now=now)

    def _take_events(self) -> bool:
        """Act on everything that happened; return True when the session is over."""
        while (event := self._session.next_event()) is not None:
            now = self._clock()
            match event:
                case Delivered(sample):
                    self._has_news = True
                    self._estimator.on_delivery(
                        DeliverySample(
                            bytes=sample.bytes,
                            interval_s=sample.interval_s,
                            delivered_at_s=sample.delivered_at_s,
                            rtt_s=sample.rtt_s,
                            window_limited=sample.window_limited,
                            sender_limited=sample.sender_limited,
                        )
                    )
                    self._timeline.delivered(sample.delivered_at_s, sample.bytes_per_s)
                case ChunkSent():
                    self._chunk_sent(event)
                case ChunkReady():
                    self._chunk_ready(event, now)
                case ChunkBad():
                    self._chunk_bad(event)
                case Token():
                    self._note_worker_time(event.at_s, now)
                    self._timeline.token(now)
                    if not self._on_token(event.token_id):
                        self._finish_reason = "stop"
                        return True
                case Answered():
                    self._answered(event)
                case Done():
                    if event.evaluation is not None:
                        self._timeline.evaluation = {
                            "kl": event.evaluation.kl,
                            "top1": event.evaluation.top1,
                            "greedy_match": event.evaluation.greedy_match,
                            "exact_token_ids": list(event.evaluation.exact_token_ids),
                        }
                    return True
                case Failed():
                    raise WorkerLost(
                        f"worker {self._timeline.worker} gave the session up: {event.sentence}"
                    )
                case PeerSilent() if self._timeline.first_token_s is None:
                    # Nothing was answered yet: another worker can start from our own store.
                    raise WorkerSilent(self._silence())
                case PeerSilent():
                    _log.warning(
                        Event.WORKER_LOST,
                        session_id=self._timeline.session,
                        worker=self._timeline.worker,
                    )
                case PeerLost():
                    raise WorkerLost(self._silence())
                case _:
                    pass
        return False

    def _silence(self) -> str:
        self._metrics.add(names.EDGE_WORKER_LOSSES)
        return f"worker {self._timeline.worker} went silent in the middle of the session"

    def _chunk_sent(self, event: ChunkSent) -> None:
        chunk = self._plan.chunks[event.chunk]
        record = self._timeline.chunks[event.chunk]
        if chunk.epoch != event.epoch:
            return
        if chunk.stage is Stage.IN_FLIGHT:
            chunk.stage = Stage.ARRIVED
        chunk.bytes_acked = chunk.bytes_sent = event.num_bytes
        record.send_start_s = self._timeline.since_arrival(event.started_at_s)
        record.acked_s = self._timeline.since_arrival(event.finished_at_s)

    def _chunk_ready(self, event: ChunkReady, now: float) -> None:
        chunk = self._plan.chunks[event.chunk]
        record = self._timeline.chunks[event.chunk]
        self._note_worker_time(event.end_s, now)
        if self._session.progress(chunk.index) is not None and event.epoch < chunk.epoch:
            # An attempt that was given up came through; the newer one would be thrown away.
            self._session.abort(chunk.index, now=now)
        chunk.stage = Stage.READY
        if record.choice != event.level:
            record.choice, record.num_bytes = event.level, chunk.sizes.get(event.level, 0)
        record.epoch = event.epoch
        self._has_news = True
        self._plan.measured(chunk, level=event.level, seconds=event.end_s - event.start_s)

        def settle() -> None:
            record.decode_start_s = self._from_worker(event.start_s)
            record.decode_end_s = record.ready_s = self._from_worker(event.end_s)

        self._worker_times.append(settle)

    def _chunk_bad(self, event: ChunkBad) -> None:
        """Send a chunk another way: what arrived whole and does not decode, will not the next time."""
        chunk = self._plan.chunks[event.chunk]
        if chunk.epoch != event.epoch or chunk.choice is None:
            return
        _log.warning(
            Event.CHUNK_QUARANTINED,
            session_id=self._timeline.session,
            chunk_id=event.chunk,
            level=chunk.choice.name,
            error=event.sentence,
        )
        self._plan.drop_level(event.chunk, chunk.choice.name)
        chunk.stage, chunk.choice = Stage.MISSING, None

    def _answered(self, event: Answered) -> None:
        self._finish_reason = event.finish_reason

        def settle() -> None:
            self._timeline.prefill_start_s = self._from_worker(event.prefill_start_s)
            self._timeline.prefill_end_s = self._from_worker(event.prefill_end_s)

        self._worker_times.append(settle)

    def _note_worker_time(self, worker_s: float, now: float) -> None:
        self._accepted_at = min(self._accepted_at, now - worker_s)

    def _from_worker(self, worker_s: float) -> float:
        return self._timeline.since_arrival(self._accepted_at + worker_s)

    # Planning

    def _begin_chunks(self) -> None:
        """Ask the policy for as long as it has something to begin."""
        now = self._clock()
        session = self._session
        oldest_age_s = session.oldest_age_s(now=now)
        self._estimator.on_waiting(
            bytes_in_flight=session.bytes_in_flight, oldest_age_s=oldest_age_s, now=now
        )
        self._has_news = self._has_news or oldest_age_s >= SILENCE_CHECK_S
        for chunk in self._plan.chunks:
            progress = session.progress(chunk.index)
            if progress is not None:
                chunk.bytes_acked, chunk.bytes_sent = progress
        # One bitstream is read at a time; its bytes count as on their way already.
        while self._loading is None:
            wants_chunk = session.wants_chunk or self._is_nearly_sent()
            state = self._plan.state(bytes_in_flight=session.bytes_in_flight, now=now)
            self._shares.update(self._request.session, state, now=now)
            decision = self._decide(state, now, wants_chunk=wants_chunk)
            if decision is None:
                return
            record = decision_record(decision, state)
            self._timeline.decisions.append(record)
            _log.debug(Event.DECISION, session_id=self._timeline.session, decision=record)
            self._carry_out(decision, now)

    def _is_nearly_sent(self) -> bool:
        """Whether all that was begun will be out before another chunk could be read from the disk.

        A chunk that waits for its turn counts whole: choosing yet another one that early would rest on
        an old estimate and take it away from the engine.
        """
        sending = [
            chunk
            for chunk in self._plan.chunks
            if chunk.stage is Stage.IN_FLIGHT
            and chunk.choice is not None
            and not chunk.choice.is_text
        ]
        rate = self._session.meter.rate_bytes_per_s
        if not sending or rate is None:
            return False
        unsent = sum(c.choice.num_bytes - c.bytes_sent for c in sending if c.choice is not None)
        return unsent < rate * READ_AHEAD_S

    def _decide(self, state: TransferState, now: float, *, wants_chunk: bool) -> Decision | None:
        try:
            if wants_chunk:
                return self._policy.next_decision(state, self._estimator, now)
            is_due = now - self._reconsidered_at >= RECONSIDER_EVERY_S
            if self._has_news and is_due and isinstance(self._policy, Reconsidering):
                decision = self._policy.reconsider(state, self._estimator, now)
                if decision is None:
                    self._has_news, self._reconsidered_at = False, now
                return decision
        except LevelUnavailable as error:
            # A level that was asked for and is damaged is replaced by the text, which is exact.
            fallback = self._plan.fall_back(error.chunk_index)
            if fallback is None:
                raise BadRequest(f"policy {self._request.policy!r}: {error}") from error
            return fallback
        return None

    def _carry_out(self, decision: Decision, now: float) -> None:
        chunk = self._plan.chunks[decision.chunk_index]
        record = self._timeline.chunks[chunk.index]
        choice = decision.choice
        if decision.abandons and chunk.choice is not None:
            if self._session.progress(chunk.index) is not None:
                self._session.abort(chunk.index, now=now)
            self._metrics.add(names.EDGE_ABANDONED_CHUNKS, 1, level_label(chunk.choice.name))
        chunk.choice, chunk.stage, chunk.begun_s = choice, Stage.IN_FLIGHT, now
        chunk.bytes_acked = chunk.bytes_sent = 0
        record.choice, record.num_bytes = choice.name, choice.num_bytes
        record.send_start_s, record.acked_s = self._timeline.since_arrival(now), None
        if choice.is_text:
            chunk.epoch = self._session.recompute(chunk.index, now=now)
            record.epoch = chunk.epoch
        else:
            self._loading = asyncio.create_task(self._load(chunk))
            self._loading.add_done_callback(lambda _: self._mailbox.bell.set())

    async def _load(self, chunk: TrackedChunk) -> None:
        """Read a bitstream and hand it to the session."""
        assert chunk.choice is not None
        level = chunk.choice.name
        try:
            payload, digest = await run_in(self._disk, self._read, chunk.span.key, level)
        except CorruptChunk as error:
            # The store dropped the file; the policy has one choice less.
            _log.warning(
                Event.CHUNK_QUARANTINED,
                session_id=self._timeline.session,
                chunk_id=chunk.index,
                level=level,
                error=str(error),
            )
            self._metrics.add(names.EDGE_CORRUPT_CHUNKS, 1, level_label(level))
            self._plan.drop_level(chunk.index, level)
            if chunk.stage is Stage.IN_FLIGHT:
                chunk.stage, chunk.choice = Stage.MISSING, None
        else:
            if chunk.stage is not Stage.IN_FLIGHT:
                # An earlier attempt came through while this one was read.
                return
            chunk.epoch = self._session.offer(
                OutgoingChunk(chunk=chunk.index, level=level, payload=payload, digest=digest),
                now=self._clock(),
            )
            self._timeline.chunks[chunk.index].epoch = chunk.epoch

    def _finish_load(self) -> None:
        if self._loading is not None and self._loading.done():
            done, self._loading = self._loading, None
            done.result()

    def _read(self, key: bytes, level: str) -> tuple[bytes, bytes]:
        payload = self._store.read_chunk(key, level)
        return payload, bitstream_digest(payload)

    # Moving

    async def _send(self) -> None:
        for frame in self._session.frames_to_send(now=self._clock()):
            await self._publish(frame.lane, frame.data)

    async def _wait(self) -> None:
        """Sleep until a frame, a finished read, a change of the connection, or the session's timer."""
        timer = self._session.next_timer()
        timeout_s = None if timer is None else max(0.0, timer - self._clock())
        if self._timeline.first_token_s is None and self._session.bytes_in_flight > 0:
            # Silence is news to the planner, and nothing rings for it.
            timeout_s = SILENCE_CHECK_S if timeout_s is None else min(timeout_s, SILENCE_CHECK_S)
        try:
            async with asyncio.timeout(timeout_s):
                await self._mailbox.bell.wait()
        except TimeoutError:
            pass
