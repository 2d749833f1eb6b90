"""The order of work for one session: what to decode, what to prefill, when to answer.

Pure bookkeeping: no clock, no thread, no model. A KV chunk depends on nothing and is decoded as
soon as it is there, wherever it lies; a text chunk is prefilled as soon as every token before it is
in the cache; the question as soon as the whole context is. Causal attention makes any such order
exact (planner.md, "compute and load at once"; idea: Cake, arXiv 2410.03065).

Invariants: a chunk is worked on by at most one step at a time; once started, an attempt is
finished; a later epoch that comes while one is decoded is taken up only if the decoding fails; a chunk
that is in the cache is never written again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from cloud_worker.errors import OrderError


class ChunkState(enum.Enum):
    """Where one chunk of the context stands."""

    MISSING = "missing"
    ARRIVED = "arrived"
    """Its bitstream is complete and waits for the decoder."""
    DECODING = "decoding"
    ORDERED = "ordered"
    """It is to be recomputed from its tokens and waits for its turn at the front."""
    PREFILLING = "prefilling"
    READY = "ready"
    """Its KV is in the cache."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode one chunk's bitstream into the cache."""

    chunk: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Prefill a part of a text chunk on top of what is in the cache."""

    chunk: int
    epoch: int
    token_start: int
    token_stop: int
    is_last: bool
    """Whether the chunk is complete after this step."""


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """Prefill the question over the whole context and generate."""


@dataclass(slots=True)
class _Chunk:
    token_start: int
    token_stop: int
    prefilled_to: int
    state: ChunkState = ChunkState.MISSING
    epoch: int = -1
    later: tuple[int, ChunkState] | None = None
    """Epoch and waiting state of an attempt that came while an earlier one was being decoded."""

    @property
    def is_started(self) -> bool:
        return self.prefilled_to > self.token_start


class WorkOrder:
    """Hands out the steps of one session."""

    def __init__(self, ranges: Sequence[tuple[int, int]], *, step_tokens: int) -> None:
        """Start with every chunk missing.

        Args:
            ranges: (token_start, token_stop) of each chunk; together they cover the context from
                token 0 without gap or overlap.
            step_tokens: most tokens of one prefill step, so that others get their turn.
        """
        expected = 0
        for token_start, token_stop in ranges:
            if token_start != expected or token_stop <= token_start:
                raise ValueError(
                    f"chunk of tokens {token_start} to {token_stop} does not start at {expected}"
                )
            expected = token_stop
        if step_tokens < 1:
            raise ValueError(f"step_tokens is {step_tokens}, must be at least 1")
        self._chunks = [_Chunk(start, stop, start) for start, stop in ranges]
        self._step_tokens = step_tokens
        self._arrivals: list[int] = []
        self._front = 0
        self._has_question = False
        self._answer_given = False

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the whole context."""
        return self._chunks[-1].token_stop if self._chunks else 0

    @property
    def front_tokens(self) -> int:
        """Tokens from 0 on that are in the cache without a gap."""
        if self._front == len(self._chunks):
            return self.num_context_tokens
        return self._chunks[self._front].prefilled_to

    @property
    def is_context_ready(self) -> bool:
        """Whether the whole context is in the cache."""
        return self._front == len(self._chunks)

    def state(self, chunk: int) -> ChunkState:
        """Where a chunk stands."""
        return self._chunks[chunk].state

    def ready_chunks(self) -> tuple[int, ...]:
        """Indices of the chunks that are in the cache."""
        return tuple(i for i, c in enumerate(self._chunks) if c.state is ChunkState.READY)

    def bitstream_arrived(self, chunk: int, epoch: int) -> bool:
        """A chunk's bitstream is complete and verified.

        Returns:
            False when it is of no use: the chunk is being prefilled, is in the cache, or a later
            epoch was chosen.
        """
        return self._take_in(chunk, epoch, ChunkState.ARRIVED)

    def text_ordered(self, chunk: int, epoch: int) -> bool:
        """A chunk is to be recomputed from its tokens; returns as ``bitstream_arrived``."""
        return self._take_in(chunk, epoch, ChunkState.ORDERED)

    def aborted(self, chunk: int, epoch: int) -> None:
        """The agent gave up this epoch and every one before; waiting work of it is dropped."""
        entry = self._chunks[chunk]
        if entry.later is not None and entry.later[0] <= epoch:
            entry.later = None
        is_waiting = entry.state in (ChunkState.ARRIVED, ChunkState.ORDERED)
        if is_waiting and entry.epoch <= epoch and not entry.is_started:
            entry.state = ChunkState.MISSING
            if chunk in self._arrivals:
                self._arrivals.remove(chunk)
        if entry.state is ChunkState.MISSING:
            entry.epoch = max(entry.epoch, epoch)

    def question_arrived(self) -> None:
        """The question's tokens are known."""
        self._has_question = True

    def next_decode(self) -> DecodeStep | None:
        """Take the decoder's next step, oldest arrival first; None when there is none now."""
        if not self._arrivals:
            return None
        chunk = self._arrivals.pop(0)
        entry = self._chunks[chunk]
        entry.state = ChunkState.DECODING
        return DecodeStep(chunk, entry.epoch)

    def next_compute(self) -> PrefillStep | AnswerStep | None:
        """Take the engine's next step; None when it has to wait.

        The chunk at the front is the only one that can be prefilled: every other one lacks tokens
        before it.
        """
        if self.is_context_ready:
            if not self._has_question or self._answer_given:
                return None
            self._answer_given = True
            return AnswerStep()
        entry = self._chunks[self._front]
        if entry.state is not ChunkState.ORDERED:
            return None
        entry.state = ChunkState.PREFILLING
        token_stop = min(entry.prefilled_to + self._step_tokens, entry.token_stop)
        return PrefillStep(
            self._front,
            entry.epoch,
            entry.prefilled_to,
            token_stop,
            is_last=token_stop == entry.token_stop,
        )

    def decode_done(self, step: DecodeStep) -> None:
        """The chunk of a decode step is in the cache."""
        entry = self._expect(step.chunk, step.epoch, ChunkState.DECODING)
        entry.state, entry.later = ChunkState.READY, None
        self._advance()

    def decode_failed(self, step: DecodeStep) -> None:
        """The bitstream was unusable: a later epoch, come or to come, has to fill the chunk."""
        entry = self._expect(step.chunk, step.epoch, ChunkState.DECODING)
        entry.state = ChunkState.MISSING
        if entry.later is not None:
            # The agent has moved on and would take no notice of the failure of an old epoch.
            (epoch, state), entry.later = entry.later, None
            self._take_in(step.chunk, epoch, state)

    def prefill_done(self, step: PrefillStep) -> None:
        """The tokens of a prefill step are in the cache."""
        entry = self._expect(step.chunk, step.epoch, ChunkState.PREFILLING)
        entry.prefilled_to = step.token_stop
        # Between two steps the chunk counts as ordered: it may be taken up at once.
        entry.state = ChunkState.READY if step.is_last else ChunkState.ORDERED
        self._advance()

    def _take_in(self, chunk: int, epoch: int, state: ChunkState) -> bool:
        entry = self._chunks[chunk]
        if entry.state is ChunkState.DECODING:
            newest = entry.epoch if entry.later is None else entry.later[0]
            if epoch <= newest:
                return False
            entry.later = epoch, state
            return True
        if not self._accepts(chunk, epoch):
            return False
        entry.state, entry.epoch = state, epoch
        if state is ChunkState.ARRIVED and chunk not in self._arrivals:
            self._arrivals.append(chunk)
        elif state is ChunkState.ORDERED and chunk in self._arrivals:
            self._arrivals.remove(chunk)
        return True

    def _accepts(self, chunk: int, epoch: int) -> bool:
        entry = self._chunks[chunk]
        waits = entry.state in (ChunkState.MISSING, ChunkState.ARRIVED, ChunkState.ORDERED)
        # An epoch that failed or was given up must not come back, and a chunk whose first tokens
        # are recomputed already is finished that way.
        return waits and epoch > entry.epoch and not entry.is_started

    def _expect(self, chunk: int, epoch: int, state: ChunkState) -> _Chunk:
        entry = self._chunks[chunk]
        if entry.state is not state or entry.epoch != epoch:
            raise OrderError(
                f"chunk {chunk} epoch {epoch} is {entry.state.value} at epoch {entry.epoch}, "
                f"not {state.value}"
            )
        return entry

    def _advance(self) -> None:
        while self._front < len(self._chunks):
            if self._chunks[self._front].state is not ChunkState.READY:
                return
            self._front += 1
