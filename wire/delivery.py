"""Delivery-rate samples and the congestion window, in the manner of BBR.

Owns the sender's view of the link. Invariants: a sample that the window or the sender limited never
lowers the rate, and the window is never below four segments. Must not know: chunks, frames.

Source: draft-cheng-iccrg-delivery-rate-estimation-02, section 3 (the sampling);
docs/wire-protocol.md, "Window" (the rule and why the ``+ 2 S`` is there).
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

MIN_WINDOW_SEGMENTS = 4
EXTRA_SEGMENTS = 2
"""Without them the window locks in below the link's rate for ever (59 % was measured)."""
WINDOW_GAIN = 1.25
"""Source: BBR's probing gain."""
RATE_SAMPLES = 5
"""Median of 5 samples is within 0-1 % of a steady link's rate."""
MIN_RTT_HORIZON_S = 10.0
"""Source: BBR's min_rtt filter, 10 s."""
QUEUE_SHARE = 1.25
"""A round trip below this multiple of the least one saw no queue: the window set the pace."""
INITIAL_RTT_S = 0.1


@dataclass(frozen=True, slots=True)
class DeliverySample:
    """What one acknowledgement says about the link."""

    bytes: int
    """Delivered between the sending of a segment and its acknowledgement."""
    interval_s: float
    """Length of that stretch."""
    delivered_at_s: float
    """Time of the acknowledgement, on the caller's clock."""
    rtt_s: float
    window_limited: bool
    """The window, not the link, set the pace: the link may be faster."""
    sender_limited: bool
    """There was nothing to send for a part of the stretch: the link may be faster."""

    @property
    def bytes_per_s(self) -> float:
        """The sample's rate."""
        return self.bytes / self.interval_s


@dataclass(frozen=True, slots=True)
class SentMark:
    """The meter's state when a segment was sent; kept with the segment until its acknowledgement."""

    size_bytes: int
    sent_at_s: float
    delivered_bytes: int
    delivered_at_s: float
    first_sent_at_s: float
    window_full: bool
    sender_limited: bool


class DeliveryMeter:
    """Turns sends and acknowledgements into samples, a rate and a window."""

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        """Sent, neither acknowledged nor given up."""
        self.delivered_bytes = 0
        """Acknowledged, each byte once."""
        self._delivered_at_s = 0.0
        self._first_sent_at_s = 0.0
        self._limited_until_bytes = 0
        self._rates: deque[float] = deque(maxlen=RATE_SAMPLES)
        self._rtts: deque[tuple[float, float]] = deque()
        self._ack_rtts: deque[float] = deque(maxlen=64)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Median of the last samples; None before the first."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def min_rtt_s(self) -> float | None:
        """Least round trip of the last ten seconds."""
        return self._rtts[0][1] if self._rtts else None

    @property
    def ack_p50_s(self) -> float:
        """Median round trip of the last 64 acknowledgements."""
        return statistics.median(self._ack_rtts) if self._ack_rtts else INITIAL_RTT_S

    def window_bytes(self, *, segment_bytes: int) -> int:
        """Bytes that may be in flight: ``max(4 S, 1.25 rate min_rtt + 2 S)``."""
        least = MIN_WINDOW_SEGMENTS * segment_bytes
        rate, rtt = self.rate_bytes_per_s, self.min_rtt_s
        if rate is None or rtt is None:
            return least
        return max(least, int(WINDOW_GAIN * rate * rtt) + EXTRA_SEGMENTS * segment_bytes)

    def on_sent(self, size_bytes: int, *, window_full: bool, now: float) -> SentMark:
        """Take note of a segment that goes out now.

        Args:
            size_bytes: bytes of the segment.
            window_full: whether the window left no room behind this segment.
            now: seconds.
        """
        if self.in_flight_bytes == 0:
            # An idle stretch must not count as time in which the link delivered nothing.
            self._first_sent_at_s = now
            self._delivered_at_s = now
        mark = SentMark(
            size_bytes=size_bytes,
            sent_at_s=now,
            delivered_bytes=self.delivered_bytes,
            delivered_at_s=self._delivered_at_s,
            first_sent_at_s=self._first_sent_at_s,
            window_full=window_full,
            sender_limited=self.delivered_bytes < self._limited_until_bytes,
        )
        self.in_flight_bytes += size_bytes
        return mark

    def on_nothing_to_send(self) -> None:
        """Take note that there is room in the window and nothing to fill it with."""
        self._limited_until_bytes = self.delivered_bytes + self.in_flight_bytes + 1

    def on_acked(self, mark: SentMark, *, now: float) -> DeliverySample | None:
        """Take in an acknowledgement; None where no time went by, so there is no rate."""
        self.in_flight_bytes -= mark.size_bytes
        self.delivered_bytes += mark.size_bytes
        self._delivered_at_s = now
        self._first_sent_at_s = mark.sent_at_s
        rtt_s = now - mark.sent_at_s
        self._ack_rtts.append(rtt_s)
        self._note_rtt(rtt_s, now)
        interval_s = max(mark.sent_at_s - mark.first_sent_at_s, now - mark.delivered_at_s)
        if interval_s <= 0:
            return None
        least_rtt = self.min_rtt_s
        sample = DeliverySample(
            bytes=self.delivered_bytes - mark.delivered_bytes,
            interval_s=interval_s,
            delivered_at_s=now,
            rtt_s=rtt_s,
            window_limited=mark.window_full
            and least_rtt is not None
            and rtt_s < QUEUE_SHARE * least_rtt,
            sender_limited=mark.sender_limited,
        )
        rate = self.rate_bytes_per_s
        limited = sample.window_limited or sample.sender_limited
        if not limited or rate is None or sample.bytes_per_s > rate:
            self._rates.append(sample.bytes_per_s)
        return sample

    def on_lost(self, mark: SentMark) -> None:
        """Take note that a segment is given up, lost or aborted."""
        self.in_flight_bytes -= mark.size_bytes

    def _note_rtt(self, rtt_s: float, now: float) -> None:
        while self._rtts and self._rtts[-1][1] >= rtt_s:
            self._rtts.pop()
        self._rtts.append((now, rtt_s))
        while self._rtts[0][0] < now - MIN_RTT_HORIZON_S:
            self._rtts.popleft()
