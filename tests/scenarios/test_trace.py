"""The trace's integrals are exact, inverse to each other, and independent of how they are asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, strategies as st

from scenarios.errors import TraceError
from scenarios.trace import BYTES_PER_S_PER_MBPS, Trace, mbps

RATES = st.one_of(st.just(0.0), st.floats(1.0, 1e8))


@st.composite
def traces(draw: st.DrawFn, *, loops: bool | None = None) -> Trace:
    steps = draw(st.lists(st.floats(0.001, 50.0), min_size=1, max_size=12))
    rates = draw(st.lists(RATES, min_size=len(steps), max_size=len(steps)))
    rates[draw(st.integers(0, len(rates) - 1))] = draw(st.floats(1.0, 1e8))
    edges = [0.0]
    for step in steps:
        edges.append(edges[-1] + step)
    does_loop = draw(st.booleans()) if loops is None else loops
    return Trace("any", tuple(edges[:-1]), tuple(rates), edges[-1], does_loop)


def test_bytes_of_two_pieces_add_up_by_hand() -> None:
    trace = Trace("t", (0.0, 2.0), (100.0, 50.0), 4.0)
    assert trace.bytes_between(1.0, 3.0) == 100.0 + 50.0
    assert trace.bytes_between(3.0, 5.0) == 50.0 + 100.0  # over the loop
    assert trace.finish_s(1.0, 125.0) == 2.5
    assert trace.finish_s(3.0, 50.0) == 4.0
    assert trace.finish_s(0.0, 600.0) == 8.0
    assert trace.mean_bytes_per_s == 75.0


def test_trace_that_does_not_loop_ends() -> None:
    trace = Trace("t", (0.0,), (10.0,), 2.0, loops=False)
    assert trace.finish_s(0.0, 20.0) == 2.0
    assert trace.finish_s(0.0, 20.5) == math.inf
    assert trace.bytes_between(1.0, 9.0) == 10.0
    assert trace.rate_at(5.0) == 0.0


def test_outage_delays_to_its_end_and_not_further() -> None:
    trace = Trace("t", (0.0, 1.0, 78.0), (1000.0, 0.0, 1000.0), 100.0)
    assert trace.finish_s(0.5, 500.0) == 1.0
    assert trace.finish_s(0.5, 501.0) == pytest.approx(78.001)
    assert [outage.duration_s for outage in trace.outages()] == [77.0]


@given(traces(), st.floats(0.0, 500.0), st.floats(1.0, 1e9))
def test_finish_is_the_inverse_of_bytes(trace: Trace, start_s: float, num_bytes: float) -> None:
    finish_s = trace.finish_s(start_s, num_bytes)
    if math.isinf(finish_s):
        assert not trace.loops
        assert trace.bytes_between(start_s, trace.duration_s) < num_bytes * (1 + 1e-9)
        return
    # Both are differences of sums up to the finish, so the error scales with those.
    scale = trace.bytes_until(finish_s) + num_bytes + 1e8
    assert finish_s >= start_s
    assert abs(trace.bytes_between(start_s, finish_s) - num_bytes) <= 1e-7 * scale


@given(traces(), st.floats(0.0, 300.0), st.floats(0.0, 300.0), st.floats(0.0, 300.0))
def test_bytes_are_additive_over_adjacent_intervals(
    trace: Trace, start_s: float, first_s: float, second_s: float
) -> None:
    middle, stop = start_s + first_s, start_s + first_s + second_s
    total = trace.bytes_between(start_s, stop)
    parts = trace.bytes_between(start_s, middle) + trace.bytes_between(middle, stop)
    assert parts == pytest.approx(total, rel=1e-9, abs=1e-9 * trace.bytes_until(stop) + 1e-6)


@given(traces(), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_shifted_trace_sees_the_same_bytes(trace: Trace, offset_s: float, length_s: float) -> None:
    if not trace.loops:
        offset_s = min(offset_s, trace.duration_s * 0.99)
        assume(trace.bytes_between(offset_s, trace.duration_s) > 0)
    shifted = trace.shifted(offset_s)
    expected = trace.bytes_between(offset_s, offset_s + length_s)
    tolerance = 1e-7 * (trace.bytes_until(offset_s + length_s) + 1e8)
    assert abs(shifted.bytes_between(0.0, length_s) - expected) <= tolerance


@given(traces(), st.floats(0.01, 100.0), st.floats(0.0, 100.0))
def test_scaled_trace_carries_in_proportion(trace: Trace, factor: float, stop_s: float) -> None:
    scaled = trace.scaled(factor)
    assert scaled.bytes_until(stop_s) == pytest.approx(factor * trace.bytes_until(stop_s))


@given(traces(), st.floats(0.1, 10.0))
def test_bins_hold_all_bytes_of_the_interval(trace: Trace, step_s: float) -> None:
    bins = trace.binned(0.0, trace.duration_s, step_s)
    widths = [step_s] * (len(bins) - 1) + [trace.duration_s - step_s * (len(bins) - 1)]
    total = sum(rate * width for rate, width in zip(bins, widths, strict=True))
    assert total == pytest.approx(trace.total_bytes, rel=1e-6)


def test_percentile_is_of_the_mean_over_steps() -> None:
    trace = Trace("t", (0.0, 1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0), 4.0)
    assert [trace.percentile(q) for q in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 4.0, 4.0]


def test_mbps_is_decimal() -> None:
    assert mbps(BYTES_PER_S_PER_MBPS * 12) == 12.0


@pytest.mark.parametrize(
    ("starts", "rates", "duration", "problem"),
    [
        ((), (), 1.0, "0 times"),
        ((0.0,), (1.0, 2.0), 1.0, "1 times and 2 rates"),
        ((0.5,), (1.0,), 1.0, "must start at 0"),
        ((0.0, 2.0, 1.0), (1.0, 1.0, 1.0), 3.0, "do not ascend"),
        ((0.0,), (1.0,), 0.0, "do not ascend"),
        ((0.0,), (-1.0,), 1.0, "negative"),
        ((0.0,), (math.nan,), 1.0, "not finite"),
        ((0.0,), (1.0,), math.inf, "finite time"),
        ((0.0,), (0.0,), 1.0, "never carries a byte"),
    ],
)
def test_bad_trace_is_refused(
    starts: tuple[float, ...], rates: tuple[float, ...], duration: float, problem: str
) -> None:
    with pytest.raises(TraceError, match=problem):
        Trace("bad", starts, rates, duration)


def test_moment_before_the_start_is_refused() -> None:
    with pytest.raises(TraceError, match="before 0 s"):
        Trace.constant(1.0).rate_at(-1.0)
    with pytest.raises(TraceError, match="cannot start"):
        Trace.constant(1.0).looped(loops=False).shifted(2.0)


def test_samples_hold_until_the_next_and_equal_ones_merge() -> None:
    trace = Trace.from_samples("s", [5.0, 6.0, 7.0], [1.0, 1.0, 2.0], duration_s=9.0)
    assert (trace.starts_s, trace.bytes_per_s, trace.duration_s) == ((0.0, 2.0), (1.0, 2.0), 4.0)
