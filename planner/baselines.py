"""Estimators that answer with one number, as the literature and the public code do.

Invariant: the time for n bytes is half a round trip plus n over the rate, whatever the quantile.
A sample that the window or the sender limited never lowers the estimate (wire.md: otherwise the
estimate locks in below the link for ever). Must not know: chunks, deadlines.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable

import numpy as np

from planner.curve import DeliveryCurve
from planner.samples import CurveReader, DeliverySample

MEDIAN_WINDOW = 5
"""Samples in the median. Source: wire.md, "median of 5, within 0-1 % of the link rate"."""

EWMA_GAIN = 0.125
"""Gain of the mean. Source: RFC 6298, section 2 (the gain of the smoothed round trip)."""
HARMONIC_WINDOW = 5
"""Samples in the harmonic mean. Source: Yin et al., SIGCOMM 2015 (past 5 chunks)."""
MPC_STRETCH_S = 1.0
"""Length of what counts as one observation for RobustMPC. Unit: seconds."""


class PointEstimator(CurveReader):
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
        if not sample.is_telling:
            return
        current = self._rate(sample.delivered_at_s)
        if sample.is_limited and current is not None and sample.bytes_per_s < current:
            return
        self._learn(sample.bytes_per_s, sample)

    def on_waiting(self, *, bytes_in_flight: int, oldest_age_s: float, now: float) -> None:
        """A point estimate does not learn from silence."""

    def on_end(self, *, now: float) -> None:
        """There is nothing to keep."""

    def rate_bytes_per_s(self, *, now: float) -> float | None:
        """Return the rate; None before the first sample."""
        return self._rate(now)

    @property
    def delay_s(self) -> float:
        """One-way delay: half of the least round trip seen, 0 before the first."""
        return self._min_rtt_s / 2 if math.isfinite(self._min_rtt_s) else 0.0

    def curve(self, quantile: float, *, now: float) -> DeliveryCurve | None:
        """Return the straight curve of the rate, for any quantile."""
        rate = self._rate(now)
        return None if not rate else DeliveryCurve.straight(rate, delay_s=self.delay_s)


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


class Ewma(PointEstimator):
    """Exponentially weighted mean of the samples."""

    name = "ewma"

    def __init__(self, gain: float = EWMA_GAIN) -> None:
        super().__init__()
        self._gain = gain
        self._mean: float | None = None

    def _rate(self, now: float) -> float | None:
        return self._mean

    def _learn(self, rate: float, sample: DeliverySample) -> None:
        self._mean = rate if self._mean is None else self._mean + self._gain * (rate - self._mean)


class HarmonicMean(PointEstimator):
    """Harmonic mean of the last five samples: robust against single fast ones."""

    name = "harmonic-mean"

    def __init__(self, window: int = HARMONIC_WINDOW) -> None:
        super().__init__()
        self._rates: collections.deque[float] = collections.deque(maxlen=window)

    def _rate(self, now: float) -> float | None:
        return statistics.harmonic_mean(self._rates) if self._rates else None

    def _learn(self, rate: float, sample: DeliverySample) -> None:
        self._rates.append(rate)


class RobustMpc(PointEstimator):
    """Harmonic mean of five, divided by one plus the greatest error of the last five forecasts.

    A video chunk takes seconds; here a sample is the mean over about as long as the round trip, so
    samples are gathered into stretches of a second first.

    Source: Yin et al., SIGCOMM 2015 (RobustMPC, past 5 chunks).
    """

    name = "robust-mpc"

    def __init__(self, window: int = HARMONIC_WINDOW, stretch_s: float = MPC_STRETCH_S) -> None:
        super().__init__()
        self._rates: collections.deque[float] = collections.deque(maxlen=window)
        self._errors: collections.deque[float] = collections.deque(maxlen=window)
        self._stretch_s = stretch_s
        self._stretch: list[float] = []
        self._began_s = 0.0

    def _rate(self, now: float) -> float | None:
        rates = list(self._rates)
        if not rates:
            rates = self._stretch[:]
        if not rates:
            return None
        return statistics.harmonic_mean(rates) / (1.0 + max(self._errors, default=0.0))

    def _learn(self, rate: float, sample: DeliverySample) -> None:
        if not self._stretch:
            self._began_s = sample.delivered_at_s - sample.interval_s
        self._stretch.append(rate)
        if sample.delivered_at_s - self._began_s < self._stretch_s:
            return
        mean = statistics.fmean(self._stretch)
        if self._rates:
            forecast = statistics.harmonic_mean(self._rates)
            self._errors.append(abs(forecast - mean) / mean)
        self._rates.append(mean)
        self._stretch.clear()


class Oracle(CurveReader):
    """Knows the link's future: the bound for everybody else, and no estimator at all.

    Args:
        bytes_until: bytes that the link can carry from its beginning to a moment.
        delay_s: one-way delay.
        busy_since_s: since when the sender has kept the link busy.
    """

    name = "oracle"

    def __init__(
        self, bytes_until: Callable[[float], float], *, delay_s: float, busy_since_s: float
    ) -> None:
        self._bytes_until = bytes_until
        self._busy_since_s = busy_since_s
        self._cached: tuple[float, DeliveryCurve] | None = None
        self._delay_s = delay_s

    def on_delivery(self, sample: DeliverySample) -> None:
        """There is nothing to learn."""

    def on_waiting(self, *, bytes_in_flight: int, oldest_age_s: float, now: float) -> None:
        """There is nothing to learn."""

    def on_end(self, *, now: float) -> None:
        """There is nothing to keep."""

    def rate_bytes_per_s(self, *, now: float) -> float | None:
        """Return the mean rate of the next second."""
        return self._bytes_until(now + 1.0) - self._bytes_until(now)

    def curve(self, quantile: float, *, now: float) -> DeliveryCurve | None:
        """Return what the link will carry, in steps that grow with the distance."""
        if self._cached is not None and self._cached[0] == now:
            return self._cached[1]
        # What left the link within the last round trip is not yet acknowledged.
        begin = self._bytes_until(max(self._busy_since_s, now - 2 * self._delay_s))
        values = [self._bytes_until(now + time_s) - begin for time_s in _ORACLE_TIMES_S]
        tail = (values[-1] - values[-2]) / (_ORACLE_TIMES_S[-1] - _ORACLE_TIMES_S[-2])
        curve = DeliveryCurve.from_points(_ORACLE_TIMES_S, values, tail_bytes_per_s=tail)
        self._cached = (now, curve.delayed(self._delay_s))
        return self._cached[1]


_ORACLE_TIMES_S = tuple(
    float(value)
    for value in np.unique(np.concatenate([np.arange(1, 160) * 0.05, np.geomspace(8, 400, 40)]))
)
