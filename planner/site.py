"""What a site has learned about its uplink: how well the recent past foretells the next seconds.

Owns `SiteModel`. For each situation (nothing measured yet, just begun, warm, silent) and each horizon
it learns (1) a linear forecast of the logarithm of the mean rate over that horizon from several
running means, and (2) a histogram of what the forecast missed. Invariant: every miss is counted
against the forecast that was made at the time, never against one fitted later, so that the histogram
is an honest record. Plain data in and out, so that an agent can keep it across restarts.
Must not know: transfers, chunks, clocks.
"""

from __future__ import annotations

import base64
import enum
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from planner.curve import FloatArray
from planner.errors import InvalidHistory

HORIZONS_S: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Horizons with a forecast of their own; in between it is interpolated. Unit: seconds."""
MEMORIES_S: Final = (0.25, 1.0, 4.0, 16.0)
"""Time constants of the running means that the forecast may use. Unit: seconds of delivery."""
NUM_FEATURES: Final = len(MEMORIES_S) + 1
"""The running means, as log ratios to the site's long-run mean, and a constant 1 for the bias."""
LONG_RUN_S: Final = 60.0
"""Time constant of the site's long-run mean. Unit: seconds of delivery."""
NUM_BINS: Final = 160
MISS_RANGE: Final = (-5.0, 3.0)
"""Range of a miss, as log(actual / forecast); the first and last bin take what is beyond."""
FORGETTING: Final = 0.98
"""Weight that a miss keeps for each new independent one: about the last 50 count."""
RIDGE: Final = 3.0
"""Weight of the starting forecast, in independent observations of one unit of log rate squared."""
POOLING: Final = 0.5
"""Weight of the misses of the next shorter and next longer horizon: widths change slowly with it."""
MAX_LOG_MISS: Final = 1.5
"""A miss counts for the fit at most this much (Huber): an outage must not bend the forecast."""
_FORMAT = 1


class Situation(enum.IntEnum):
    """What the forecast has to go on."""

    COLD = 0
    """Nothing was measured in this transfer."""
    YOUNG = 1
    """Measured for less than half a second."""
    WARM = 2
    """Measured for longer."""
    SILENT = 3
    """Acknowledgements are overdue."""


_START_SPREAD: Final = {
    Situation.COLD: 0.9,
    Situation.YOUNG: 0.45,
    Situation.WARM: 0.3,
    Situation.SILENT: 0.9,
}
"""Mean absolute log miss before anything is learned: a factor of 2.5 when nothing was measured, 1.35
when warm. On the real uplinks of bench.planner a warm 90 % quantile is 1.4 to 2 times the median; this
gives 1.6. Narrower starts (0.2) are late 1.3 points more often there and lose 0.0005 less."""
_START_WEIGHT: Final = {
    Situation.COLD: 8.0,
    Situation.YOUNG: 4.0,
    Situation.WARM: 2.0,
    Situation.SILENT: 4.0,
}
"""Weight of the starting histogram, in independent observations: a transfer begins once, so what it
is like to begin is learned slowest and the start is leaned on longest."""
_START_SILENT_BIAS: Final = -0.7
_EDGES: Final = np.linspace(MISS_RANGE[0], MISS_RANGE[1], NUM_BINS + 1)
_BIN_WIDTH: Final = (MISS_RANGE[1] - MISS_RANGE[0]) / NUM_BINS


class SiteModel:
    """Learned forecast and its misses, for one uplink."""

    def __init__(self) -> None:
        shape = (len(Situation), len(HORIZONS_S))
        self._start_weights = _start_weights()
        self._gram = np.zeros((*shape, NUM_FEATURES, NUM_FEATURES))
        self._moment = np.zeros((*shape, NUM_FEATURES))
        self._histogram = np.stack(
            [
                np.tile(_start_histogram(_START_SPREAD[situation], situation), (shape[1], 1))
                for situation in Situation
            ]
        )
        self._weights: FloatArray = self._start_weights.copy()
        self._cumulative = _cumulative(self._histogram)
        self._stale = [0] * len(Situation)
        self._quantile_rows: dict[tuple[int, float], FloatArray] = {}
        self.long_run_log: float | None = None
        """Mean log rate of the site; None before the first transfer. Unit: log(bytes/s)."""
        self.last_log: float | None = None
        """Log rate at the end of the latest transfer."""

    def observe_rate(self, log_rate: float, duration_s: float) -> None:
        """Let the long-run mean follow what was delivered for a while."""
        if self.long_run_log is None:
            self.long_run_log = log_rate
            return
        keep = math.exp(-duration_s / LONG_RUN_S)
        self.long_run_log = keep * self.long_run_log + (1.0 - keep) * log_rate

    def forecast(self, situation: Situation, features: FloatArray) -> FloatArray:
        """Return log(mean rate / long-run rate) per horizon.

        Args:
            situation: what there is to go on.
            features: float64 [NUM_FEATURES]: log ratios to the long-run mean, then 1.
        """
        self._refresh(situation)
        forecast: FloatArray = self._weights[situation] @ features
        return forecast

    def learn(
        self,
        situation: Situation,
        horizon: int,
        *,
        features: FloatArray,
        forecast: float,
        outcome: float,
        weight: float,
    ) -> None:
        """Take in how one forecast turned out.

        Args:
            situation: when it was made.
            horizon: index into `HORIZONS_S`.
            features: what it was made from.
            forecast: what it said.
            outcome: log(actual mean rate / long-run rate); may be -inf.
            weight: share of an independent observation, in (0, 1]; overlapping horizons count less.
        """
        miss = outcome - forecast
        clipped = forecast + min(max(miss, -MAX_LOG_MISS), MAX_LOG_MISS)
        keep = FORGETTING**weight
        gram, moment = self._gram[situation, horizon], self._moment[situation, horizon]
        gram *= keep
        gram += weight * np.outer(features, features)
        moment *= keep
        moment += (weight * clipped) * features
        row = self._histogram[situation, horizon]
        row *= keep
        position = (min(max(miss, MISS_RANGE[0]), MISS_RANGE[1]) - MISS_RANGE[0]) / _BIN_WIDTH
        row[min(NUM_BINS - 1, int(position))] += weight
        self._stale[situation] += 1

    def miss_quantiles(self, situation: Situation, quantile: float) -> FloatArray:
        """Return the quantile of log(actual / forecast) per horizon."""
        self._refresh(situation)
        key = (int(situation), quantile)
        row = self._quantile_rows.get(key)
        if row is None:
            row = np.array(
                [np.interp(quantile, cdf, _EDGES) for cdf in self._cumulative[situation]]
            )
            self._quantile_rows[key] = row
        return row

    def _refresh(self, situation: Situation) -> None:
        """Refit what has changed since the last time, once enough has."""
        if self._stale[situation] < 8:
            return
        self._stale[situation] = 0
        ridge = RIDGE * np.eye(NUM_FEATURES)
        start = self._start_weights[situation]
        self._weights[situation] = np.linalg.solve(
            self._gram[situation] + ridge, (self._moment[situation] + RIDGE * start)[..., None]
        )[..., 0]
        self._cumulative[situation] = _cumulative(self._histogram[situation])
        for key in [key for key in self._quantile_rows if key[0] == situation]:
            del self._quantile_rows[key]

    def to_plain(self) -> dict[str, Any]:
        """Return everything that was learned as JSON-able data."""
        return {
            "format": _FORMAT,
            "long_run_log": self.long_run_log,
            "last_log": self.last_log,
            "gram": _pack(self._gram),
            "moment": _pack(self._moment),
            "histogram": _pack(self._histogram),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SiteModel:
        """Restore what `to_plain` gave.

        Raises:
            InvalidHistory: it is not that.
        """
        if plain.get("format") != _FORMAT:
            raise InvalidHistory(f"link history has format {plain.get('format')!r}, not {_FORMAT}")
        site = cls()
        for name in ("gram", "moment", "histogram"):
            target: FloatArray = getattr(site, f"_{name}")
            target[...] = _unpack(name, plain.get(name), target.shape)
        if (site._histogram < 0).any():
            raise InvalidHistory("link history has a negative count")
        for name in ("long_run_log", "last_log"):
            value = plain.get(name)
            if value is not None and not (isinstance(value, float) and math.isfinite(value)):
                raise InvalidHistory(f"link history has {name} {value!r}")
            setattr(site, name, value)
        site._stale = [1_000_000] * len(Situation)
        return site


def _start_weights() -> FloatArray:
    """Forecast before anything is learned: mostly the memory of about half the horizon.

    On the real uplinks anything from a quarter to twice the horizon does as well (bench.planner); the
    shorter one follows a step sooner.
    """
    weights = np.zeros((len(Situation), len(HORIZONS_S), NUM_FEATURES))
    for row, horizon_s in enumerate(HORIZONS_S):
        nearness = np.array([-abs(math.log(horizon_s / 2.0 / memory)) for memory in MEMORIES_S])
        share = np.exp(nearness) / np.exp(nearness).sum()
        weights[Situation.WARM, row, :-1] = share
        weights[Situation.YOUNG, row, :-1] = share
        weights[Situation.COLD, row, :-1] = 0.5 / len(MEMORIES_S)
        weights[Situation.SILENT, row, :-1] = share
    return weights


def _start_histogram(spread: float, situation: Situation) -> FloatArray:
    """A Laplace distribution of that mean absolute miss."""
    bias = _START_SILENT_BIAS if situation is Situation.SILENT else 0.0
    centres = (_EDGES[:-1] + _EDGES[1:]) / 2
    density = np.exp(-np.abs(centres - bias) / spread)
    histogram: FloatArray = _START_WEIGHT[situation] * density / density.sum()
    return histogram


def _cumulative(histogram: FloatArray) -> FloatArray:
    """Distribution function at the bin edges, of misses pooled with the neighbouring horizons'."""
    padded = np.concatenate([histogram[..., :1, :], histogram, histogram[..., -1:, :]], axis=-2)
    pooled = histogram + POOLING * (padded[..., :-2, :] + padded[..., 2:, :])
    total = pooled.sum(axis=-1, keepdims=True)
    cdf = np.concatenate([np.zeros_like(total), np.cumsum(pooled, axis=-1) / total], axis=-1)
    return cdf


def _pack(array: FloatArray) -> str:
    """Little-endian float32, base64: small, and a restart needs no more digits."""
    return base64.b64encode(array.astype("<f4").tobytes()).decode("ascii")


def _unpack(name: str, text: object, shape: tuple[int, ...]) -> FloatArray:
    if not isinstance(text, str):
        raise InvalidHistory(f"link history has no {name}")
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError as error:
        raise InvalidHistory(f"link history has a {name} that is not base64") from error
    if len(raw) != 4 * math.prod(shape):
        raise InvalidHistory(f"link history has a {name} of {len(raw)} bytes")
    array = np.frombuffer(raw, "<f4").astype(np.float64).reshape(shape)
    if not np.isfinite(array).all():
        raise InvalidHistory(f"link history has a {name} that is not finite")
    return array
