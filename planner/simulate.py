"""One transfer in virtual time: sender, link and worker as arithmetic.

Owns `simulate_transfer`. The sender keeps a window of segments in the link, asks the policy whenever
it could begin another chunk and lets it reconsider at each acknowledgement; the worker decodes and
prefills side by side. Invariant: same arguments, same record, bit for bit. Must not know: clocks,
sockets, where the link's future comes from.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from planner.errors import PlannerError
from planner.model import (
    Choice,
    ChunkOptions,
    ChunkProgress,
    Decision,
    Stage,
    TransferState,
    WorkerProgress,
)
from planner.policies import Policy
from planner.samples import DeliverySample, Estimator

WINDOW_GAIN: Final = 1.25
"""Source: wire.md, W = max(4 S, 1.25 * rate * min_rtt + 2 S)."""
MIN_WINDOW_SEGMENTS: Final = 4
WAIT_CHECK_S: Final = 0.1
"""How often the sender looks at what is overdue."""
RECONSIDER_EVERY_S: Final = 0.05
"""How often acknowledgements make the policy reconsider, at most."""
GIVE_UP_S: Final = 600.0
"""A transfer that takes longer counts as never finished."""


Observer = Callable[[float, int, float], None]


class LinkCapacity(Protocol):
    """A link as a function of time; `scenarios.trace.Trace` is one."""

    def finish_s(self, start_s: float, num_bytes: float) -> float:
        """Return when so many bytes have left, if they begin at ``start_s``."""


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """The uplink of a simulation."""

    capacity: LinkCapacity
    delay_s: float = 0.02
    """One way. Unit: seconds."""
    segment_bytes: int = 64 * 1024


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request."""

    chunks: tuple[ChunkOptions, ...]
    deadline_s: float
    tail_prefill_s: float = 0.0
    """Prefill of the question, as everybody expects it."""
    engine_slowness: float = 1.0
    """Actual over expected prefill time."""
    decoder_slowness: float = 1.0
    """Actual over expected decode time."""
    queue_delay_s: float = 0.0


@dataclass(slots=True)
class ChunkRecord:
    """What became of one chunk. All times in seconds from the request's arrival."""

    index: int
    choice: str = ""
    num_bytes: int = 0
    loss: float = 0.0
    epoch: int = 0
    begun_s: float = math.inf
    arrived_s: float = math.inf
    work_begun_s: float = math.inf
    """Decoding or prefill began."""
    ready_s: float = math.inf


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """The outcome of one transfer."""

    ttft_s: float
    deadline_s: float
    loss: float
    """Sum over chunks."""
    num_bytes: int
    """Everything sent, abandoned epochs included."""
    chunks: tuple[ChunkRecord, ...]
    decisions: tuple[tuple[float, Decision], ...] = field(repr=False)
    """(seconds from the request's arrival, decision)."""
    first_expected_ttft_s: float = math.inf
    """What the first decision expected."""

    @property
    def meets_deadline(self) -> bool:
        """Whether the first token came in time."""
        return self.ttft_s <= self.deadline_s


@dataclass(slots=True)
class _Segment:
    chunk: int
    epoch: int
    num_bytes: int
    sent_s: float
    delivered_before: int
    delivered_at_s: float
    is_last: bool
    window_limited: bool
    sender_limited: bool


class _Simulation:
    """The state of one run."""

    def __init__(
        self,
        request: SimulatedRequest,
        link: SimulatedLink,
        policy: Policy,
        estimator: Estimator,
        start_s: float,
        observer: Observer | None,
    ) -> None:
        self.observer = observer
        self.request, self.link, self.policy, self.estimator = request, link, policy, estimator
        self.start_s = start_s
        self.now = start_s
        count = len(request.chunks)
        self.stages = [Stage.MISSING] * count
        self.choices: list[Choice | None] = [None] * count
        self.sent = [0] * count
        self.acked = [0] * count
        self.epochs = [0] * count
        self.records = [ChunkRecord(chunk.index) for chunk in request.chunks]
        self.decisions: list[tuple[float, Decision]] = []
        self.sending: int | None = None
        self.in_flight: collections.deque[tuple[float, _Segment]] = collections.deque()
        self.bytes_in_flight = 0
        self.total_sent = 0
        self.delivered = 0
        self.delivered_at_s = start_s
        self.link_free_s = start_s
        self.min_rtt_s = 2 * link.delay_s
        self.idle_since_start = True
        self.was_idle = False
        self.decoder_free_s = start_s + request.queue_delay_s
        self.engine_free_s = start_s + request.queue_delay_s
        self.texts: list[int] = []
        """Text chunks told to the worker and not yet begun, in token order."""
        self.text_running: int | None = None
        self.text_since_s = 0.0
        self.reconsidered_s = start_s
        self.timers: list[tuple[float, int, str, int]] = []
        self.serial = 0

    # ---- state for the policy --------------------------------------------------------------------

    def state(self) -> TransferState:
        rows = tuple(
            ChunkProgress(
                options,
                self.stages[row],
                self.choices[row],
                bytes_acked=self.acked[row],
                bytes_sent=self.sent[row],
                epoch=self.epochs[row],
            )
            for row, options in enumerate(self.request.chunks)
        )
        begun_s = self.now - self.text_since_s if self.text_running is not None else 0.0
        return TransferState(
            chunks=rows,
            elapsed_s=self.now - self.start_s,
            deadline_s=self.request.deadline_s,
            worker=WorkerProgress(
                queue_delay_s=max(0.0, self.start_s + self.request.queue_delay_s - self.now),
                tail_prefill_s=self.request.tail_prefill_s,
                text_begun_s=max(0.0, begun_s),
            ),
            bytes_in_flight=self.bytes_in_flight,
        )

    # ---- events ----------------------------------------------------------------------------------

    def at(self, time_s: float, kind: str, chunk: int) -> None:
        self.serial += 1
        heapq.heappush(self.timers, (time_s, self.serial, kind, chunk))

    def run(self) -> None:
        self.pump()
        self.at(self.now + WAIT_CHECK_S, "wait", -1)
        while any(stage is not Stage.READY for stage in self.stages):
            ack_s = self.in_flight[0][0] if self.in_flight else math.inf
            timer_s = self.timers[0][0] if self.timers else math.inf
            self.now = min(ack_s, timer_s)
            if self.now > self.start_s + GIVE_UP_S:
                self.now = math.inf
                return
            if ack_s <= timer_s:
                self.on_ack()
            else:
                _, _, kind, chunk = heapq.heappop(self.timers)
                self.on_timer(kind, chunk)
            self.pump()

    def on_ack(self) -> None:
        _, segment = self.in_flight.popleft()
        self.bytes_in_flight -= segment.num_bytes
        self.delivered += segment.num_bytes
        interval_s = self.now - segment.delivered_at_s
        sample = DeliverySample(
            bytes=self.delivered - segment.delivered_before,
            interval_s=interval_s,
            delivered_at_s=self.now,
            rtt_s=self.now - segment.sent_s,
            window_limited=segment.window_limited,
            sender_limited=segment.sender_limited,
        )
        self.delivered_at_s = self.now
        self.estimator.on_delivery(sample)
        if segment.epoch == self.epochs[segment.chunk]:
            self.acked[segment.chunk] += segment.num_bytes
            if segment.is_last and self.stages[segment.chunk] is Stage.IN_FLIGHT:
                self.stages[segment.chunk] = Stage.ARRIVED
        if self.now - self.reconsidered_s >= RECONSIDER_EVERY_S:
            self.reconsider()
        if self.observer is not None:
            self.observer(self.now, self.bytes_in_flight, self.link_free_s)

    def on_timer(self, kind: str, chunk: int) -> None:
        if kind == "wait":
            oldest = self.in_flight[0][1].sent_s if self.in_flight else self.now
            self.estimator.on_waiting(
                bytes_in_flight=self.bytes_in_flight,
                oldest_age_s=self.now - oldest,
                now=self.now,
            )
            self.reconsider()
            self.at(self.now + WAIT_CHECK_S, "wait", -1)
        elif kind == "arrive":
            self.decode(chunk)
        elif kind == "ready":
            self.stages[chunk] = Stage.READY
            if self.text_running == chunk:
                self.text_running = None
            self.feed_engine()
            self.reconsider()
        elif kind == "text":
            self.texts.append(chunk)
            self.texts.sort()
            self.feed_engine()

    def decode(self, row: int) -> None:
        choice, record = self.choices[row], self.records[row]
        assert choice is not None
        begin_s = max(self.now, self.decoder_free_s)
        end_s = begin_s + choice.decode_s * self.request.decoder_slowness
        self.decoder_free_s = end_s
        record.arrived_s = self.now - self.start_s
        record.work_begun_s, record.ready_s = begin_s - self.start_s, end_s - self.start_s
        self.at(end_s, "ready", row)

    def feed_engine(self) -> None:
        if self.text_running is not None or not self.texts:
            return
        row = self.texts[0]
        if any(stage is not Stage.READY for stage in self.stages[:row]):
            return
        self.texts.pop(0)
        choice, record = self.choices[row], self.records[row]
        assert choice is not None
        begin_s = max(self.now, self.engine_free_s)
        end_s = begin_s + choice.prefill_s * self.request.engine_slowness
        self.engine_free_s = end_s
        self.text_running, self.text_since_s = row, begin_s
        record.arrived_s = record.work_begun_s = begin_s - self.start_s
        record.ready_s = end_s - self.start_s
        self.at(end_s, "ready", row)

    # ---- the sender ------------------------------------------------------------------------------

    def pump(self) -> None:
        while True:
            if self.sending is None and not self.begin_next():
                break
            if self.sending is None:
                continue
            if self.bytes_in_flight + self.link.segment_bytes > self.window_bytes():
                break
            self.send_segment()

    def begin_next(self) -> bool:
        """Ask the policy; True when something was decided."""
        decision = self.policy.next_decision(self.state(), self.estimator, self.now)
        if decision is None:
            self.was_idle = True
            return False
        self.carry_out(decision)
        return True

    def reconsider(self) -> None:
        self.reconsidered_s = self.now
        while True:
            decision = self.policy.reconsider(self.state(), self.estimator, self.now)
            if decision is None:
                return
            self.carry_out(decision)
            if decision.abandons:
                return

    def carry_out(self, decision: Decision) -> None:
        row = decision.chunk_index - self.request.chunks[0].index
        choice, record = decision.choice, self.records[row]
        if decision.abandons:
            self.epochs[row] += 1
            self.sending = None if self.sending == row else self.sending
        elif self.stages[row] is not Stage.MISSING:
            raise PlannerError(f"the policy chose chunk {decision.chunk_index} twice")
        self.decisions.append((self.now - self.start_s, decision))
        self.stages[row], self.choices[row] = Stage.IN_FLIGHT, choice
        self.sent[row] = self.acked[row] = 0
        record.choice, record.loss, record.epoch = choice.name, choice.loss, self.epochs[row]
        record.begun_s = self.now - self.start_s
        if choice.is_text:
            self.at(self.now + self.link.delay_s, "text", row)
            return
        if self.sending is not None and not decision.abandons:
            raise PlannerError(f"chunk {decision.chunk_index} was chosen while another is sent")
        self.sending = row

    def window_bytes(self) -> float:
        segment = self.link.segment_bytes
        rate = self.estimator.rate_bytes_per_s(now=self.now) or 0.0
        if not math.isfinite(rate):
            rate = 0.0
        return max(MIN_WINDOW_SEGMENTS * segment, WINDOW_GAIN * rate * self.min_rtt_s + 2 * segment)

    def send_segment(self) -> None:
        row = self.sending
        assert row is not None
        choice = self.choices[row]
        assert choice is not None
        num_bytes = min(self.link.segment_bytes, choice.num_bytes - self.sent[row])
        limited = self.was_idle and not self.in_flight
        if not self.in_flight:
            self.delivered_at_s = self.now
        self.was_idle = False
        begin_s = max(self.now, self.link_free_s)
        self.link_free_s = self.link.capacity.finish_s(begin_s, num_bytes)
        self.sent[row] += num_bytes
        self.total_sent += num_bytes
        self.bytes_in_flight += num_bytes
        is_last = self.sent[row] >= choice.num_bytes
        segment = _Segment(
            chunk=row,
            epoch=self.epochs[row],
            num_bytes=num_bytes,
            sent_s=self.now,
            delivered_before=self.delivered,
            delivered_at_s=self.delivered_at_s,
            is_last=is_last,
            window_limited=False,
            sender_limited=limited,
        )
        self.in_flight.append((self.link_free_s + 2 * self.link.delay_s, segment))
        self.records[row].num_bytes += num_bytes
        if is_last:
            if math.isfinite(self.link_free_s):
                self.at(self.link_free_s + self.link.delay_s, "arrive", row)
            self.sending = None


def simulate_transfer(
    request: SimulatedRequest,
    link: SimulatedLink,
    policy: Policy,
    estimator: Estimator,
    *,
    start_s: float,
    observer: Observer | None = None,
) -> TransferRecord:
    """Carry one request through in virtual time.

    Args:
        request: chunks, deadline and how slow the worker really is.
        link: the uplink, on the same axis as ``start_s``.
        policy: a fresh one.
        estimator: learns from the samples that the link gives.
        start_s: when the request arrives.
        observer: told after each acknowledgement: now, bytes in flight, when the link is through
            with them.

    Returns:
        The record; TTFT is infinite when the transfer never ends.
    """
    run = _Simulation(request, link, policy, estimator, start_s, observer)
    run.run()
    estimator.on_end(now=run.now)
    engine_s = max(run.now, run.engine_free_s)
    tail_s = request.tail_prefill_s * request.engine_slowness
    ttft_s = math.inf if math.isinf(run.now) else engine_s + tail_s - start_s
    return TransferRecord(
        ttft_s=ttft_s,
        deadline_s=request.deadline_s,
        loss=sum(record.loss for record in run.records),
        num_bytes=run.total_sent,
        chunks=tuple(run.records),
        decisions=tuple(run.decisions),
        first_expected_ttft_s=run.decisions[0][1].expected_ttft_s if run.decisions else math.inf,
    )


def total_choices(records: Sequence[TransferRecord]) -> dict[str, int]:
    """Count how often each choice was taken over many transfers, by name."""
    counts: collections.Counter[str] = collections.Counter(
        chunk.choice for record in records for chunk in record.chunks
    )
    return dict(sorted(counts.items()))
