"""What the link tells the planner, and the seam behind which every estimator sits.

Owns `DeliverySample` and the `Estimator` Protocol. Invariant: time is `now` in seconds on one
monotonic axis, given by the caller. Must not know: sockets, frames, chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from planner.curve import DeliveryCurve
from planner.errors import InvalidSample

MIN_SAMPLE_BYTES = 4096
"""A stretch with fewer bytes measures the round trip, not the rate: about three packets."""


@dataclass(frozen=True, slots=True)
class DeliverySample:
    """One delivery-rate sample, in the manner of BBR: taken when a segment is acknowledged.

    Source: draft-cheng-iccrg-delivery-rate-estimation-02.
    """

    bytes: int
    """Bytes that were acknowledged between the sending of this segment and its acknowledgement."""
    interval_s: float
    """Length of that stretch. Unit: seconds."""
    delivered_at_s: float
    """When the acknowledgement came, on the axis of `now`."""
    rtt_s: float
    """From sending the segment to its acknowledgement. Unit: seconds."""
    window_limited: bool = False
    """The receiver's window, not the link, set the pace: the link may be faster."""
    sender_limited: bool = False
    """The sender had nothing to send for a part of the stretch: the link may be faster."""

    def __post_init__(self) -> None:
        numbers = (self.interval_s, self.delivered_at_s, self.rtt_s)
        if self.bytes < 0 or not all(map(math.isfinite, numbers)):
            raise InvalidSample(f"{self} is not a delivery sample")
        if self.interval_s < 0 or self.rtt_s < 0:
            raise InvalidSample(f"{self} has a negative duration")

    @property
    def is_limited(self) -> bool:
        """Whether the sample is only a lower bound of the link's rate."""
        return self.window_limited or self.sender_limited

    @property
    def is_telling(self) -> bool:
        """Whether it says anything about the link's rate."""
        return self.interval_s > 0.0 and self.bytes >= MIN_SAMPLE_BYTES

    @property
    def bytes_per_s(self) -> float:
        """The rate of the stretch; infinite for an empty interval."""
        return self.bytes / self.interval_s if self.interval_s > 0 else math.inf


class Estimator(Protocol):
    """Answers when bytes will have arrived, from the samples so far."""

    name: str

    def on_delivery(self, sample: DeliverySample) -> None:
        """Take in one sample; samples come in the order of their acknowledgements."""

    def on_waiting(self, *, bytes_in_flight: int, oldest_age_s: float, now: float) -> None:
        """Take in that nothing has come back: an early upper bound of the rate.

        Args:
            bytes_in_flight: sent and not acknowledged; 0 ends the wait.
            oldest_age_s: age of the oldest unacknowledged segment.
            now: seconds on the axis of the samples.
        """

    def on_end(self, *, now: float) -> None:
        """Take in that this transfer sends nothing more."""

    def rate_bytes_per_s(self, *, now: float) -> float | None:
        """Return the rate expected now (the median); None while nothing at all is known."""

    def curve(self, quantile: float, *, now: float) -> DeliveryCurve | None:
        """Return the bytes that arrive within any time with probability ``quantile``.

        Args:
            quantile: strictly between 0 and 1; a higher one gives fewer bytes.
            now: seconds on the axis of the samples.

        Returns:
            The curve, counting bytes in flight as not yet arrived; None while nothing is known.
        """

    def time_quantile_s(self, num_bytes: float, quantile: float, *, now: float) -> float:
        """Return the time within which so many bytes arrive with probability ``quantile``.

        Returns:
            Seconds from now; infinite while nothing at all is known.
        """

    def bytes_within(self, duration_s: float, quantile: float, *, now: float) -> float:
        """Return how many bytes arrive within a time with probability ``quantile``.

        The inverse of `time_quantile_s`; 0 while nothing at all is known.
        """


class CurveReader:
    """Both directions of a curve, for estimators that only make curves."""

    def curve(self, quantile: float, *, now: float) -> DeliveryCurve | None:
        """Return the curve; to be given by the subclass."""
        raise NotImplementedError

    def time_quantile_s(self, num_bytes: float, quantile: float, *, now: float) -> float:
        """Return the time within which so many bytes arrive with probability ``quantile``."""
        if num_bytes <= 0.0:
            return 0.0
        curve = self.curve(quantile, now=now)
        return math.inf if curve is None else curve.time_s(num_bytes)

    def bytes_within(self, duration_s: float, quantile: float, *, now: float) -> float:
        """Return how many bytes arrive within a time with probability ``quantile``."""
        curve = self.curve(quantile, now=now)
        return 0.0 if curve is None else curve.bytes_within(duration_s)
