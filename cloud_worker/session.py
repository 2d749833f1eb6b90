"""One session's shell: frames in, work, frames out.

The protocol is `wire.ReceiverSession`'s, the work is `SessionPipeline`'s; here they are joined, timed and
counted. Invariant: however a session ends, its work has stopped and its memory is free before
``run`` returns, and the agent was told why if it can still be told anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cloud_worker.errors import NoMemory
from cloud_worker.evaluation import Evaluator
from cloud_worker.pipeline import (
    TEXT_LEVEL,
    AnswerDone,
    AnswerToken,
    ChunkReady,
    ChunkUnusable,
    PipelineEvent,
    Question,
    SessionPipeline,
)
from engine import EngineError, Sampling
from telemetry import Event, MetricSet, get_logger, level_label, names
from wire import (
    Abort,
    Answered,
    Asked,
    Cancel,
    ChunkBad,
    ChunkComplete,
    ChunkKind,
    ChunkReady as ChunkReadyMessage,
    Done,
    EvaluationResult,
    FailCode,
    Failed,
    FrameError,
    Open,
    PeerLost,
    ReceiverSession,
    Recompute,
    Token,
)
from wire.aio import TransportError

MAX_BAD_PER_CHUNK = 3
"""Attempts at one chunk that may be unusable; one more ends the session, for then it is not the link."""

log = get_logger("cloud_worker")


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What a session is about."""

    session_id: str
    open_: Open
    token_ids: tuple[int, ...]
    accepted_s: float
    """``time.monotonic`` when it was accepted; the agent's times count from here."""


class WorkerSession:
    """Runs one session from its acceptance to its end."""

    def __init__(
        self,
        *,
        context: SessionContext,
        receiver: ReceiverSession,
        make_pipeline: Callable[[Callable[[PipelineEvent], None]], SessionPipeline],
        evaluator: Evaluator | None,
        publish: Callable[[bytes], Awaitable[None]],
        metrics: MetricSet,
        on_work_ended: Callable[[], None],
    ) -> None:
        """Prepare a session.

        Args:
            context: what it is about.
            receiver: its protocol state, accepted.
            make_pipeline: builds its pipeline, given where events go.
            evaluator: None where evaluations are turned off.
            publish: sends a frame to the agent.
            metrics: where it is counted.
            on_work_ended: called when its memory is free, before the last frames are acknowledged.
        """
        self._context = context
        self._receiver = receiver
        self._pipeline = make_pipeline(self._on_pipeline_event)
        self._evaluator = evaluator
        self._publish = publish
        self._metrics = metrics
        self._on_work_ended = on_work_ended
        self._wake = asyncio.Event()
        self._question: Question | None = None
        self._wants_evaluation = False
        self._held: set[tuple[int, int, int]] = set()
        """(chunk, part, epoch) of whole bitstreams that wait or are being decoded."""
        self._bad_counts: dict[int, int] = {}
        self._ready_levels: dict[int, str] = {}
        self._ttft_s: float | None = None
        self._outcome = "failed"
        self._reason = ""
        self._work_task: asyncio.Task[None] | None = None

    # What the worker calls, all on the event loop's thread.

    def accept_frame(self) -> bytes:
        """The reply to the opening."""
        return self._receiver.accept_frame()

    def receive(self, data: bytes) -> None:
        """Take in a message from either connection."""
        try:
            self._receiver.receive(data, now=time.monotonic())
        except FrameError as error:
            # Damaged on its way, or not ours: it will be sent again, or never was.
            log.debug(Event.BROKER_ERROR, session_id=self._context.session_id, reason=str(error))
        self._wake.set()

    def on_connection(self, *, is_up: bool) -> None:
        """Take in that the broker went away or came back."""
        self._receiver.on_connection(is_up=is_up, now=time.monotonic())
        self._wake.set()

    def fail(self, code: FailCode, sentence: str) -> None:
        """Give the session up and tell the agent."""
        if not self._receiver.is_over:
            self._reason = f"{code}: {sentence}"
            self._receiver.fail(Failed(code, sentence), now=time.monotonic())
        self._stop_work()
        self._wake.set()

    async def run(self) -> None:
        """Serve until the session is over and the agent knows."""
        log.info(
            Event.SESSION_OPENED,
            session_id=self._context.session_id,
            tokens=len(self._context.token_ids),
            chunks=len(self._context.open_.chunks),
            deadline_s=self._context.open_.deadline_s,
        )
        self._work_task = asyncio.create_task(self._work())
        self._work_task.add_done_callback(lambda _: self._wake.set())
        try:
            await self._speak(self._work_task)
        finally:
            self._stop_work()
            await asyncio.wait({self._work_task})
            self._metrics.add(names.WORKER_SESSIONS, 1, self._outcome)
            self._log_done()

    async def _speak(self, work: asyncio.Task[None]) -> None:
        """The wire's loop: events, frames, timers, until nothing is owed to the agent."""
        receiver = self._receiver
        while True:
            self._wake.clear()
            now = time.monotonic()
            timer = receiver.next_timer()
            if timer is not None and timer <= now:
                receiver.handle_timer(now=now)
            while (event := receiver.next_event()) is not None:
                self._on_wire_event(event, now)
            for outgoing in receiver.frames_to_send(now=now):
                # What is lost while the broker is away is sent again by the protocol.
                with contextlib.suppress(TransportError):
                    await self._publish(outgoing.data)
            if work.done() and receiver.is_closed(now=time.monotonic()):
                return
            timer = receiver.next_timer()
            delay_s = None if timer is None else max(0.0, timer - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()

    def _stop_work(self) -> None:
        if self._work_task is not None:
            self._work_task.cancel()

    # The agent speaks.

    def _on_wire_event(self, event: object, now: float) -> None:
        match event:
            case ChunkComplete():
                self._on_chunk(event, now)
            case ChunkBad():
                self._metrics.add(names.WORKER_CORRUPT_CHUNKS, 1, "other")
                if not event.part:
                    self._count_bad(event.chunk, event.sentence)
            case Recompute():
                self._pipeline.text_ordered(event.chunk, event.epoch, now=now)
                self._free_dropped(now)
            case Abort():
                if event.part:
                    self._pipeline.refinement_aborted(event.chunk, event.part, event.epoch)
                else:
                    self._pipeline.aborted(event.chunk, event.epoch)
                self._free_dropped(now)
            case Asked():
                self._on_question(event)
            case Cancel():
                self._outcome, self._reason = "cancelled", event.reason
                self._stop_work()
            case Failed():
                self._reason = f"{event.code}: {event.sentence}"
                self._stop_work()
            case PeerLost():
                self._outcome = "timeout"
                self._reason = f"the agent was silent for {event.silent_s:.1f} s"
                self._stop_work()
            case _:  # PeerSilent and PeerBack: the agent decides what its silence means
                pass

    def _on_chunk(self, event: ChunkComplete, now: float) -> None:
        sentence = ""
        is_refinement = event.kind is ChunkKind.REFINEMENT
        if is_refinement != bool(event.part):
            sentence = f"part {event.part} of a chunk is not its {event.kind.value}"
        elif event.level == TEXT_LEVEL:
            sentence = "text is ordered and not sent as a bitstream"
        if sentence:
            self._receiver.reject(
                event.chunk, epoch=event.epoch, part=event.part, sentence=sentence, now=now
            )
            return
        self._metrics.add(names.WORKER_RECEIVED_BYTES, len(event.payload), level_label(event.level))
        self._held.add((event.chunk, event.part, event.epoch))
        if is_refinement:
            self._pipeline.refinement_arrived(
                event.chunk, event.part, event.epoch, event.level, event.payload, now=now
            )
        else:
            self._pipeline.bitstream_arrived(
                event.chunk, event.epoch, event.level, event.payload, now=now
            )
        self._free_dropped(now)

    def _on_question(self, event: Asked) -> None:
        ask, open_ = event.ask, self._context.open_
        if not 1 <= len(event.token_ids) <= open_.question_tokens:
            self.fail(
                FailCode.PROTOCOL,
                f"the question has {len(event.token_ids)} tokens, announced were "
                f"{open_.question_tokens}",
            )
            return
        if not 1 <= ask.max_tokens <= open_.max_tokens:
            self.fail(
                FailCode.PROTOCOL,
                f"max_tokens is {ask.max_tokens}, announced were {open_.max_tokens}",
            )
            return
        try:
            sampling = Sampling(ask.temperature, ask.top_p, ask.seed)
        except ValueError as error:
            self.fail(FailCode.PROTOCOL, str(error))
            return
        self._wants_evaluation = ask.evaluate
        self._question = Question(event.token_ids, sampling, ask.max_tokens)
        self._pipeline.question_arrived(self._question)

    def _free_dropped(self, now: float) -> None:
        """Give credit back for bitstreams that the pipeline has no use for any more."""
        dropped = {held for held in self._held if not self._pipeline.holds(*held)}
        for chunk, part, epoch in dropped:
            self._receiver.consumed(chunk, part=part, epoch=epoch, now=now)
        self._held -= dropped

    def _count_bad(self, chunk: int, sentence: str) -> None:
        self._bad_counts[chunk] = self._bad_counts.get(chunk, 0) + 1
        log.warning(
            Event.CHUNK_CORRUPT,
            session_id=self._context.session_id,
            chunk_id=chunk,
            reason=sentence,
        )
        if self._bad_counts[chunk] > MAX_BAD_PER_CHUNK:
            self.fail(
                FailCode.CORRUPT_CHUNK,
                f"chunk {chunk} was unusable {self._bad_counts[chunk]} times: {sentence}",
            )

    # The pipeline speaks.

    def _on_pipeline_event(self, event: PipelineEvent) -> None:
        now = time.monotonic()
        if not self._receiver.is_over:
            match event:
                case ChunkReady():
                    self._on_ready(event, now)
                case ChunkUnusable():
                    self._metrics.add(names.WORKER_CORRUPT_CHUNKS, 1, level_label(event.level))
                    self._held.discard((event.chunk, event.part, event.epoch))
                    self._receiver.reject(
                        event.chunk,
                        part=event.part,
                        epoch=event.epoch,
                        sentence=event.reason,
                        now=now,
                    )
                    if not event.part:  # without a refinement the answer is only coarser
                        self._count_bad(event.chunk, event.reason)
                case AnswerToken():
                    self._on_token(event, now)
        self._wake.set()

    def _on_ready(self, event: ChunkReady, now: float) -> None:
        seconds = event.end_s - event.start_s
        label = level_label(event.level)
        self._ready_levels[event.chunk] = event.level
        self._metrics.add(names.WORKER_CHUNKS, 1, label)
        if event.level == TEXT_LEVEL:
            start, stop = self._range(event.chunk)
            self._metrics.observe(names.WORKER_PREFILL_SECONDS, seconds)
            self._metrics.add(names.WORKER_PREFILL_TOKENS, stop - start)
        else:
            self._metrics.observe(names.WORKER_DECODE_SECONDS, seconds, label)
        self._receiver.chunk_ready(
            ChunkReadyMessage(
                chunk=event.chunk,
                part=event.part,
                epoch=event.epoch,
                level=event.level,
                arrived_s=self._relative(event.arrived_s),
                start_s=self._relative(event.start_s),
                end_s=self._relative(event.end_s),
            ),
            now=now,
        )
        self._free_dropped(now)
        log.debug(
            Event.CHUNK_PREFILLED if event.level == TEXT_LEVEL else Event.CHUNK_DECODED,
            session_id=self._context.session_id,
            chunk_id=event.chunk,
            chunk_level=event.level,
            seconds=seconds,
        )

    def _on_token(self, event: AnswerToken, now: float) -> None:
        at_s = self._relative(event.at_s)
        if self._ttft_s is None:
            self._ttft_s = at_s
            self._metrics.observe(names.WORKER_TTFT_SECONDS, at_s)
        self._metrics.add(names.WORKER_GENERATED_TOKENS, 1)
        self._receiver.send_token(Token(event.index, event.token_id, at_s), now=now)

    # The work.

    async def _work(self) -> None:
        try:
            done = await self._pipeline.run()
            question = self._question
            assert question is not None
            self._metrics.observe(
                names.WORKER_PREFILL_SECONDS, done.prefill_end_s - done.prefill_start_s
            )
            self._metrics.add(names.WORKER_PREFILL_TOKENS, len(question.token_ids))
            self._receiver.answered(
                Answered(
                    finish_reason=done.finish_reason,
                    prefill_start_s=self._relative(done.prefill_start_s),
                    prefill_end_s=self._relative(done.prefill_end_s),
                ),
                now=time.monotonic(),
            )
            self._wake.set()
            evaluation = await self._evaluate(question, done)
            self._outcome = "ok"
            self._receiver.finish(Done(evaluation), now=time.monotonic())
        except EngineError as error:
            self.fail(FailCode.ENGINE, str(error))
        except asyncio.CancelledError:
            pass  # whoever cancelled has said why
        except Exception as error:
            log.exception(Event.TASK_FAILED, session_id=self._context.session_id)
            # The text of an unknown error may hold anything; its kind is enough for the agent.
            self.fail(FailCode.INTERNAL, f"the worker failed with {type(error).__name__}")
        finally:
            self._pipeline.drop_memory()
            self._on_work_ended()
            self._wake.set()

    async def _evaluate(self, question: Question, done: AnswerDone) -> EvaluationResult | None:
        if not self._wants_evaluation or self._evaluator is None:
            return None
        context = self._context
        is_greedy = question.sampling.temperature == 0.0
        try:
            result = await self._evaluator.evaluate(
                self._pipeline.cache,
                context_key=context.open_.chunks[-1].key,
                context_ids=context.token_ids,
                question_ids=question.token_ids,
                max_tokens=question.max_tokens,
                greedy_answer=done.token_ids if is_greedy else None,
            )
        except (NoMemory, EngineError) as error:
            # The answer was given; only its evaluation is missing.
            self._metrics.add(names.WORKER_EVALUATIONS, 1, "failed")
            log.warning(Event.EVALUATION_FAILED, session_id=context.session_id, reason=str(error))
            return None
        self._metrics.add(names.WORKER_EVALUATIONS, 1, "ok")
        log.info(
            Event.EVALUATION_COMPLETE,
            session_id=context.session_id,
            kl=result.kl,
            top1=result.top1,
            greedy_match=result.greedy_match,
        )
        return EvaluationResult(
            kl=result.kl,
            top1=result.top1,
            greedy_match=result.greedy_match,
            exact_token_ids=result.exact_token_ids,
        )

    def _relative(self, at_s: float) -> float:
        return max(0.0, at_s - self._context.accepted_s)

    def _range(self, chunk: int) -> tuple[int, int]:
        entry = self._context.open_.chunks[chunk]
        return entry.token_start, entry.token_stop

    def _log_done(self) -> None:
        levels: dict[str, int] = {}
        for level in self._ready_levels.values():
            levels[level] = levels.get(level, 0) + 1
        log.info(
            Event.SESSION_DONE,
            session_id=self._context.session_id,
            outcome=self._outcome,
            reason=self._reason,
            model=self._context.open_.model_name,
            tokens=len(self._context.token_ids),
            chunks=len(self._context.open_.chunks),
            received_bytes=self._receiver.num_bytes_received,
            repeated_bytes=self._receiver.num_bytes_repeated,
            levels=levels,
            ttft_s=self._ttft_s,
            slo_s=self._context.open_.deadline_s,
        )
