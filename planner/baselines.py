"""Estimators that answer with one number, as the literature and the public code do.

Invariant: the time for n bytes is half a round trip plus n over the rate, whatever the quantile.
A sample that the window or the sender limited never lowers the estimate (wire.md: otherwise the
estimate locks in below the link for ever). Must not know: chunks, deadlines.
"""

from __future__ import annotations

import collections
import math
import statistics

from planner.samples import DeliverySample

MEDIAN_WINDOW = 5
"""Samples in the median. Source: wire.md, "median of 5, within 0-1 % of the link rate"."""


class PointEstimator:
    """A rate and a round trip; subclasses say which rate."""

    name = "point"

    def __init__(self) -> None:
        self._min_rtt_s = math.inf

    def _rate(self, now: float) -> float | None:
        raise NotImplementedError

    def _learn(self, rate: float, sample: DeliverySample) -> None:
        raise NotImplementedError

    def on_delivery(self, sample: DeliverySample) -> None:
        """Take in one sample."""
        self._min_rtt_s = min(self._min_rtt_s, sample.rtt_s)
        if sample.interval_s <= 0 or sample.bytes <= 0:
            return
        current = self._rate(sample.delivered_at_s)
        if sample.is_limited and current is not None and sample.bytes_per_s < current:
            return
        self._learn(sample.bytes_per_s, sample)

    def on_waiting(self, *, bytes_in_flight: int, oldest_age_s: float, now: float) -> None:
        """A point estimate does not learn from silence."""

    def rate_bytes_per_s(self, *, now: float) -> float | None:
        """Return the rate; None before the first sample."""
        return self._rate(now)

    @property
    def delay_s(self) -> float:
        """One-way delay: half of the least round trip seen, 0 before the first."""
        return self._min_rtt_s / 2 if math.isfinite(self._min_rtt_s) else 0.0

    def time_quantile_s(self, num_bytes: float, quantile: float, *, now: float) -> float:
        """Return delay + bytes / rate, for any quantile."""
        if num_bytes <= 0:
            return 0.0
        rate = self._rate(now)
        return math.inf if not rate else self.delay_s + num_bytes / rate

    def bytes_within(self, duration_s: float, quantile: float, *, now: float) -> float:
        """Return rate times what is left of the duration after the delay."""
        rate = self._rate(now)
        return 0.0 if not rate else max(0.0, duration_s - self.delay_s) * rate


class LastSample(PointEstimator):
    """The last sample is the future: what the paper does."""

    name = "last-sample"

    def __init__(self) -> None:
        super().__init__()
        self._last: float | None = None

    def _rate(self, now: float) -> float | None:
        return self._last

    def _learn(self, rate: float, sample: DeliverySample) -> None:
        self._last = rate


class MedianRate(PointEstimator):
    """The median of the last few samples."""

    name = "median-rate"

    def __init__(self, window: int = MEDIAN_WINDOW) -> None:
        super().__init__()
        self._rates: collections.deque[float] = collections.deque(maxlen=window)

    def _rate(self, now: float) -> float | None:
        return statistics.median(self._rates) if self._rates else None

    def _learn(self, rate: float, sample: DeliverySample) -> None:
        self._rates.append(rate)
