"""Between the wire's words and the planner's: one request's chunks, choices and progress.

Translates what the store has and what the worker says into the planner's state, and keeps track of
how far each chunk is. Pure: no clock, no I/O. Must not know: NATS, HTTP, files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_agent.keys import ChunkSpan
from planner import (
    TEXT,
    Choice,
    ChunkOptions,
    ChunkProgress,
    Decision,
    Reason,
    Stage,
    TransferState,
    WorkerProgress,
)
from planner.cost import CostModel, WorkerSpeeds
from wire import Accept

UNMEASURED_LOSS = math.inf
"""Loss of a level whose loss nobody measured: still there to be asked for by name, never preferred."""

SHARED_CORES_SLOWDOWN = 1.35
"""A worker on CPUs prefills so much slower while it receives and decodes than when it measured itself: the
same cores do both. Source: scenario `demo`, 9.6 s for 7.1 s foretold, two cores, SmolLM2-135M."""


@dataclass(slots=True)
class TrackedChunk:
    """One chunk of the request and what has become of it."""

    index: int
    span: ChunkSpan
    sizes: dict[str, int]
    """Bytes of each level that the store still has and the worker can still take."""
    stage: Stage = Stage.MISSING
    choice: Choice | None = None
    epoch: int = 0
    bytes_acked: int = 0
    bytes_sent: int = 0
    begun_s: float = 0.0
    """When its current choice was begun. Unit: seconds, monotonic."""


@dataclass(slots=True)
class Plan:
    """The planner's view of one session."""

    chunks: list[TrackedChunk]
    level_loss: Mapping[str, float | None]
    """Measured KL per token of each level, nats; None where nobody measured."""
    cost: CostModel
    question_tokens: int
    queue_delay_s: float
    accepted_at: float
    """Monotonic. Unit: seconds."""
    deadline_s: float
    arrived_at: float
    """Monotonic. Unit: seconds."""
    _options: dict[int, ChunkOptions] = field(default_factory=dict)
    _damaged: set[int] = field(default_factory=set)

    def drop_level(self, chunk: int, level: str) -> None:
        """Take a choice away: its file is corrupt, or the worker cannot decode it."""
        self.chunks[chunk].sizes.pop(level, None)
        self._options.pop(chunk, None)
        self._damaged.add(chunk)

    def fall_back(self, chunk: int) -> Decision | None:
        """Choose text for a chunk whose level was lost to damage; None where none was lost."""
        if chunk not in self._damaged:
            return None
        text = self.options(self.chunks[chunk]).text
        assert text is not None
        return Decision(
            chunk_index=chunk,
            choice=text,
            reason=Reason.ONLY_CHOICE,
            expected_ttft_s=math.inf,
            meets_deadline=False,
        )

    def learned(self) -> None:
        """Recompute all choices: the cost model has been corrected."""
        self._options.clear()

    def options(self, chunk: TrackedChunk) -> ChunkOptions:
        """Return every way of getting a chunk across."""
        cached = self._options.get(chunk.index)
        if cached is None:
            cached = self._options[chunk.index] = self._build_options(chunk)
        return cached

    def state(self, *, bytes_in_flight: int, now: float) -> TransferState:
        """Return what a policy may look at."""
        return TransferState(
            chunks=tuple(
                ChunkProgress(
                    options=self.options(chunk),
                    stage=chunk.stage,
                    choice=chunk.choice,
                    bytes_acked=chunk.bytes_acked,
                    bytes_sent=chunk.bytes_sent,
                    epoch=chunk.epoch,
                )
                for chunk in self.chunks
            ),
            elapsed_s=max(0.0, now - self.arrived_at),
            deadline_s=self.deadline_s,
            worker=WorkerProgress(
                queue_delay_s=max(0.0, self.queue_delay_s - (now - self.accepted_at)),
                tail_prefill_s=self._tail_s(),
                text_begun_s=self._text_begun_s(now),
            ),
            bytes_in_flight=bytes_in_flight,
        )

    def measured(self, chunk: TrackedChunk, *, level: str, seconds: float) -> None:
        """Take in how long the worker took for a chunk."""
        span = chunk.span
        if level == TEXT:
            self.cost.on_prefill(span.token_start, span.token_stop, seconds)
        else:
            self.cost.on_decode(level, span.num_tokens, seconds)
        self.learned()

    def _build_options(self, chunk: TrackedChunk) -> ChunkOptions:
        span = chunk.span
        choices = []
        for name, num_bytes in chunk.sizes.items():
            kl = self.level_loss.get(name)
            choices.append(
                Choice(
                    name=name,
                    num_bytes=num_bytes,
                    decode_s=self.cost.decode_s(name, span.num_tokens),
                    prefill_s=0.0,
                    loss=UNMEASURED_LOSS if kl is None else max(0.0, kl) * span.num_tokens,
                )
            )
        prefill_s = self.cost.prefill_s(span.token_start, span.token_stop)
        choices.append(Choice(TEXT, 0, 0.0, prefill_s, 0.0, is_text=True))
        return ChunkOptions(chunk.index, span.token_start, span.token_stop, tuple(choices))

    def _tail_s(self) -> float:
        start = self.chunks[-1].span.token_stop if self.chunks else 0
        return self.cost.prefill_s(start, start + self.question_tokens)

    def _text_begun_s(self, now: float) -> float:
        """How long the worker can have been at the oldest text chunk that is in flight."""
        begun = [
            now - chunk.begun_s
            for chunk in self.chunks
            if chunk.stage is Stage.IN_FLIGHT and chunk.choice is not None and chunk.choice.is_text
        ]
        return max(begun, default=0.0)


def build_plan(
    *,
    spans: Sequence[ChunkSpan],
    sizes: Sequence[Mapping[str, int]],
    level_loss: Mapping[str, float | None],
    accept: Accept,
    kv_bytes_per_token: int,
    question_tokens: int,
    deadline_s: float,
    arrived_at: float,
    accepted_at: float,
) -> Plan:
    """Set up the planner's view from what the store has and what the worker accepted.

    Levels larger than the worker's window are left out: it could never hold one to its end.
    """
    speeds = accept.speeds
    level_sets = {name.partition(":")[0] for entry in sizes for name in entry}
    slowdown = SHARED_CORES_SLOWDOWN if accept.backend == "cpu" else 1.0
    cost = CostModel(
        WorkerSpeeds(
            prefill_a_s=speeds.prefill_base_s * slowdown,
            prefill_b_s=speeds.prefill_slope_s * slowdown,
            decode_bytes_per_s=dict.fromkeys(level_sets, speeds.decode_bytes_per_s),
        ),
        kv_bytes_per_token=kv_bytes_per_token,
    )
    chunks = [
        TrackedChunk(
            index, span, {name: n for name, n in entry.items() if n <= accept.window_bytes}
        )
        for index, (span, entry) in enumerate(zip(spans, sizes, strict=True))
    ]
    for held in accept.have:
        if held.chunk < len(chunks):
            chunks[held.chunk].stage = Stage.READY
    return Plan(
        chunks=chunks,
        level_loss=level_loss,
        cost=cost,
        question_tokens=question_tokens,
        queue_delay_s=accept.queue_delay_s,
        accepted_at=accepted_at,
        deadline_s=deadline_s,
        arrived_at=arrived_at,
    )
