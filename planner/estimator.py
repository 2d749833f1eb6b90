"""The estimator that answers with a distribution: `PredictiveEstimator`.

Bytes delivered within a time h are h times the mean rate over h. The site's model forecasts the
logarithm of that mean from running means of several memories and knows how far such forecasts missed;
the two give quantiles of the bytes within h, and the same curve read the other way gives quantiles of
the time for n bytes (T(n) <= h exactly when bytes(h) >= n). Invariants: the answer is monotone in the
time, in the bytes and in the quantile; a sample limited by window or sender never lowers it; silence
lowers it before the late acknowledgement does. Must not know: chunks, deadlines, clocks.

Source: docs/planner.md section 2; running means and samples as in wire.md; calibration by counting
past misses as in split conformal prediction (Vovk, Gammerman and Shafer 2005).
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.curve import DeliveryCurve, FloatArray
from planner.samples import CurveReader, DeliverySample
from planner.site import HORIZONS_S, MEMORIES_S, NUM_FEATURES, SiteModel, Situation

WARM_AFTER_S: Final = 0.5
"""Measured time after which running means are believed. Source: wire.md, "converges in 0.1-0.7 s"."""
ANCHOR_EVERY_S: Final = 0.1
"""A forecast is put on record this often at most, and checked later."""
MIN_SILENCE_S: Final = 0.15
"""Shortest gap between acknowledgements that counts as silence."""
FIRST_SILENCE_S: Final = 0.4
"""The first acknowledgement is overdue after this: a long round trip and a segment at 2 Mbit/s."""
SILENCE_GAPS: Final = 4.0
"""An acknowledgement is overdue after this many times the usual gap."""
SHIFT_LOG_RATIO: Final = 0.7
"""A change point: the shortest memory is off the longest by a factor of two ..."""
SHIFT_HOLD_S: Final = 0.4
"""... for this long. Then the long memories start over from the short one."""
MIN_RATE_BYTES_PER_S: Final = 100.0
"""Floor for logarithms: far below any link that carries a KV cache."""
END_SHARE: Final = 0.5
"""At the end of a transfer a forecast is looked at when this share of its horizon has passed."""
_MAX_ANCHORS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A forecast on record."""

    at_s: float
    delivered: float
    situation: Situation
    features: FloatArray
    forecast: FloatArray
    reference_log: float


class PredictiveEstimator(CurveReader):
    """Quantiles of delivery, learned online on top of the site's model."""

    name = "predictive"

    def __init__(self, site: SiteModel | None = None) -> None:
        self.site = site if site is not None else SiteModel()
        self._sums = [0.0] * len(MEMORIES_S)
        self._weights = [0.0] * len(MEMORIES_S)
        self._last_ack_s: float | None = None
        self._measured_s = 0.0
        self._delivered = 0.0
        self._usual_gap_s = 0.0
        self._history: collections.deque[tuple[float, float]] = collections.deque(maxlen=512)
        self._min_rtt_s = math.inf
        self._shift_s = 0.0
        self._silent_since_s: float | None = None
        self._silent_now_s = 0.0
        self._anchors: collections.deque[_Anchor] = collections.deque(maxlen=_MAX_ANCHORS)
        self._next_index = [0] * len(HORIZONS_S)
        self._first_index = 0
        self._last_anchor_s = -math.inf
        self._last_learned_s = [-math.inf] * len(HORIZONS_S)
        self._forecast_key: tuple[float, float, Situation] | None = None
        self._forecast: FloatArray = np.zeros(len(HORIZONS_S))
        self.change_points = 0
        """Change points seen in this transfer."""

    # ---- what comes in ---------------------------------------------------------------------------

    def on_delivery(self, sample: DeliverySample) -> None:
        """Take in one sample."""
        now = sample.delivered_at_s
        self._min_rtt_s = min(self._min_rtt_s, sample.rtt_s)
        if not sample.is_telling:
            return
        rate = max(sample.bytes_per_s, MIN_RATE_BYTES_PER_S)
        if sample.is_limited:
            # Only a lower bound, and what follows is no record of the link's doing either.
            self._forget_anchors()
            self._silent_since_s = None
            known = self._mean(0)
            if known is not None and rate < known:
                self._last_ack_s = now
                return
        num_bytes, gap_s = self._newly_delivered(sample)
        rate = max(num_bytes / gap_s, MIN_RATE_BYTES_PER_S)
        if self._last_ack_s is None:
            if not self._anchors:
                self._record(now, Situation.COLD)
            self._usual_gap_s = min(gap_s, MIN_SILENCE_S)
        else:
            self._check_anchors(now, num_bytes, gap_s)
            self._usual_gap_s += 0.1 * (min(gap_s, 1.0) - self._usual_gap_s)
        self._silent_since_s = None
        self._delivered += num_bytes
        self._history.append((now, self._delivered))
        self._last_ack_s = now
        self._measured_s += gap_s
        for row, memory_s in enumerate(MEMORIES_S):
            keep = math.exp(-gap_s / memory_s)
            self._sums[row] = keep * self._sums[row] + (1.0 - keep) * rate
            self._weights[row] = keep * self._weights[row] + (1.0 - keep)
        self._watch_for_shift(gap_s)
        self.site.observe_rate(math.log(rate), gap_s)
        self.site.last_log = math.log(max(self._mean(1) or rate, MIN_RATE_BYTES_PER_S))
        if now - self._last_anchor_s >= ANCHOR_EVERY_S:
            self._record(now, self._situation)

    def on_waiting(self, *, bytes_in_flight: int, oldest_age_s: float, now: float) -> None:
        """Take in that acknowledgements are overdue."""
        if bytes_in_flight <= 0:
            self._silent_since_s = None
            return
        silence_s = oldest_age_s
        if self._last_ack_s is not None:
            silence_s = min(now - self._last_ack_s, oldest_age_s)
        if silence_s < self._overdue_s or not self._is_informed:
            self._silent_since_s = None
            return
        self._silent_since_s = now - silence_s
        self._silent_now_s = now
        if now - self._last_anchor_s >= ANCHOR_EVERY_S:
            self._record(now, Situation.SILENT)

    def on_end(self, *, now: float) -> None:
        """Take in that nothing more is sent: look at the forecasts that were more than half over.

        Without this, long horizons would only be learned from transfers that took long.
        """
        if self._last_ack_s is not None:
            for row, horizon_s in enumerate(HORIZONS_S):
                first = self._next_index[row] - self._first_index
                for anchor in list(self._anchors)[first:]:
                    span_s = self._last_ack_s - anchor.at_s
                    if span_s < END_SHARE * horizon_s:
                        break
                    self._compare(anchor, row, self._delivered - anchor.delivered, span_s)
        self._forget_anchors()

    # ---- what goes out ---------------------------------------------------------------------------

    def rate_bytes_per_s(self, *, now: float) -> float | None:
        """Return the median of the mean rate over the next second."""
        if not self._is_informed:
            return None
        return self._curve_of_acks(0.5, now).bytes_within(1.0)

    def curve(self, quantile: float, *, now: float) -> DeliveryCurve | None:
        """Return the bytes that arrive within any time with probability ``quantile``."""
        if not self._is_informed:
            return None
        curve = self._curve_of_acks(quantile, now)
        if self._acks_are_flowing(now):
            # The last byte arrives half a round trip before its acknowledgement does.
            return curve.advanced(self._min_rtt_s / 2)
        return curve.delayed(self._min_rtt_s / 2 if math.isfinite(self._min_rtt_s) else 0.0)

    # ---- inside ----------------------------------------------------------------------------------

    def _curve_of_acks(self, quantile: float, now: float) -> DeliveryCurve:
        """The curve of a busy link, acknowledgement to acknowledgement."""
        situation = self._situation
        key = (now, self._delivered, situation)
        if self._forecast_key != key:
            forecast = self.site.forecast(situation, self._features(situation, now))
            self._forecast_key, self._forecast = key, self._reference_log() + forecast
        # Enough bytes with probability q means: the rate's lower quantile 1 - q.
        misses = self.site.miss_quantiles(situation, 1.0 - quantile)
        rates = np.exp(self._forecast + misses).tolist()
        values = [rate * horizon_s for rate, horizon_s in zip(rates, HORIZONS_S, strict=True)]
        return DeliveryCurve.from_points(HORIZONS_S, values, tail_bytes_per_s=rates[-1])

    @property
    def _is_informed(self) -> bool:
        return self._last_ack_s is not None or self.site.long_run_log is not None

    @property
    def _situation(self) -> Situation:
        if self._silent_since_s is not None:
            return Situation.SILENT
        if self._last_ack_s is None:
            return Situation.COLD
        return Situation.WARM if self._measured_s >= WARM_AFTER_S else Situation.YOUNG

    @property
    def _overdue_s(self) -> float:
        if self._last_ack_s is None:
            return FIRST_SILENCE_S
        return max(MIN_SILENCE_S, SILENCE_GAPS * self._usual_gap_s)

    def _acks_are_flowing(self, now: float) -> bool:
        return self._last_ack_s is not None and now - self._last_ack_s <= self._min_rtt_s

    def _mean(self, row: int) -> float | None:
        weight = self._weights[row]
        return self._sums[row] / weight if weight > 0.0 else None

    def _reference_log(self) -> float:
        if self.site.long_run_log is not None:
            return self.site.long_run_log
        return math.log(max(self._mean(0) or 0.0, MIN_RATE_BYTES_PER_S))

    def _features(self, situation: Situation, now: float) -> FloatArray:
        """Log ratios of the running means to the site's mean, and 1."""
        features = np.empty(NUM_FEATURES)
        features[-1] = 1.0
        reference = self._reference_log()
        if situation is Situation.COLD:
            last = self.site.last_log
            features[:-1] = 0.0 if last is None else last - reference
            return features
        silence_s = 0.0
        if situation is Situation.SILENT and self._silent_since_s is not None:
            silence_s = max(0.0, now - self._silent_since_s)
        before = math.exp(self.site.last_log if self.site.last_log is not None else reference)
        for row, memory_s in enumerate(MEMORIES_S):
            mean = self._mean(row)
            mean = before if mean is None else mean
            # In silence the running means are what they would be if nothing had come since.
            log_mean = math.log(max(mean, MIN_RATE_BYTES_PER_S))
            features[row] = max(log_mean - silence_s / memory_s, log_mean - 3.0) - reference
        return features

    def _watch_for_shift(self, gap_s: float) -> None:
        """Start the long memories over when the short one says another level for a while."""
        short, long = self._mean(0), self._mean(len(MEMORIES_S) - 1)
        if short is None or long is None:
            return
        ratio = math.log(max(short, MIN_RATE_BYTES_PER_S) / max(long, MIN_RATE_BYTES_PER_S))
        self._shift_s = self._shift_s + gap_s if abs(ratio) > SHIFT_LOG_RATIO else 0.0
        if self._shift_s < SHIFT_HOLD_S:
            return
        self.change_points += 1
        self._shift_s = 0.0
        for row in range(1, len(MEMORIES_S)):
            # The weight of the time since the shift began: what was before is forgotten.
            weight = 1.0 - math.exp(-SHIFT_HOLD_S / MEMORIES_S[row])
            self._weights[row] = weight
            self._sums[row] = weight * short

    def _newly_delivered(self, sample: DeliverySample) -> tuple[float, float]:
        """Return the bytes delivered since the acknowledgement before, and in how many seconds.

        A sample's stretch began at an earlier acknowledgement, so the total then plus the sample's bytes
        is the total now. Rates of overlapping stretches times the gaps would count too much whenever
        the link slows down.
        """
        now = sample.delivered_at_s
        if self._last_ack_s is None:
            return float(sample.bytes), sample.interval_s
        begin_s = now - sample.interval_s
        if begin_s >= self._last_ack_s:
            return float(sample.bytes), sample.interval_s
        before = next(
            (total for at_s, total in reversed(self._history) if at_s <= begin_s + 1e-6),
            None,
        )
        gap_s = max(now - self._last_ack_s, 1e-6)
        if before is None:
            return sample.bytes_per_s * gap_s, gap_s
        return max(0.0, before + sample.bytes - self._delivered), gap_s

    # ---- keeping the record ----------------------------------------------------------------------

    def _record(self, now: float, situation: Situation) -> None:
        if situation is Situation.COLD and self.site.long_run_log is None:
            return
        if len(self._anchors) == _MAX_ANCHORS:
            self._drop_first_anchor()
        features = self._features(situation, now)
        forecast = self.site.forecast(situation, features)
        self._anchors.append(
            _Anchor(now, self._delivered, situation, features, forecast, self._reference_log())
        )
        self._last_anchor_s = now

    def _drop_first_anchor(self) -> None:
        self._anchors.popleft()
        self._first_index += 1
        self._next_index = [max(index, self._first_index) for index in self._next_index]

    def _forget_anchors(self) -> None:
        """What follows says nothing about the forecasts on record."""
        self._first_index += len(self._anchors)
        self._anchors.clear()
        self._next_index = [self._first_index] * len(HORIZONS_S)

    def _check_anchors(self, now: float, num_bytes: float, gap_s: float) -> None:
        """Compare each forecast on record with what came, as its horizon passes.

        Delivery between two acknowledgements counts as even.
        """
        end = self._first_index + len(self._anchors)
        for row, horizon_s in enumerate(HORIZONS_S):
            index = self._next_index[row]
            while index < end:
                anchor = self._anchors[index - self._first_index]
                due_s = anchor.at_s + horizon_s
                if due_s > now:
                    break
                index += 1
                share = 1.0 - (now - due_s) / gap_s
                delivered = self._delivered + share * num_bytes - anchor.delivered
                self._compare(anchor, row, delivered, horizon_s)
            self._next_index[row] = index

    def _compare(self, anchor: _Anchor, row: int, delivered: float, span_s: float) -> None:
        """Let the site learn from one forecast, unless it overlaps too much with the one before."""
        fresh_s = anchor.at_s - self._last_learned_s[row]
        if fresh_s < HORIZONS_S[row] / 8 and anchor.situation is Situation.WARM:
            return
        self._last_learned_s[row] = anchor.at_s
        rate = max(delivered, 0.0) / span_s
        self.site.learn(
            anchor.situation,
            row,
            features=anchor.features,
            forecast=float(anchor.forecast[row]),
            outcome=(math.log(rate) if rate > 0 else -math.inf) - anchor.reference_log,
            weight=min(1.0, max(fresh_s / HORIZONS_S[row], 0.125)),
        )
