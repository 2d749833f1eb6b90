"""The link model: order, pace, delay, back-pressure and restarts, all without a clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from scenarios.link import Link, LinkConfig, default_queue_bytes
from scenarios.trace import Trace

KBPS = Trace("1000 B/s", (0.0,), (1000.0,), 10.0)


def link(
    trace: Trace = KBPS, *, delay_s: float = 0.5, queue_bytes: int = 3000, now: float = 100.0
) -> Link[str]:
    return Link(LinkConfig(trace, delay_s=delay_s, queue_bytes=queue_bytes), now=now)


def test_item_arrives_after_its_sending_and_the_delay() -> None:
    one = link()
    assert one.offer("a", 1000, now=100.0)
    assert one.next_delivery_s() == 101.5
    assert one.deliveries(now=101.4) == []
    (delivery,) = one.deliveries(now=101.5)
    assert (delivery.item, delivery.offered_s, delivery.sent_s) == ("a", 100.0, 101.0)
    assert one.is_idle()
    assert one.next_delivery_s() is None


def test_second_item_waits_for_the_first_but_not_for_its_delay() -> None:
    one = link()
    one.offer("a", 1000, now=100.0)
    one.offer("b", 500, now=100.2)
    assert [(d.item, d.arrived_s) for d in one.deliveries(now=200.0)] == [
        ("a", 101.5),
        ("b", 102.0),
    ]


def test_capacity_of_idle_time_is_lost() -> None:
    one = link()
    one.offer("a", 1000, now=105.0)
    assert one.next_delivery_s() == 106.5


def test_full_queue_refuses_and_says_when_there_is_room() -> None:
    one = link()
    assert all(one.offer(name, 1000, now=100.0) for name in "abc")
    assert not one.offer("d", 1000, now=100.0)
    assert one.room_bytes(now=100.0) == 0
    assert one.room_s(1000, now=100.0) == 101.0
    assert one.room_s(1500, now=100.0) == 102.0
    assert one.room_s(99999, now=100.0) == 103.0
    assert not one.offer("d", 1000, now=100.9)
    assert one.offer("d", 1000, now=101.0)
    assert [d.item for d in one.deliveries(now=200.0)] == list("abcd")


def test_item_larger_than_the_queue_is_taken_when_it_is_empty() -> None:
    one = link()
    assert one.offer("big", 5000, now=100.0)
    assert not one.offer("more", 1, now=104.9)
    assert one.offer("more", 1, now=105.0)


def test_restart_sends_what_waits_at_the_new_pace() -> None:
    one = link(Trace("slow start", (0.0, 5.0), (10.0, 1000.0), 100.0))
    one.offer("a", 1000, now=100.0)
    assert one.next_delivery_s() == pytest.approx(105.95 + 0.5)
    one.restart(now=101.0, offset_s=5.0)
    assert one.next_delivery_s() == pytest.approx(102.5)
    assert one.trace_time_s(101.0) == 5.0


def test_restart_gives_the_same_times_as_the_first_start() -> None:
    trace = Trace("uneven", (0.0, 0.3, 1.7), (900.0, 100.0, 5000.0), 2.5)
    first = link(trace)
    sizes = [1000, 700, 1200, 50]
    for size in sizes:
        first.offer("x", size, now=100.0 + 0.1)
    times = [d.arrived_s - 100.0 for d in first.deliveries(now=1e6)]
    first.restart(now=250.0)
    for size in sizes:
        first.offer("x", size, now=250.0 + 0.1)
    again = [d.arrived_s - 250.0 for d in first.deliveries(now=1e6)]
    assert again == pytest.approx(times)


def test_trace_that_has_ended_never_delivers() -> None:
    one = link(KBPS.looped(loops=False))
    one.offer("a", 20000, now=100.0)
    assert one.next_delivery_s() == math.inf
    assert one.transfer_s(1, now=100.0) == math.inf


def test_transfer_time_counts_what_waits() -> None:
    one = link()
    assert one.transfer_s(1000, now=100.0) == pytest.approx(1.5)
    one.offer("a", 1000, now=100.0)
    assert one.transfer_s(1000, now=100.0) == pytest.approx(2.5)


def test_default_queue_grows_with_the_rate() -> None:
    assert default_queue_bytes(KBPS) == 128 * 1024
    assert default_queue_bytes(Trace.constant(25e6)) == 1_250_000


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 2000)), min_size=1, max_size=40),
    st.lists(
        st.tuples(st.floats(0.05, 3.0), st.sampled_from([0.0, 50.0, 3e3, 1e6])),
        min_size=1,
        max_size=6,
    ),
)
def test_order_is_kept_and_the_trace_is_never_beaten(
    offers: list[tuple[float, int]], pieces: list[tuple[float, float]]
) -> None:
    edges = [0.0]
    for length_s, _ in pieces:
        edges.append(edges[-1] + length_s)
    rates = [rate for _, rate in pieces]
    rates[0] = rates[0] or 100.0
    trace = Trace("any", tuple(edges[:-1]), tuple(rates), edges[-1])
    one: Link[int] = Link(LinkConfig(trace, delay_s=0.1, queue_bytes=4000), now=0.0)
    now = 0.0
    accepted: list[int] = []
    for index, (gap_s, size) in enumerate(offers):
        now += gap_s
        assert one.queued_bytes(now=now) <= 4000
        if one.offer(index, size, now=now):
            accepted.append(index)
        else:
            room_s = one.room_s(size, now=now)
            assert room_s > now
    done = one.deliveries(now=math.inf)
    assert [delivery.item for delivery in done] == accepted
    begin_s = done[0].offered_s
    total = 0
    for delivery in done:
        total += delivery.num_bytes
        assert delivery.sent_s >= delivery.offered_s
        # Allow rounding: sums up to 1e6 bytes/s over a few hundred loops.
        assert total <= trace.bytes_between(begin_s, delivery.sent_s) + 1e-3
