from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from planner import Choice, ChunkOptions
from planner.cost import makespan_s
from planner.curve import DeliveryCurve
from planner.optimizer import (
    LOSS_TICKS,
    Plan,
    PlanRequest,
    choose,
    finish_first,
    finish_time_s,
    least_loss,
    loss_grid,
    room_for_first,
    text_that_fits,
)

# Whole losses with one of LOSS_TICKS as the total lie on the grid, so that "equal" means equal.
levels = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=4)


def kv(rows: list[tuple[int, int]], decode_s: float = 0.0) -> tuple[Choice, ...]:
    return tuple(
        Choice(f"level:{row}", num_bytes, decode_s, 0.0, float(loss))
        for row, (num_bytes, loss) in enumerate(rows)
    )


def chunk(index: int, choices: tuple[Choice, ...], prefill_s: float | None) -> ChunkOptions:
    text = () if prefill_s is None else (Choice("text", 0, 0.0, prefill_s, 0.0, is_text=True),)
    return ChunkOptions(index, index * 10, index * 10 + 10, (*choices, *text))


chunk_lists = st.lists(
    st.tuples(levels, st.sampled_from([0.0, 0.1, 0.5]), st.floats(0.2, 6.0)), min_size=1, max_size=4
)


def request(rows: list[tuple[list[tuple[int, int]], float, float]], budget_s: float) -> PlanRequest:
    return PlanRequest(
        tuple(
            chunk(index, kv(choices, decode_s), prefill_s)
            for index, (choices, decode_s, prefill_s) in enumerate(rows)
        ),
        budget_s=budget_s,
    )


def ready_s(plan: list[Choice], curve: DeliveryCurve) -> float:
    """The pipeline of `cost.makespan_s`, levels sent last chunk first: a second opinion."""
    order = [index for index in range(len(plan) - 1, -1, -1) if not plan[index].is_text]
    arrivals, total = [0.0] * len(plan), 0.0
    for index in order:
        total += plan[index].num_bytes
        arrivals[index] = curve.time_s(total)
    return makespan_s(plan, arrivals_s=arrivals, send_order=order)


def all_plans(asked: PlanRequest) -> list[list[Choice]]:
    """Every choice for every chunk, with text only as a prefix: the plans that there are."""
    plans = []
    for plan in itertools.product(*(chunk.choices for chunk in asked.chunks)):
        texts = [choice.is_text for choice in plan]
        if texts == sorted(texts, reverse=True):
            plans.append(list(plan))
    return plans


@given(st.lists(levels, min_size=1, max_size=5), st.data())
def test_least_loss_equals_brute_force(
    rows: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    chunks = [kv(row) for row in rows]
    limits = sorted(
        data.draw(st.lists(st.integers(1, 250), min_size=len(rows), max_size=len(rows)))
    )
    found = least_loss(chunks, limits, tick=1.0)
    fitting = [
        sum(choice.loss for choice in plan)
        for plan in itertools.product(*chunks)
        if all(
            sum(choice.num_bytes for choice in plan[: row + 1]) <= limit
            for row, limit in enumerate(limits)
        )
    ]
    if found is None:
        assert not fitting
        return
    assert found.loss == min(fitting)
    running = list(itertools.accumulate(choice.num_bytes for choice in found.choices))
    assert all(total <= limit for total, limit in zip(running, limits, strict=True))
    assert (found.num_bytes, found.ticks) == (running[-1], found.loss)


@settings(max_examples=60, deadline=None)
@given(chunk_lists, st.floats(0.3, 12.0), st.floats(5.0, 60.0))
def test_a_plan_equals_brute_force_over_text_levels_link_and_decoder(
    rows: list[tuple[list[tuple[int, int]], float, float]], budget_s: float, rate: float
) -> None:
    asked = request(rows, budget_s)
    curve = DeliveryCurve.straight(rate, delay_s=0.05)
    found = choose(asked, curve, quantile=0.9, tick=1.0)
    fitting = [
        sum(choice.loss for choice in plan)
        for plan in all_plans(asked)
        if ready_s(plan, curve) <= budget_s
    ]
    # Hairs of floating point around the deadline may fall either way.
    surely = [
        sum(choice.loss for choice in plan)
        for plan in all_plans(asked)
        if ready_s(plan, curve) <= budget_s - 1e-9
    ]
    if found is None:
        assert not surely
        return
    assert min(fitting, default=math.inf) <= found.loss + 1e-9
    assert found.loss <= min(surely, default=math.inf) + 1e-9
    assert found.finish_s <= budget_s + 1e-9
    assert found.is_feasible


@settings(max_examples=60, deadline=None)
@given(chunk_lists, st.floats(0.3, 12.0), st.floats(5.0, 60.0), st.floats(1.0, 3.0))
def test_a_faster_link_or_a_later_deadline_never_gives_lower_quality(
    rows: list[tuple[list[tuple[int, int]], float, float]],
    budget_s: float,
    rate: float,
    more: float,
) -> None:
    asked = request(rows, budget_s)
    base = choose(asked, DeliveryCurve.straight(rate), quantile=0.9, tick=1.0)
    faster = choose(asked, DeliveryCurve.straight(rate * more), quantile=0.9, tick=1.0)
    later = choose(
        request(rows, budget_s * more), DeliveryCurve.straight(rate), quantile=0.9, tick=1.0
    )
    if base is None:
        return
    assert faster is not None
    assert later is not None
    assert faster.loss <= base.loss
    assert later.loss <= base.loss


@settings(max_examples=60, deadline=None)
@given(chunk_lists, st.floats(1.0, 60.0))
def test_finish_first_finds_the_soonest_border(
    rows: list[tuple[list[tuple[int, int]], float, float]], rate: float
) -> None:
    asked = request(rows, 0.001)
    curve = DeliveryCurve.straight(rate, delay_s=0.05)
    plan = finish_first(asked, curve)
    soonest = min(ready_s(other, curve) for other in all_plans(asked))
    assert plan.finish_s == pytest.approx(soonest)
    assert not plan.is_feasible
    assert finish_time_s(asked, plan.num_text, plan.levels, curve) == pytest.approx(plan.finish_s)


@settings(max_examples=60, deadline=None)
@given(chunk_lists, st.floats(0.3, 12.0), st.floats(5.0, 60.0))
def test_room_for_the_first_chunk_is_what_the_others_leave(
    rows: list[tuple[list[tuple[int, int]], float, float]], budget_s: float, rate: float
) -> None:
    asked = request(rows, budget_s)
    curve = DeliveryCurve.straight(rate)
    room = room_for_first(asked, curve)
    assert (room >= 0) == (choose(asked, curve, quantile=0.9) is not None)
    found = choose(asked, curve, quantile=0.9, first_limit=room, tick=1.0)
    if found is not None and found.levels:
        assert found.levels[-1].num_bytes <= room


def test_borders_all_text_and_all_kv() -> None:
    rows = [([(10, 5), (5, 9)], 0.0, 1.0)] * 3
    slow = choose(request(rows, 3.5), DeliveryCurve.straight(0.01), quantile=0.9)
    assert slow is not None
    assert (slow.num_text, slow.levels, slow.loss) == (3, (), 0.0)
    no_engine = [([(10, 5), (5, 9)], 0.0, 99.0)] * 3
    fast = choose(request(no_engine, 3.5), DeliveryCurve.straight(10.0), quantile=0.9)
    assert fast is not None
    assert (fast.num_text, [c.name for c in fast.levels]) == (0, ["level:0"] * 3)


def test_what_was_sent_before_comes_first() -> None:
    asked = request([([(10, 5), (5, 9)], 0.0, 99.0)], 2.0)
    curve = DeliveryCurve.straight(10.0)
    clear = choose(asked, curve, quantile=0.9)
    assert clear is not None
    assert clear.levels[0].name == "level:0"
    behind = PlanRequest(asked.chunks, 2.0, bytes_before=12.0)
    found = choose(behind, curve, quantile=0.9)
    assert found is not None
    assert found.levels[0].name == "level:1"
    assert choose(PlanRequest(asked.chunks, 2.0, bytes_before=16.0), curve, quantile=0.9) is None
    assert choose(PlanRequest(asked.chunks, 2.0, bytes_before=30.0), curve, quantile=0.9) is None
    late_decoder = PlanRequest(asked.chunks, 2.0, decoder_free_s=2.1)
    assert choose(late_decoder, curve, quantile=0.9) is None


def test_an_engine_that_is_late_or_a_deadline_that_has_passed_leaves_no_plan() -> None:
    asked = request([([(10, 5)], 0.0, 1.0)], 1.0)
    curve = DeliveryCurve.straight(1e9)
    assert text_that_fits(PlanRequest(asked.chunks, 1.0, engine_free_s=1.5)) == -1
    assert choose(PlanRequest(asked.chunks, 1.0, engine_free_s=1.5), curve, quantile=0.9) is None
    assert choose(PlanRequest(asked.chunks, -0.1), curve, quantile=0.9) is None
    assert room_for_first(PlanRequest(asked.chunks, -0.1), curve) == -math.inf


def test_chunks_without_levels_must_be_text() -> None:
    asked = PlanRequest((chunk(0, (), 1.0), chunk(1, kv([(5, 1)]), 1.0)), 1.5)
    curve = DeliveryCurve.straight(10.0)
    found = choose(asked, curve, quantile=0.9)
    assert found is not None
    assert found.num_text == 1
    too_soon = PlanRequest(asked.chunks, 0.9)
    assert choose(too_soon, curve, quantile=0.9) is None
    assert room_for_first(too_soon, curve) == -math.inf
    plan = finish_first(too_soon, curve)
    assert (plan.num_text, len(plan.levels)) == (1, 1)


def test_levels_whose_loss_nobody_measured_are_the_last_resort() -> None:
    unknown = Choice("mystery", 1, 0.0, 0.0, math.inf)
    known = Choice("known", 5, 0.0, 0.0, 3.0)
    found = least_loss([(unknown, known)], [10.0], tick=1.0)
    assert found is not None
    assert found.choices[0].name == "known"
    only = least_loss([(unknown,)], [10.0], tick=1.0)
    assert only is not None
    assert only.choices[0].name == "mystery"
    plan = finish_first(
        PlanRequest((chunk(0, (unknown, known), None),), 1.0), DeliveryCurve.straight(1.0)
    )
    assert plan.levels[0].name == "known"


def test_fastest_keeps_to_the_loss_allowed() -> None:
    asked = request([([(50, 1), (5, 40)], 0.0, 99.0)], 1.0)
    curve = DeliveryCurve.straight(10.0)
    assert finish_first(asked, curve).levels[0].name == "level:1"
    assert finish_first(asked, curve, max_loss_per_token=0.5).levels[0].name == "level:0"
    assert finish_first(asked, curve, max_loss_per_token=0.0).levels[0].name == "level:0"


def test_the_grid_depends_on_the_chunks_alone() -> None:
    asked = request([([(10, 5), (5, 9)], 0.0, 1.0)] * 3, 1.0)
    assert loss_grid(asked.chunks) == pytest.approx(27 / LOSS_TICKS)
    assert loss_grid(()) == 1.0
    assert least_loss([], [], tick=1.0) is not None
    assert least_loss([()], [5.0], tick=1.0) is None


def test_off_the_grid_the_loss_is_within_one_rounding_of_the_best() -> None:
    chunks = [kv([(10, 0), (6, 3), (3, 7)]) for _ in range(6)]
    exact = least_loss(chunks, [30.0] * 6, tick=1.0)
    coarse = least_loss(chunks, [30.0] * 6, tick=2.0)
    assert exact is not None
    assert coarse is not None
    assert exact.loss <= coarse.loss <= exact.loss + 6 * 2.0


def test_plans_say_what_they_are() -> None:
    plan = Plan(0, (), 0.9, 1.0, 0.0, 0.0)
    assert plan.is_feasible
