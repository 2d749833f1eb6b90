from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from planner import DeliverySample, InvalidSample, MedianRate
from planner.estimator import PredictiveEstimator
from planner.site import SiteModel

SEGMENT = 50_000
RTT_S = 0.04


def feed(
    estimator: PredictiveEstimator,
    rates: list[float],
    *,
    start_s: float = 0.0,
    limited: bool = False,
) -> float:
    """Acknowledge one segment after another, each at its rate; return the time of the last."""
    now = start_s
    for rate in rates:
        gap_s = SEGMENT / rate
        now += gap_s
        estimator.on_delivery(
            DeliverySample(SEGMENT, gap_s, now, RTT_S + gap_s, window_limited=limited)
        )
    return now


def test_nothing_known_means_infinity_and_no_rate() -> None:
    estimator = PredictiveEstimator()
    assert estimator.rate_bytes_per_s(now=0.0) is None
    assert estimator.curve(0.5, now=0.0) is None
    assert estimator.time_quantile_s(1.0, 0.9, now=0.0) == math.inf
    assert estimator.time_quantile_s(0.0, 0.9, now=0.0) == 0.0
    assert estimator.bytes_within(1.0, 0.9, now=0.0) == 0.0


def test_the_first_sample_is_enough_for_a_sane_answer() -> None:
    estimator = PredictiveEstimator()
    now = feed(estimator, [1e6])
    rate = estimator.rate_bytes_per_s(now=now)
    assert rate is not None
    assert 0.5e6 < rate < 2e6
    assert 1.0 < estimator.time_quantile_s(1e6, 0.9, now=now) < 10.0


def test_a_steady_link_is_known_within_a_few_percent() -> None:
    estimator = PredictiveEstimator()
    now = feed(estimator, [1e6] * 200)
    assert estimator.rate_bytes_per_s(now=now) == pytest.approx(1e6, rel=0.05)
    assert estimator.time_quantile_s(2e6, 0.5, now=now) == pytest.approx(2.0, rel=0.06)
    assert estimator.time_quantile_s(2e6, 0.9, now=now) < 2.6


def test_after_a_step_the_new_rate_is_believed_within_a_second() -> None:
    for new in (0.25e6, 4e6):
        estimator = PredictiveEstimator()
        now = feed(estimator, [1e6] * 100)
        now = feed(estimator, [new] * max(4, round(1.0 * new / SEGMENT)), start_s=now)
        assert estimator.rate_bytes_per_s(now=now) == pytest.approx(new, rel=0.45)
        assert estimator.change_points == 1


def test_limited_samples_never_lower_the_estimate() -> None:
    estimator = PredictiveEstimator()
    now = feed(estimator, [1e6] * 50)
    before = estimator.rate_bytes_per_s(now=now)
    assert before is not None
    now = feed(estimator, [2e5] * 10, start_s=now, limited=True)
    after = estimator.rate_bytes_per_s(now=now)
    assert after is not None
    assert after >= before * 0.999
    feed(estimator, [3e6] * 10, start_s=now, limited=True)
    faster = estimator.rate_bytes_per_s(now=now)
    assert faster is not None
    assert faster > before


def test_silence_lowers_the_estimate_before_any_late_acknowledgement() -> None:
    estimator = PredictiveEstimator()
    now = feed(estimator, [1e6] * 50)
    before = estimator.bytes_within(2.0, 0.5, now=now)
    seen = []
    for step in range(1, 8):
        later = now + 0.25 * step
        estimator.on_waiting(bytes_in_flight=SEGMENT, oldest_age_s=0.25 * step, now=later)
        seen.append(estimator.bytes_within(2.0, 0.5, now=later))
    assert seen[-1] < 0.5 * before
    assert seen == sorted(seen, reverse=True)
    estimator.on_waiting(bytes_in_flight=0, oldest_age_s=0.0, now=now + 2.0)
    assert estimator.bytes_within(2.0, 0.5, now=now) > seen[-1]


def test_silence_before_the_first_acknowledgement_counts_too() -> None:
    site = SiteModel()
    feed(PredictiveEstimator(site), [1e6] * 50)
    estimator = PredictiveEstimator(site)
    cold = estimator.bytes_within(2.0, 0.5, now=100.0)
    estimator.on_waiting(bytes_in_flight=SEGMENT, oldest_age_s=1.0, now=101.0)
    assert estimator.bytes_within(2.0, 0.5, now=101.0) < 0.7 * cold


def test_a_site_is_remembered_by_the_next_transfer() -> None:
    site = SiteModel()
    feed(PredictiveEstimator(site), [1e6] * 100)
    rate = PredictiveEstimator(SiteModel.from_plain(site.to_plain())).rate_bytes_per_s(now=0.0)
    assert rate is not None
    assert 0.5e6 < rate < 2e6


def test_a_noisy_site_gives_wider_quantiles_than_a_steady_one() -> None:
    widths = []
    for spread in (0.02, 0.8):
        rng = random.Random(5)
        site = SiteModel()
        for _ in range(6):
            estimator = PredictiveEstimator(site)
            level = 1e6
            rates = []
            for _ in range(20):
                level = 1e6 * math.exp(rng.gauss(0.0, spread))
                rates += [level] * 10
            now = feed(estimator, rates)
            estimator.on_end(now=now)
        estimator = PredictiveEstimator(site)
        now = feed(estimator, [1e6] * 40)
        widths.append(
            estimator.time_quantile_s(1e6, 0.9, now=now)
            / estimator.time_quantile_s(1e6, 0.5, now=now)
        )
    assert widths[0] < 1.3
    assert widths[1] > widths[0] + 0.1


def test_overlapping_samples_are_counted_once() -> None:
    """BBR samples reach back over several acknowledgements; their sum would count bytes twice."""
    estimator = PredictiveEstimator()
    acks: list[float] = []
    now = 0.0
    for step in range(60):
        now += 0.05 if step < 30 else 0.2
        acks.append(now)
        back = max(0, len(acks) - 5)
        begin = acks[back - 1] if back > 0 else 0.0
        estimator.on_delivery(DeliverySample(SEGMENT * (len(acks) - back), now - begin, now, RTT_S))
    assert estimator._delivered == pytest.approx(60 * SEGMENT, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1e4, 1e7), min_size=1, max_size=40),
    st.lists(st.floats(1.0, 1e8), min_size=2, max_size=2),
    st.lists(st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 0.99]), min_size=2, max_size=2),
)
def test_answers_are_monotone_in_bytes_and_quantile(
    rates: list[float], sizes: list[float], quantiles: list[float]
) -> None:
    estimator = PredictiveEstimator()
    now = feed(estimator, rates)
    small, large = sorted(sizes)
    low, high = sorted(quantiles)
    assert (
        estimator.time_quantile_s(small, low, now=now)
        <= estimator.time_quantile_s(large, low, now=now) + 1e-9
    )
    assert estimator.time_quantile_s(large, low, now=now) <= estimator.time_quantile_s(
        large, high, now=now
    ) * (1 + 1e-9)


def test_samples_that_cannot_be_are_refused() -> None:
    for bad in (
        (-1, 0.1, 0.0, 0.1),
        (1, -0.1, 0.0, 0.1),
        (1, 0.1, math.nan, 0.1),
        (1, 0.1, 0.0, -1.0),
    ):
        with pytest.raises(InvalidSample):
            DeliverySample(*bad)
    assert DeliverySample(1, 0.0, 0.0, 0.1).bytes_per_s == math.inf


def test_a_sample_of_a_few_bytes_says_nothing_about_the_rate() -> None:
    """The question's own bytes are acknowledged first, after a whole round trip."""
    for estimator in (PredictiveEstimator(), MedianRate()):
        estimator.on_delivery(DeliverySample(0, 0.0, 1.0, 0.1))
        estimator.on_delivery(DeliverySample(200, 0.08, 1.0, 0.08))
        assert estimator.rate_bytes_per_s(now=1.0) is None


def test_the_end_of_a_transfer_is_learned_from() -> None:
    site, other = SiteModel(), SiteModel()
    estimator = PredictiveEstimator(site)
    now = feed(estimator, [1e6] * 30)
    twin = PredictiveEstimator(other)
    feed(twin, [1e6] * 30)
    estimator.on_end(now=now)
    assert site._histogram.sum() != other._histogram.sum()
    PredictiveEstimator(SiteModel()).on_end(now=0.0)
