from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from planner.curve import DeliveryCurve
from planner.fleet import INGEST_SHARE, Demand, Refusal, admit, divide_window

demands = st.lists(
    st.tuples(st.floats(-1.0, 30.0), st.floats(0.0, 1e7)), min_size=0, max_size=6
).map(lambda rows: [Demand(str(row), at, size) for row, (at, size) in enumerate(rows)])


@given(demands, st.integers(0, 1_000_000), st.floats(1.0, 1e7), st.booleans())
def test_shares_never_exceed_the_window_and_nobody_is_starved(
    rows: list[Demand], window: int, rate: float, ingest: bool
) -> None:
    shares = divide_window(rows, window, bytes_per_s=rate, ingest_waits=ingest)
    assert set(shares) == {demand.request_id for demand in rows}
    assert all(share >= 0 for share in shares.values())
    budget = window * (1 - INGEST_SHARE) if ingest else window
    assert sum(shares.values()) <= budget + 1e-6
    for demand in rows:
        if demand.num_bytes <= 0:
            assert shares[demand.request_id] == 0


def test_the_earliest_deadline_gets_what_it_needs_first() -> None:
    urgent = Demand("urgent", 1.0, 600_000)
    relaxed = Demand("relaxed", 10.0, 1_000_000)
    shares = divide_window([relaxed, urgent], 100_000, bytes_per_s=1e6)
    assert shares["urgent"] >= 60_000
    assert shares["relaxed"] >= 10_000
    assert sum(shares.values()) == pytest.approx(100_000, abs=2)
    tight = divide_window([relaxed, Demand("urgent", 1.0, 2e6)], 100_000, bytes_per_s=1e6)
    assert tight == {"relaxed": 0, "urgent": 100_000}


def test_a_late_request_counts_as_due_now_and_ingest_still_moves() -> None:
    shares = divide_window([Demand("late", -2.0, 1e6)], 100_000, bytes_per_s=1e6, ingest_waits=True)
    assert shares["late"] == int(100_000 * (1 - INGEST_SHARE))


def test_nothing_known_about_the_rate_gives_equal_parts() -> None:
    rows = [Demand("a", 1.0, 5.0), Demand("b", 9.0, 5.0)]
    assert divide_window(rows, 1000, bytes_per_s=None) == {"a": 500, "b": 500}


CURVE = DeliveryCurve.straight(1e6)


def test_who_fits_is_let_in() -> None:
    running = [Demand("one", 2.0, 1e6, engine_s=0.5)]
    admission = admit(Demand("new", 4.0, 2e6, engine_s=1.0), running, CURVE)
    assert admission.is_admitted
    assert admission.sentence == ""


def test_a_deadline_that_the_link_alone_cannot_meet_is_refused() -> None:
    admission = admit(Demand("new", 1.0, 5e6), [], CURVE)
    assert admission.refusal is Refusal.LINK_TOO_SLOW
    assert "5.00 s" in admission.sentence
    assert admission.retry_after_s == pytest.approx(4.0)


def test_the_smallest_plan_decides_and_not_the_present_one() -> None:
    assert admit(Demand("new", 1.0, 5e6, min_bytes=5e5), [], CURVE).is_admitted


def test_nobody_who_was_let_in_is_made_late() -> None:
    running = [Demand("one", 3.0, 2.5e6)]
    admission = admit(Demand("new", 2.0, 1e6), running, CURVE)
    assert admission.refusal is Refusal.LINK_TAKEN
    assert "1 requests" in admission.sentence
    assert admit(Demand("new", 5.0, 1e6), running, CURVE).is_admitted
    assert admit(Demand("new", 5.0, 4e6), running, CURVE).refusal is Refusal.LINK_TAKEN


def test_a_busy_engine_is_a_reason_too() -> None:
    running = [Demand("one", 3.0, 0.0, engine_s=2.5)]
    admission = admit(Demand("new", 4.0, 0.0, engine_s=2.0), running, None)
    assert admission.refusal is Refusal.WORKER_TAKEN
    assert admission.retry_after_s == pytest.approx(2.5)
    assert admit(Demand("new", 5.0, 0.0, engine_s=2.0), running, None).is_admitted


def test_someone_late_already_does_not_keep_everybody_out() -> None:
    running = [Demand("late", 0.5, 5e6)]
    dead = DeliveryCurve.straight(0.0)
    assert admit(Demand("new", 20.0, 1e6), running, CURVE).is_admitted
    assert (
        admit(Demand("new", 20.0, 0.0), [Demand("x", 30.0, 5.0)], dead).refusal
        is Refusal.LINK_TAKEN
    )
