"""A delivery curve: bytes against time at one probability, read in both directions.

Invariant: both axes never descend; the curve begins at time 0 and goes on straight after its last
point. Must not know: where it comes from.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeliveryCurve:
    """Bytes that have arrived by a time with one probability, as straight pieces.

    Plain tuples and bisection: a curve has about ten points and is read many times one by one.
    """

    times_s: tuple[float, ...]
    """Ascending, the first 0. Unit: seconds from now."""
    num_bytes: tuple[float, ...]
    """Never descending; the first is what has arrived and is not yet acknowledged."""
    tail_bytes_per_s: float
    """Slope after the last point, at least 0."""

    @classmethod
    def from_points(
        cls, times_s: Sequence[float], num_bytes: Iterable[float], *, tail_bytes_per_s: float
    ) -> DeliveryCurve:
        """Put the origin in front and force the bytes never to descend."""
        values = tuple(itertools.accumulate(num_bytes, max, initial=0.0))
        return cls((0.0, *times_s), values, max(0.0, tail_bytes_per_s))

    @classmethod
    def straight(cls, bytes_per_s: float, *, delay_s: float = 0.0) -> DeliveryCurve:
        """Return the curve of one rate after a delay."""
        if delay_s <= 0.0:
            return cls((0.0,), (0.0,), bytes_per_s)
        return cls((0.0, delay_s), (0.0, 0.0), bytes_per_s)

    def delayed(self, delay_s: float) -> DeliveryCurve:
        """Return the curve when nothing arrives for a while first."""
        if delay_s <= 0.0:
            return self
        times = (0.0, *(time_s + delay_s for time_s in self.times_s))
        return DeliveryCurve(times, (0.0, *self.num_bytes), self.tail_bytes_per_s)

    def advanced(self, lead_s: float) -> DeliveryCurve:
        """Return the curve of what arrives this much earlier than this curve says."""
        if lead_s <= 0.0:
            return self
        later = [
            (time_s - lead_s, value)
            for time_s, value in zip(self.times_s, self.num_bytes, strict=True)
            if time_s > lead_s
        ]
        times = (0.0, *(time_s for time_s, _ in later))
        values = (self.bytes_within(lead_s), *(value for _, value in later))
        return DeliveryCurve(times, values, self.tail_bytes_per_s)

    def bytes_within(self, duration_s: float) -> float:
        """Return the bytes that have arrived by a time; 0 before now."""
        if duration_s <= 0.0:
            return 0.0
        after = bisect.bisect_right(self.times_s, duration_s)
        begin_s, value = self.times_s[after - 1], self.num_bytes[after - 1]
        if after == len(self.times_s):
            return value + self.tail_bytes_per_s * (duration_s - begin_s)
        slope = (self.num_bytes[after] - value) / (self.times_s[after] - begin_s)
        return value + slope * (duration_s - begin_s)

    def time_s(self, num_bytes: float) -> float:
        """Return the earliest time by which so many bytes have arrived; infinite when never."""
        if num_bytes <= self.num_bytes[0]:
            return 0.0
        after = bisect.bisect_left(self.num_bytes, num_bytes)
        begin_s, value = self.times_s[after - 1], self.num_bytes[after - 1]
        if after == len(self.num_bytes):
            if self.tail_bytes_per_s <= 0.0:
                return math.inf
            return begin_s + (num_bytes - value) / self.tail_bytes_per_s
        share = (num_bytes - value) / (self.num_bytes[after] - value)
        return begin_s + share * (self.times_s[after] - begin_s)
