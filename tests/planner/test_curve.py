from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from planner.curve import DeliveryCurve

steps = st.lists(st.tuples(st.floats(0.01, 5.0), st.floats(0.0, 1e6)), min_size=1, max_size=8)


def build(rows: list[tuple[float, float]], tail: float) -> DeliveryCurve:
    times, values, time_s = [], [], 0.0
    for step_s, value in rows:
        time_s += step_s
        times.append(time_s)
        values.append(value)
    return DeliveryCurve.from_points(times, values, tail_bytes_per_s=tail)


@given(steps, st.floats(1.0, 1e6), st.floats(0.0, 60.0))
def test_both_directions_agree(
    rows: list[tuple[float, float]], tail: float, duration_s: float
) -> None:
    curve = build(rows, tail)
    num_bytes = curve.bytes_within(duration_s)
    earliest_s = curve.time_s(num_bytes)
    assert earliest_s <= duration_s + 1e-9
    assert curve.bytes_within(earliest_s) == pytest.approx(num_bytes, rel=1e-9, abs=1e-6)


@given(steps, st.floats(0.0, 1e6), st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_more_time_never_brings_fewer_bytes(
    rows: list[tuple[float, float]], tail: float, one_s: float, other_s: float
) -> None:
    curve = build(rows, tail)
    low, high = sorted((one_s, other_s))
    assert curve.bytes_within(low) <= curve.bytes_within(high) * (1 + 1e-12) + 1e-9


def test_straight_curve_is_delay_plus_bytes_over_rate() -> None:
    curve = DeliveryCurve.straight(1e6, delay_s=0.1)
    assert curve.bytes_within(0.1) == 0.0
    assert curve.bytes_within(1.1) == pytest.approx(1e6)
    assert curve.time_s(2e6) == pytest.approx(2.1)
    assert DeliveryCurve.straight(1e6).time_s(1e6) == pytest.approx(1.0)


def test_a_dead_link_never_delivers() -> None:
    assert DeliveryCurve.straight(0.0).time_s(1.0) == math.inf
    assert DeliveryCurve.straight(0.0).time_s(0.0) == 0.0
    assert DeliveryCurve.straight(0.0).bytes_within(1e9) == 0.0


def test_delaying_and_advancing_move_the_curve_in_time() -> None:
    curve = DeliveryCurve.from_points([1.0, 3.0], [1e6, 5e6], tail_bytes_per_s=1e6)
    for lead_s in (0.0, 0.4):
        assert curve.delayed(lead_s).bytes_within(2.0 + lead_s) == pytest.approx(3e6)
        assert curve.advanced(lead_s).bytes_within(2.0 - lead_s) == pytest.approx(3e6)
        assert curve.advanced(lead_s).bytes_within(4.0 - lead_s) == pytest.approx(6e6)
    early = curve.advanced(0.4)
    assert early.time_s(1e5) == 0.0  # has arrived, is not yet acknowledged
    assert early.time_s(3e6) == pytest.approx(1.6)
