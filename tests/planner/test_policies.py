from __future__ import annotations

import math

import pytest

from planner import (
    CachegenPolicy,
    FixedPolicy,
    InvalidState,
    LastSample,
    LevelUnavailable,
    MedianRate,
    Reason,
    Stage,
    TextPolicy,
    UnknownEstimator,
    UnknownPolicy,
    default_estimator,
    estimator_names,
    make_estimator,
    make_policy,
    policy_names,
)
from tests.planner.builders import options, sample, state


def known(rate: float) -> LastSample:
    estimator = LastSample()
    estimator.on_delivery(sample(rate, 0.0))
    return estimator


def test_text_policy_recomputes_chunks_in_order_and_then_stops() -> None:
    first = TextPolicy().next_decision(state(options(0), options(1)), LastSample(), 0.0)
    assert first is not None
    assert (first.chunk_index, first.choice.is_text, first.reason) == (0, True, Reason.FIXED)
    assert first.expected_ttft_s == pytest.approx(4.0)
    done = state(options(0), stages={0: (Stage.IN_FLIGHT, "text")})
    assert TextPolicy().next_decision(done, LastSample(), 0.0) is None


def test_text_policy_names_the_chunk_that_cannot_be_recomputed() -> None:
    with pytest.raises(LevelUnavailable, match="chunk 0"):
        TextPolicy().next_decision(state(options(0, text=False)), LastSample(), 0.0)


def test_fixed_policy_takes_its_level_and_expects_link_plus_decode() -> None:
    decision = FixedPolicy("cachegen:1").next_decision(
        state(options(0), options(1), tail_s=0.5), known(1e6), 0.0
    )
    assert decision is not None
    assert decision.choice.name == "cachegen:1"
    assert decision.expected_ttft_s == pytest.approx(0.02 + 4.0 + 0.1 + 0.5)
    assert decision.meets_deadline


def test_fixed_policy_refuses_a_level_that_is_not_there() -> None:
    with pytest.raises(LevelUnavailable, match="'klt:7'"):
        FixedPolicy("klt:7").next_decision(state(options(0)), known(1e6), 0.0)


def test_fixed_policy_before_any_sample_expects_infinity() -> None:
    decision = FixedPolicy("cachegen:0").next_decision(state(options(0)), LastSample(), 0.0)
    assert decision is not None
    assert math.isinf(decision.expected_ttft_s)
    assert not decision.meets_deadline


def test_cachegen_begins_with_its_medium_level() -> None:
    decision = CachegenPolicy().next_decision(state(options(0), options(1)), LastSample(), 0.0)
    assert decision is not None
    assert (decision.choice.name, decision.reason) == ("cachegen:1", Reason.DEFAULT_LEVEL)


@pytest.mark.parametrize(
    ("deadline_s", "level", "reason"),
    [
        (8.13, "cachegen:0", Reason.BEST_THAT_FITS),
        (8.11, "cachegen:1", Reason.BEST_THAT_FITS),
        (4.11, "cachegen:2", Reason.BEST_THAT_FITS),
        (2.11, "text", Reason.TEXT_NOTHING_FITS),
    ],
)
def test_cachegen_takes_the_best_level_whose_transfer_and_decode_fit(
    deadline_s: float, level: str, reason: Reason
) -> None:
    """Two chunks of 4, 2 or 1 MB at 1 MB/s, 20 ms of delay and 0.1 s for the last decode."""
    decision = CachegenPolicy().next_decision(
        state(options(0), options(1), deadline_s=deadline_s), known(1e6), 0.0
    )
    assert decision is not None
    assert (decision.choice.name, decision.reason) == (level, reason)


def test_cachegen_without_text_sends_the_smallest_level() -> None:
    decision = CachegenPolicy().next_decision(
        state(options(0, text=False), deadline_s=0.5), known(1e6), 0.0
    )
    assert decision is not None
    assert (decision.choice.name, decision.reason) == ("cachegen:2", Reason.FINISH_FIRST)


def test_cachegen_counts_what_is_in_flight_and_what_has_passed() -> None:
    busy = state(options(0), deadline_s=5.2, bytes_in_flight=2_000_000)
    decision = CachegenPolicy().next_decision(busy, known(1e6), 0.0)
    assert decision is not None
    assert decision.choice.name == "cachegen:1"
    late = state(options(0), deadline_s=5.2, elapsed_s=3.0)
    decision = CachegenPolicy().next_decision(late, known(1e6), 0.0)
    assert decision is not None
    assert decision.choice.name == "cachegen:1"


def test_registries_know_their_names_and_refuse_others_by_name() -> None:
    assert make_policy("fixed:klt:2").name == "fixed:klt:2"
    for name in policy_names():
        if "<" not in name:
            assert make_policy(name).name == name
    for name in estimator_names():
        assert make_estimator(name).name == name
    with pytest.raises(UnknownPolicy, match=r"'fastest'; known: text"):
        make_policy("fastest")
    with pytest.raises(UnknownPolicy):
        make_policy("fixed:")
    with pytest.raises(UnknownEstimator, match="'psychic'"):
        make_estimator("psychic")


def test_states_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidState, match="chunk 2 follows chunk 0"):
        state(options(0), options(2))
    with pytest.raises(InvalidState):
        state(options(0), deadline_s=0.0)


def test_a_limited_sample_never_lowers_a_point_estimate() -> None:
    for estimator in (LastSample(), MedianRate()):
        estimator.on_delivery(sample(1e6, 0.0))
        estimator.on_delivery(sample(5e5, 1.0, limited=True))
        assert estimator.rate_bytes_per_s(now=1.0) == pytest.approx(1e6)
        estimator.on_delivery(sample(4e6, 2.0, limited=True))
        assert (estimator.rate_bytes_per_s(now=2.0) or 0.0) > 1e6


def test_point_estimates_answer_alike_for_every_quantile_and_invert() -> None:
    estimator = known(1e6)
    for quantile in (0.1, 0.9):
        time_s = estimator.time_quantile_s(5e6, quantile, now=0.0)
        assert time_s == pytest.approx(5.02)
        assert estimator.bytes_within(time_s, quantile, now=0.0) == pytest.approx(5e6)
    assert estimator.time_quantile_s(0, 0.5, now=0.0) == 0.0


def test_only_the_policy_that_uses_uncertainty_gets_the_predictive_estimator() -> None:
    assert {default_estimator(name) for name in ("kvtide", "kvtide-fastest")} == {"predictive"}
    assert {default_estimator(name) for name in ("text", "fixed:int8", "cachegen")} == {
        "median-rate"
    }
