"""Many requests, one uplink and one worker: who gets the window, and who is refused early.

Pure functions over what each request still needs. Invariants: shares never exceed the window; a
request that can still meet its deadline is served before one with a later deadline; background ingest
always moves. Must not know: sessions, HTTP.

Source: earliest deadline first is optimal for one preemptible resource (Liu and Layland 1973,
section 7).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from planner.curve import DeliveryCurve
from planner.model import Stage, TransferState

INGEST_SHARE: Final = 0.05
"""Share of the window for background ingest while requests are waiting: slow, never starved."""
MIN_RETRY_S: Final = 1.0
"""Shortest time after which somebody refused is asked to come again."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request still needs."""

    request_id: str
    deadline_s: float
    """From now until everything must be at the worker. Unit: seconds; may be negative."""
    num_bytes: float
    """Bytes still to be delivered by its present plan."""
    engine_s: float = 0.0
    """Prefill still to be done for it, question included."""
    min_bytes: float | None = None
    """Bytes of its smallest plan; None: as its present plan."""

    @property
    def least_bytes(self) -> float:
        """Bytes without which it cannot be served."""
        return self.num_bytes if self.min_bytes is None else min(self.min_bytes, self.num_bytes)


class Refusal(enum.Enum):
    """Why a request with a strict deadline is refused."""

    LINK_TOO_SLOW = "link_too_slow"
    """Alone on the uplink it would be late already."""
    LINK_TAKEN = "link_taken"
    """The uplink is promised to requests with earlier deadlines, or would make one of them late."""
    WORKER_TAKEN = "worker_taken"
    """The worker's engine is."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a request is let in."""

    refusal: Refusal | None
    sentence: str
    """One sentence for whoever asked; empty when let in."""
    retry_after_s: float = 0.0

    @property
    def is_admitted(self) -> bool:
        """Whether it is let in."""
        return self.refusal is None


def divide_window(
    demands: Sequence[Demand],
    window_bytes: int,
    *,
    bytes_per_s: float | None,
    ingest_waits: bool = False,
) -> dict[str, int]:
    """Divide the window (and with it the uplink) among requests, earliest deadline first.

    Each gets the share of the rate with which it just meets its deadline, in the order of deadlines; what
    is over goes to all in equal parts, so that everybody is early. Nothing known about the rate: equal
    parts. Late requests count as due now.

    Args:
        demands: requests that have something to send.
        window_bytes: bytes that may be in flight over all of them.
        bytes_per_s: expected rate of the uplink; None while unknown.
        ingest_waits: whether background ingest has something to send.

    Returns:
        Bytes in flight for each request id; their sum is at most ``window_bytes`` less ingest's share.
    """
    budget = window_bytes * (1.0 - INGEST_SHARE) if ingest_waits else float(window_bytes)
    waiting = sorted(
        (d for d in demands if d.num_bytes > 0), key=lambda d: (d.deadline_s, d.request_id)
    )
    shares = {demand.request_id: 0.0 for demand in demands}
    left = budget
    if bytes_per_s:
        for demand in waiting:
            need = _needed_share(demand, bytes_per_s)
            shares[demand.request_id] = min(left, need * budget)
            left -= shares[demand.request_id]
    for demand in waiting:
        shares[demand.request_id] += left / len(waiting)
    return {request_id: int(share) for request_id, share in shares.items()}


def admit(newcomer: Demand, running: Sequence[Demand], curve: DeliveryCurve | None) -> Admission:
    """Say whether a request with a strict deadline can be let in.

    Earliest deadline first meets all deadlines if any order does, so it is enough to check that the
    bytes due by each deadline fit into what the uplink delivers until then, and the same for the engine.

    Args:
        newcomer: the request.
        running: those that were let in.
        curve: delivery at the probability to be promised; None while nothing is known: then only the
            engine is looked at.
    """
    order = sorted((*running, newcomer), key=lambda d: (d.deadline_s, d.request_id))
    if curve is not None:
        alone_s = curve.time_s(newcomer.least_bytes)
        if alone_s > newcomer.deadline_s:
            late_s = alone_s - newcomer.deadline_s
            return _refuse(
                Refusal.LINK_TOO_SLOW,
                f"the uplink needs {alone_s:.2f} s for it, {late_s:.2f} s more than there are",
                late_s,
            )
        before = _first_late_bytes(order, newcomer, curve)
        if before is not None:
            return _refuse(
                Refusal.LINK_TAKEN,
                f"the uplink is promised to {len(running)} requests for the next {before:.2f} s",
                before,
            )
    engine_s = 0.0
    for demand in order:
        engine_s += demand.engine_s
        if engine_s > demand.deadline_s and demand.deadline_s >= newcomer.deadline_s:
            others_s = engine_s - newcomer.engine_s
            return _refuse(
                Refusal.WORKER_TAKEN,
                f"the worker is promised to {len(running)} requests for the next {others_s:.2f} s",
                others_s,
            )
    return Admission(None, "")


def _first_late_bytes(
    order: Sequence[Demand], newcomer: Demand, curve: DeliveryCurve
) -> float | None:
    """Time for which the uplink is taken, if the newcomer would make itself or a later one late."""
    total = 0.0
    for demand in order:
        total += demand.least_bytes
        if demand.deadline_s < newcomer.deadline_s:
            continue
        if curve.time_s(total) > demand.deadline_s:
            taken_s = curve.time_s(total - newcomer.least_bytes)
            return taken_s if math.isfinite(taken_s) else demand.deadline_s
    return None


def _needed_share(demand: Demand, bytes_per_s: float) -> float:
    """Share of the rate that meets the deadline; all of it when it is late."""
    if demand.deadline_s <= 0.0:
        return 1.0
    return min(1.0, demand.num_bytes / demand.deadline_s / bytes_per_s)


def _refuse(refusal: Refusal, sentence: str, retry_after_s: float) -> Admission:
    return Admission(refusal, sentence, max(MIN_RETRY_S, retry_after_s))


def demand_of(request_id: str, state: TransferState) -> Demand:
    """Say what a transfer still needs.

    Text from the front as far as its deadline lets the engine; of the rest, the smallest level at least
    and the middle one if it may.
    ``engine_s`` counts only what cannot be avoided: the question. Text chunks are prefilled because the
    engine is there, and give way.
    """
    worker = state.worker
    budget_s = state.remaining_s - worker.tail_prefill_s
    engine_s = worker.queue_delay_s + worker.prefill_busy_s
    num_bytes = least = float(state.bytes_in_flight)
    is_front = True
    for chunk in state.chunks:
        if chunk.stage in (Stage.READY, Stage.ARRIVED):
            continue
        if chunk.choice is not None:
            unsent = max(0, chunk.choice.num_bytes - chunk.bytes_sent)
            num_bytes, least = num_bytes + unsent, least + unsent
            engine_s += chunk.choice.prefill_s
            continue
        text = chunk.options.text
        if text is not None and is_front and engine_s + text.prefill_s <= budget_s:
            engine_s += text.prefill_s
            continue
        is_front = False
        sizes = sorted(choice.num_bytes for choice in chunk.options.levels)
        if sizes:
            least += sizes[0]
            num_bytes += sizes[len(sizes) // 2]
    return Demand(
        request_id,
        deadline_s=budget_s,
        num_bytes=num_bytes,
        engine_s=worker.tail_prefill_s,
        min_bytes=least,
    )
