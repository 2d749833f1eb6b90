"""One session's work: decode chunks as they come, prefill what was sent as text, answer.

The order of the work is `WorkOrder`'s; here it is run on the worker's threads and timed. Decoder and
engine write into the same preallocated cache at the same time, always at different tokens: the
decoder writes one chunk, a prefill step writes its own tokens and reads those before them, which
are all present.
Must not know: frames, subjects, NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cloud_worker.executors import Executors, Timed
from cloud_worker.order import AnswerStep, ChunkState, DecodeStep, PrefillStep, WorkOrder
from cloud_worker.refinements import (
    Refinements,
    RefineStep,
    RefuseStep,
    WaitingRefinement,
)
from cloud_worker.speeds import DecodeSample, PrefillSample, SpeedModel
from codec import Codec, CodecError, CorruptBitstream
from engine import KvCache, Sampling, TorchEngine

T = TypeVar("T")

TOKEN_SLACK_S = 0.25
"""How long a reader does not mind waiting for the next token; a first token that is due sooner goes
before it, one that is due later waits."""
TEXT_LEVEL = "text"
"""Name of the choice to recompute a chunk, beside the codec's levels."""


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk is in the cache."""

    chunk: int
    epoch: int
    level: str
    """The codec's level, or ``text``."""
    num_bytes: int
    """Bytes of the bitstream; 0 for text."""
    arrived_s: float
    """When the bitstream was complete, or the recompute was ordered; ``time.monotonic``."""
    start_s: float
    """When decoding, or the first prefill step, began."""
    end_s: float
    part: int = 0
    """0, or the refinement that made the chunk this level."""


@dataclass(frozen=True, slots=True)
class ChunkUnusable:
    """A bitstream arrived whole and is of no use: a chunk has to be sent again, a refinement need not."""

    chunk: int
    epoch: int
    level: str
    reason: str
    """One sentence."""
    part: int = 0
    """0, or the refinement that it was."""


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of the answer."""

    index: int
    token_id: int
    at_s: float
    """``time.monotonic`` when it was known."""


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is complete."""

    token_ids: tuple[int, ...]
    finish_reason: str
    """``stop`` when the model ended it, ``length`` when ``max_tokens`` did."""
    prefill_start_s: float
    """When the question's prefill began; ``time.monotonic``."""
    prefill_end_s: float


PipelineEvent = ChunkReady | ChunkUnusable | AnswerToken | AnswerDone


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked over the context."""

    token_ids: tuple[int, ...]
    """Tokens that follow the context's, at least 1."""
    sampling: Sampling
    max_tokens: int
    """Most tokens of the answer, at least 1."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    epoch: int
    level: str
    payload: bytes
    arrived_s: float

    @property
    def is_text(self) -> bool:
        return self.level == TEXT_LEVEL


class SessionPipeline:
    """Runs one session's work order; all methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        engine: TorchEngine,
        codec: Codec,
        executors: Executors,
        speeds: SpeedModel,
        capacity_tokens: int,
        token_ids: tuple[int, ...],
        ranges: tuple[tuple[int, int], ...],
        step_tokens: int,
        deadline_s: float,
        base_bytes: int,
        emit: Callable[[PipelineEvent], None],
    ) -> None:
        """Prepare a session.

        Args:
            engine: the model.
            codec: decoder for the model's geometry and profiles.
            executors: the worker's threads.
            speeds: corrected by every measured step.
            capacity_tokens: room in the cache for context, question and answer.
            token_ids: the context's tokens.
            ranges: (token_start, token_stop) of each chunk, covering the context.
            step_tokens: most tokens of one prefill step.
            deadline_s: when the first token is due by ``time.monotonic``; orders the sessions' steps.
            base_bytes: most bytes of decoded bitstreams that are kept so that they can be refined.
            emit: called with each event, on the event loop's thread.
        """
        self._engine = engine
        self._codec = codec
        self._executors = executors
        self._speeds = speeds
        self._capacity_tokens = capacity_tokens
        self._cache: KvCache | None = None
        self._token_ids = token_ids
        self._ranges = ranges
        self._step_tokens = step_tokens
        self._deadline_s = deadline_s
        self._emit = emit
        self._order = WorkOrder(ranges, step_tokens=step_tokens)
        self._refinements = Refinements(
            [(info.name, info.base, info.fine) for info in codec.refinements()], base_bytes
        )
        self._arrivals: dict[int, _Arrival] = {}
        self._decoding: dict[int, _Arrival] = {}
        self._text_start_s: dict[int, float] = {}
        self._question: Question | None = None
        self._decoder_has_work = asyncio.Event()
        self._engine_has_work = asyncio.Event()

    @property
    def order(self) -> WorkOrder:
        """Where each chunk stands."""
        return self._order

    @property
    def cache(self) -> KvCache:
        """The session's KV cache; it exists from the first step of ``run`` on."""
        assert self._cache is not None
        return self._cache

    @property
    def waiting_bytes(self) -> int:
        """Bytes of bitstreams that wait for the decoder or are being decoded."""
        held = [*self._arrivals.values(), *self._decoding.values()]
        return sum(len(arrival.payload) for arrival in held) + self._refinements.waiting_bytes

    def holds(self, chunk: int, part: int, epoch: int) -> bool:
        """Whether a bitstream that was taken in still waits or is being decoded."""
        if part:
            return self._refinements.holds(chunk, part, epoch)
        return any(
            arrival is not None and arrival.epoch == epoch and not arrival.is_text
            for arrival in (self._arrivals.get(chunk), self._decoding.get(chunk))
        )

    def bitstream_arrived(
        self, chunk: int, epoch: int, level: str, payload: bytes, *, now: float
    ) -> bool:
        """Take in a complete, verified bitstream; False when it is of no use any more."""
        if not self._order.bitstream_arrived(chunk, epoch):
            return False
        self._arrivals[chunk] = _Arrival(epoch, level, payload, now)
        self._wake()
        return True

    def refinement_arrived(
        self, chunk: int, part: int, epoch: int, name: str, payload: bytes, *, now: float
    ) -> None:
        """Take in a complete, verified refinement; it is decoded once what it refines is in the cache."""
        self._refinements.arrived(WaitingRefinement(chunk, part, epoch, name, payload, now))
        self._wake()

    def refinement_aborted(self, chunk: int, part: int, epoch: int) -> None:
        """The agent gave this epoch of a refinement up."""
        self._refinements.aborted(chunk, part, epoch)

    def text_ordered(self, chunk: int, epoch: int, *, now: float) -> bool:
        """Take in the order to recompute a chunk; False when it is of no use any more."""
        if not self._order.text_ordered(chunk, epoch):
            return False
        self._arrivals[chunk] = _Arrival(epoch, TEXT_LEVEL, b"", now)
        self._wake()
        return True

    def aborted(self, chunk: int, epoch: int) -> None:
        """The agent gave this epoch up."""
        self._order.aborted(chunk, epoch)
        waiting = self._arrivals.get(chunk)
        if waiting is None or waiting.epoch > epoch:
            return
        # What waits behind a decoding is not what the chunk's state says.
        if self._order.state(chunk) in (ChunkState.MISSING, ChunkState.DECODING):
            del self._arrivals[chunk]

    def question_arrived(self, question: Question) -> None:
        """Take in the question; the answer starts when the context is complete."""
        if not question.token_ids:
            raise ValueError("a question needs at least one token")
        self._question = question
        self._order.question_arrived()
        self._wake()

    def drop_memory(self) -> None:
        """Let go of the cache and of every bitstream; only after ``run`` has ended."""
        self._cache = None
        self._arrivals.clear()
        self._decoding.clear()
        self._refinements.clear()

    async def run(self) -> AnswerDone:
        """Work until the answer is complete; cancelling stops after the step that runs."""
        # Hundreds of megabytes are zeroed: off the event loop, while the first chunk is on its way.
        allocated = await self._executors.decode(
            lambda: self._engine.new_cache(self._capacity_tokens)
        )
        self._cache = allocated.value
        decoder = asyncio.create_task(self._decode_loop())
        decoder.add_done_callback(lambda _: self._wake())
        try:
            return await self._compute_loop(decoder)
        finally:
            decoder.cancel()
            while not decoder.done():
                # A second cancellation must not end the wait: the decoder may be writing still.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({decoder})
            if not decoder.cancelled():
                decoder.result()

    async def _decode_loop(self) -> None:
        while True:
            self._decoder_has_work.clear()
            step = self._order.next_decode()
            if step is not None:
                await self._decode(step)
                continue
            # What the answer does not wait for comes last.
            finer = self._refinements.next_step(self._is_ready)
            if isinstance(finer, RefineStep):
                await self._refine(finer)
            elif isinstance(finer, RefuseStep):
                self._unusable(finer.item, finer.reason)
            else:
                await self._decoder_has_work.wait()

    def _is_ready(self, chunk: int) -> bool:
        return self._order.state(chunk) is ChunkState.READY

    async def _decode(self, step: DecodeStep) -> None:
        arrival = self._decoding[step.chunk] = self._arrivals.pop(step.chunk)
        token_start, token_stop = self._ranges[step.chunk]

        def work() -> None:
            kv = self._decoded(step.chunk, arrival.level, (arrival.payload,))
            self.cache.write(token_start, kv)

        try:
            timed = await self._executors.decode(work)
        except CodecError as error:
            self._order.decode_failed(step)
            del self._decoding[step.chunk]
            self._wake()
            self._emit(ChunkUnusable(step.chunk, step.epoch, arrival.level, str(error)))
            return
        self._order.decode_done(step)
        del self._decoding[step.chunk]
        # A later epoch that came meanwhile is of no use any more.
        self._arrivals.pop(step.chunk, None)
        self._refinements.decoded(step.chunk, arrival.level, arrival.payload)
        self._wake()
        kv_bytes = self._engine.geometry.num_bytes_per_token(2) * (token_stop - token_start)
        self._speeds.observe_decode(
            DecodeSample(arrival.level.partition(":")[0], kv_bytes, timed.seconds)
        )
        self._emit(
            ChunkReady(
                step.chunk,
                step.epoch,
                arrival.level,
                len(arrival.payload),
                arrival.arrived_s,
                timed.start_s,
                timed.end_s,
            )
        )

    def _decoded(
        self, chunk: int, level: str, parts: tuple[bytes, ...]
    ) -> npt.NDArray[np.float16] | npt.NDArray[np.float32]:
        """Decode a bitstream and its refinements, and check that they are the chunk's at that level."""
        token_start, token_stop = self._ranges[chunk]
        layer0 = None
        if level.startswith("klt"):
            layer0 = self._engine.layer0_kv(self._token_ids[token_start:token_stop])
        decoded = self._codec.decode(
            parts[0], refinements=parts[1:], layer0=layer0, dtype=np.float16
        )
        found = (decoded.token_start, decoded.token_stop, decoded.level)
        if found != (token_start, token_stop, level):
            raise CorruptBitstream(
                f"the bitstream holds tokens {found[0]} to {found[1]} at level {found[2]}, "
                f"announced were tokens {token_start} to {token_stop} at {level}"
            )
        return decoded.kv

    async def _refine(self, step: RefineStep) -> None:
        """Decode a chunk finer, and put it into the cache between two steps of the engine."""
        item = step.item
        token_start, _ = self._ranges[item.chunk]
        parts = (*step.parts, item.payload)
        try:
            decoded = await self._executors.decode(
                lambda: self._decoded(item.chunk, step.level, parts)
            )
        except CodecError as error:
            self._refinements.failed(step)
            self._unusable(item, str(error))
            return
        # The engine reads this chunk in every step: only its own thread may replace it.
        written = await self._executors.compute(
            lambda: self.cache.write(token_start, decoded.value), deadline_s=self._deadline_s
        )
        self._refinements.done(step)
        self._emit(
            ChunkReady(
                item.chunk,
                item.epoch,
                step.level,
                len(item.payload),
                item.arrived_s,
                decoded.start_s,
                written.end_s,
                part=item.part,
            )
        )

    def _unusable(self, item: WaitingRefinement, reason: str) -> None:
        self._emit(ChunkUnusable(item.chunk, item.epoch, item.name, reason, part=item.part))

    async def _compute_loop(self, decoder: asyncio.Task[None]) -> AnswerDone:
        while True:
            self._engine_has_work.clear()
            step = self._order.next_compute()
            if isinstance(step, PrefillStep):
                await self._prefill(step)
            elif isinstance(step, AnswerStep):
                return await self._answer()
            elif decoder.done():
                decoder.result()
                raise AssertionError("the decoder stopped before the answer was begun")
            else:
                await self._engine_has_work.wait()

    async def _prefill(self, step: PrefillStep) -> None:
        ids = self._token_ids[step.token_start : step.token_stop]
        timed = await self._timed_prefill(
            lambda: self._engine.fill(self.cache, ids, step.token_start),
            start=step.token_start,
            num_tokens=len(ids),
        )
        self._order.prefill_done(step)
        self._wake()
        start_s = self._text_start_s.setdefault(step.chunk, timed.start_s)
        if step.is_last:
            arrival = self._arrivals.pop(step.chunk)
            self._emit(
                ChunkReady(
                    step.chunk, step.epoch, TEXT_LEVEL, 0, arrival.arrived_s, start_s, timed.end_s
                )
            )

    async def _answer(self) -> AnswerDone:
        question = self._question
        assert question is not None
        position = self._order.num_context_tokens
        steps = list(range(0, len(question.token_ids), self._step_tokens))
        start_s: float | None = None
        for offset in steps[:-1]:
            ids = question.token_ids[offset : offset + self._step_tokens]
            filled = await self._timed_prefill(
                functools.partial(self._engine.fill, self.cache, ids, position),
                start=position,
                num_tokens=len(ids),
            )
            start_s = filled.start_s if start_s is None else start_s
            position += len(ids)
        last = question.token_ids[steps[-1] :]
        timed = await self._timed_prefill(
            functools.partial(self._engine.prefill, self.cache, last, position),
            start=position,
            num_tokens=len(last),
        )
        start_s = timed.start_s if start_s is None else start_s
        position += len(last)
        tokens = self._engine.generate(
            self.cache, timed.value, position, question.sampling, question.max_tokens
        )
        answer = await self._stream(tokens)
        return AnswerDone(
            token_ids=tuple(answer),
            finish_reason="stop" if len(answer) < question.max_tokens else "length",
            prefill_start_s=start_s,
            prefill_end_s=timed.end_s,
        )

    async def _stream(self, tokens: Iterator[int]) -> list[int]:
        answer: list[int] = []
        while True:
            # One token a turn: other sessions' steps run between two tokens of this one.
            timed = await self._executors.compute(
                lambda: next(tokens, None), deadline_s=time.monotonic() + TOKEN_SLACK_S
            )
            if timed.value is None:
                return answer
            self._emit(AnswerToken(len(answer), timed.value, timed.end_s))
            answer.append(timed.value)

    async def _timed_prefill(
        self, step: Callable[[], T], *, start: int, num_tokens: int
    ) -> Timed[T]:
        timed = await self._executors.compute(
            step,
            deadline_s=self._deadline_s,
            predicted_s=self._speeds.prefill_seconds(start, num_tokens),
        )
        self._speeds.observe_prefill(PrefillSample(start, num_tokens, timed.seconds))
        return timed

    def _wake(self) -> None:
        self._decoder_has_work.set()
        self._engine_has_work.set()
