"""Delivery-rate samples and the congestion window, in the manner of BBR.

Owns the sender's view of the link. Invariants: a sample that the window or the sender limited never
lowers the rate, and the window is never below four segments. Must not know: chunks, frames.

Source: draft-cheng-iccrg-delivery-rate-estimation-02, section 3 (the sampling);
docs/wire-protocol.md, "Window" (the rule and why the ``+ 2 S`` is there).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MIN_WINDOW_SEGMENTS = 4
EXTRA_SEGMENTS = 2
"""Without them the window locks in below the link's rate for ever (59 % was measured)."""
WINDOW_GAIN = 1.25
"""Source: BBR's probing gain."""
RATE_SAMPLES = 5
"""Median of 5 samples is within 0-1 % of a steady link's rate."""
MIN_RTT_HORIZON_S = 10.0
"""Source: BBR's min_rtt filter, 10 s (draft-cardwell-iccrg-bbr-congestion-control-02, 4.1.2)."""
QUEUE_SHARE = 1.25
"""A round trip below this multiple of the least one saw no queue: the window set the pace."""
ACK_TIMES = 64
"""Acknowledgements in the median that the timers go by."""
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
    """There was nothing to send, or no credit, for a part of the stretch: the link may be faster."""

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
    is_repeat: bool
    """Sent before: its acknowledgement may belong to the first sending, so it times nothing."""
    is_probe: bool
    """Sent while the queue was being emptied, to see the bare round trip."""


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
        self._min_rtt_s: float | None = None
        self._min_rtt_at_s = 0.0
        self._is_probing = False
        self._ack_times_s: deque[float] = deque(maxlen=ACK_TIMES)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Median of the last samples; None before the first."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def min_rtt_s(self) -> float | None:
        """Least round trip, not older than about ten seconds."""
        return self._min_rtt_s

    @property
    def ack_p50_s(self) -> float:
        """Median round trip of the last acknowledgements."""
        return statistics.median(self._ack_times_s) if self._ack_times_s else INITIAL_RTT_S

    def window_bytes(self, *, segment_bytes: int) -> int:
        """Bytes that may be in flight: ``max(4 S, 1.25 rate min_rtt + 2 S)``.

        The rule keeps a queue of about ``0.25 rate min_rtt + 2 S`` at the bottleneck, so after ten
        seconds no round trip would be bare any more and the window would feed on its own queue. Then,
        as in BBR, the window is four segments until one segment has gone there and back.
        """
        least = MIN_WINDOW_SEGMENTS * segment_bytes
        rate, rtt = self.rate_bytes_per_s, self._min_rtt_s
        if rate is None or rtt is None or self._is_probing:
            return least
        return max(least, int(WINDOW_GAIN * rate * rtt) + EXTRA_SEGMENTS * segment_bytes)

    def on_sent(
        self, size_bytes: int, *, window_full: bool, is_repeat: bool = False, now: float
    ) -> SentMark:
        """Take note of a segment that goes out now.

        Args:
            size_bytes: bytes of the segment.
            window_full: whether the window left no room behind this segment.
            is_repeat: whether it was sent before.
            now: seconds.
        """
        if self.in_flight_bytes == 0:
            # An idle stretch must not count as time in which the link delivered nothing.
            self._first_sent_at_s = now
            self._delivered_at_s = now
            # Until the first acknowledgement comes back, a sample is a few bytes over a whole round
            # trip: a lower bound of the link, as low as the first segment is small.
            self._limited_until_bytes = max(self._limited_until_bytes, self.delivered_bytes + 1)
        mark = SentMark(
            size_bytes=size_bytes,
            sent_at_s=now,
            delivered_bytes=self.delivered_bytes,
            delivered_at_s=self._delivered_at_s,
            first_sent_at_s=self._first_sent_at_s,
            window_full=window_full,
            sender_limited=self.delivered_bytes < self._limited_until_bytes,
            is_repeat=is_repeat,
            is_probe=self._is_probing,
        )
        self.in_flight_bytes += size_bytes
        return mark

    def on_nothing_to_send(self) -> None:
        """Take note that there is room in the window and nothing, or no credit, to fill it with."""
        self._limited_until_bytes = self.delivered_bytes + self.in_flight_bytes + 1

    def on_acked(self, marks: Sequence[SentMark], *, now: float) -> DeliverySample | None:
        """Take in the segments that one acknowledgement covers, in the order they were sent.

        Returns:
            A sample from the one sent last; None where no time went by, or it was a repeat.
        """
        if not marks:
            return None
        for mark in marks:
            self.in_flight_bytes -= mark.size_bytes
            self.delivered_bytes += mark.size_bytes
        self._delivered_at_s = now
        last = marks[-1]
        self._first_sent_at_s = max(self._first_sent_at_s, last.sent_at_s)
        if last.is_repeat:
            # Karn's rule.
            return None
        rtt_s = now - last.sent_at_s
        self._ack_times_s.append(rtt_s)
        self._note_rtt(rtt_s, is_probe=last.is_probe, now=now)
        interval_s = max(last.sent_at_s - last.first_sent_at_s, now - last.delivered_at_s)
        if interval_s <= 0:
            return None
        assert self._min_rtt_s is not None
        sample = DeliverySample(
            bytes=self.delivered_bytes - last.delivered_bytes,
            interval_s=interval_s,
            delivered_at_s=now,
            rtt_s=rtt_s,
            window_limited=last.window_full and rtt_s < QUEUE_SHARE * self._min_rtt_s,
            sender_limited=last.sender_limited,
        )
        rate = self.rate_bytes_per_s
        is_limited = sample.window_limited or sample.sender_limited
        if not is_limited or rate is None or sample.bytes_per_s > rate:
            self._rates.append(sample.bytes_per_s)
        return sample

    def on_found(self, marks: Sequence[SentMark], *, now: float) -> None:
        """Take in segments that turn out to have arrived at some time; they say nothing of the rate."""
        for mark in marks:
            self.in_flight_bytes -= mark.size_bytes
            self.delivered_bytes += mark.size_bytes
            self._delivered_at_s = now

    def on_lost(self, mark: SentMark) -> None:
        """Take note that a segment is given up, lost or aborted."""
        self.in_flight_bytes -= mark.size_bytes

    def _note_rtt(self, rtt_s: float, *, is_probe: bool, now: float) -> None:
        if self._min_rtt_s is None or rtt_s <= self._min_rtt_s or is_probe:
            self._min_rtt_s = rtt_s
            self._min_rtt_at_s = now
            self._is_probing = False
        elif now - self._min_rtt_at_s > MIN_RTT_HORIZON_S:
            self._is_probing = True
