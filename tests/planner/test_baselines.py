from __future__ import annotations

import pytest

from planner.baselines import Ewma, HarmonicMean, MedianRate, Oracle, RobustMpc
from tests.planner.builders import sample


def test_harmonic_mean_is_pulled_to_the_slow_ones() -> None:
    estimator = HarmonicMean()
    for at, rate in enumerate((1e6, 1e6, 1e6, 1e6, 10e6)):
        estimator.on_delivery(sample(rate, float(at)))
    assert estimator.rate_bytes_per_s(now=5.0) == pytest.approx(5 / (4 / 1e6 + 1 / 10e6), rel=1e-6)


def test_ewma_moves_by_its_gain() -> None:
    estimator = Ewma()
    estimator.on_delivery(sample(1e6, 0.0))
    estimator.on_delivery(sample(2e6, 1.0))
    assert estimator.rate_bytes_per_s(now=1.0) == pytest.approx(1.125e6)


def test_median_ignores_one_outlier() -> None:
    estimator = MedianRate()
    for at, rate in enumerate((1e6, 9e6, 1e6)):
        estimator.on_delivery(sample(rate, float(at)))
    assert estimator.rate_bytes_per_s(now=3.0) == pytest.approx(1e6)


def test_robust_mpc_divides_by_its_worst_error() -> None:
    estimator = RobustMpc()
    assert estimator.rate_bytes_per_s(now=0.0) is None
    for step in range(40):
        estimator.on_delivery(sample(1e6, 0.1 * step))
    assert estimator.rate_bytes_per_s(now=4.0) == pytest.approx(1e6)
    for step in range(10):
        estimator.on_delivery(sample(0.5e6, 4.0 + 0.1 * step))
    # The forecast of 1 MB/s for a stretch of 0.5 was off by 100 %.
    assert (estimator.rate_bytes_per_s(now=5.0) or 0.0) < 0.55e6


def test_robust_mpc_answers_from_a_single_sample() -> None:
    estimator = RobustMpc()
    estimator.on_delivery(sample(1e6, 0.0))
    assert estimator.rate_bytes_per_s(now=0.0) == pytest.approx(1e6)


def test_the_oracle_knows_a_step_before_it_comes() -> None:
    def until(time_s: float) -> float:
        return 1e6 * min(time_s, 2.0) + 4e6 * max(0.0, time_s - 2.0)

    oracle = Oracle(until, delay_s=0.02, busy_since_s=0.0)
    oracle.on_delivery(sample(1.0, 0.0))
    oracle.on_waiting(bytes_in_flight=1, oldest_age_s=9.0, now=0.0)
    oracle.on_end(now=0.0)
    assert oracle.time_quantile_s(6e6, 0.5, now=0.0) == pytest.approx(3.02, abs=0.01)
    assert oracle.bytes_within(3.02, 0.95, now=0.0) == pytest.approx(6e6, rel=0.01)
    assert oracle.rate_bytes_per_s(now=1.5) == pytest.approx(2.5e6)
    assert oracle.curve(0.5, now=1.0) is oracle.curve(0.9, now=1.0)
