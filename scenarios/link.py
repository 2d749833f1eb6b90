"""A link that follows a trace: rate, one-way delay, and a finite queue that drops nothing.

Owns the model of docs/adr/0007-link-model.md. Invariants: bytes leave in the order in which they were
offered, never faster than the trace, and as fast as the trace while anything waits; whoever offers more
than the queue has room for is told so (TCP turns that into back-pressure). Clock-free: `now` comes in
as seconds on any monotonic axis. Must not know: sockets, what the bytes mean.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from scenarios.trace import Trace

ItemT = TypeVar("ItemT")

DEFAULT_DELAY_S = 0.02
"""One-way delay when neither the scenario nor the trace has one: an LTE round trip of 40 ms."""
DEFAULT_QUEUE_BYTES = 128 * 1024
"""Room of the queue: 52 ms at 20 Mbit/s, so that a second connection is not starved."""
DEFAULT_QUEUE_S = 0.05
"""Room of the queue of a fast link, at its mean rate."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """What one direction of a link is like."""

    trace: Trace
    """Capacity over time."""
    delay_s: float = DEFAULT_DELAY_S
    """Time from leaving the queue to arriving."""
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    """Bytes that may wait, the ones being sent included."""
    offset_s: float = 0.0
    """Where in the trace a start or restart begins."""


def default_queue_bytes(trace: Trace) -> int:
    """Return the room of the queue where a scenario does not give one."""
    return max(DEFAULT_QUEUE_BYTES, round(trace.mean_bytes_per_s * DEFAULT_QUEUE_S))


@dataclass(slots=True)
class _Passage(Generic[ItemT]):
    """One item on its way."""

    item: ItemT
    num_bytes: int
    offered_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class Delivery(Generic[ItemT]):
    """One item that has arrived."""

    item: ItemT
    num_bytes: int
    offered_s: float
    """When it entered the queue."""
    sent_s: float
    """When its last byte left the queue."""
    arrived_s: float
    """When its last byte arrived."""


class Link(Generic[ItemT]):
    """One direction of a link; the items are opaque."""

    def __init__(self, config: LinkConfig, *, now: float) -> None:
        self.config = config
        """May be exchanged; a restart then sends what waits at the new pace."""
        self._origin_s = now - config.offset_s
        self._busy_until_s = now
        self._passages: collections.deque[_Passage[ItemT]] = collections.deque()

    def trace_time_s(self, now: float) -> float:
        """Return the moment of the trace that ``now`` is."""
        return now - self._origin_s

    def restart(self, *, now: float, offset_s: float | None = None) -> None:
        """Begin the trace again; what still waits in the queue is sent at the new pace, in order.

        Args:
            now: the moment that becomes ``offset_s`` of the trace.
            offset_s: where to begin; None: where the configuration says.
        """
        self._origin_s = now - (self.config.offset_s if offset_s is None else offset_s)
        self._busy_until_s = now
        for passage in self._passages:
            if passage.sent_s > now:
                passage.sent_s = self._send(passage.num_bytes, now)

    def _send(self, num_bytes: int, ready_s: float) -> float:
        """Return when the last byte leaves the queue, and keep the link busy until then."""
        start_s = max(ready_s, self._busy_until_s)
        finish_s = self.config.trace.finish_s(max(0.0, start_s - self._origin_s), num_bytes)
        self._busy_until_s = max(start_s, finish_s + self._origin_s)
        return self._busy_until_s

    def queued_bytes(self, *, now: float) -> int:
        """Return the bytes that have not left the queue at ``now``."""
        return sum(p.num_bytes for p in self._passages if p.sent_s > now)

    def room_bytes(self, *, now: float) -> int:
        """Return how much may be offered at ``now``."""
        return max(0, self.config.queue_bytes - self.queued_bytes(now=now))

    def room_s(self, num_bytes: int, *, now: float) -> float:
        """Return the moment, at least ``now``, at which there is room for so many bytes.

        Asked for more than the whole queue holds, it answers for the whole queue.
        """
        excess = self.queued_bytes(now=now) + min(num_bytes, self.config.queue_bytes)
        excess -= self.config.queue_bytes
        moment = now
        for passage in self._passages:
            if excess <= 0:
                break
            if passage.sent_s > now:
                excess -= passage.num_bytes
                moment = passage.sent_s
        return moment

    def offer(self, item: ItemT, num_bytes: int, *, now: float) -> bool:
        """Put an item into the queue, if there is room.

        Args:
            item: what will be delivered.
            num_bytes: its size; one larger than the queue is taken when the queue is empty.
            now: when it is there; may be earlier than an earlier call's, for a sender that had to wait.

        Returns:
            Whether it was taken.
        """
        queued = self.queued_bytes(now=now)
        if queued and queued + num_bytes > self.config.queue_bytes:
            return False
        sent_s = self._send(num_bytes, now)
        self._passages.append(_Passage(item, num_bytes, now, sent_s))
        return True

    def next_delivery_s(self) -> float | None:
        """Return when the next item arrives; None when nothing is on its way, infinity when it never does."""
        if not self._passages:
            return None
        return self._passages[0].sent_s + self.config.delay_s

    def deliveries(self, *, now: float) -> list[Delivery[ItemT]]:
        """Take out what has arrived by ``now``, in order."""
        arrived: list[Delivery[ItemT]] = []
        while self._passages and self._passages[0].sent_s + self.config.delay_s <= now:
            done = self._passages.popleft()
            arrived.append(
                Delivery(
                    done.item,
                    done.num_bytes,
                    done.offered_s,
                    done.sent_s,
                    done.sent_s + self.config.delay_s,
                )
            )
        return arrived

    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing is on its way."""
        return not self._passages

    def transfer_s(self, num_bytes: int, *, now: float) -> float:
        """Return how long so many bytes would take if they were offered now, delay included."""
        start_s = max(now, self._busy_until_s)
        finish_s = self.config.trace.finish_s(max(0.0, start_s - self._origin_s), num_bytes)
        if math.isinf(finish_s):
            return math.inf
        return finish_s + self._origin_s + self.config.delay_s - now
