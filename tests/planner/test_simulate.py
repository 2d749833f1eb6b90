from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from planner import (
    Decision,
    FixedPolicy,
    LastSample,
    MedianRate,
    PlannerError,
    Policy,
    TextPolicy,
    make_estimator,
    make_policy,
)
from planner.mpc import MpcPolicy
from planner.simulate import (
    SimulatedLink,
    SimulatedRequest,
    TransferRecord,
    simulate_transfer,
    total_choices,
)
from tests.planner.builders import options


@dataclass(frozen=True)
class StepLink:
    """``first`` bytes per second until ``at_s``, then ``second``."""

    first: float
    second: float
    at_s: float

    def finish_s(self, start_s: float, num_bytes: float) -> float:
        if start_s < self.at_s:
            until = (self.at_s - start_s) * self.first
            if num_bytes <= until:
                return start_s + num_bytes / self.first
            start_s, num_bytes = self.at_s, num_bytes - until
        return start_s + num_bytes / self.second if self.second > 0 else math.inf


def carry(
    policy: Policy,
    link: StepLink,
    *,
    deadline_s: float = 10.0,
    prefill_s: float = 2.0,
    count: int = 4,
    estimator: str = "median-rate",
    slowness: float = 1.0,
) -> TransferRecord:
    request = SimulatedRequest(
        tuple(options(index, prefill_s=prefill_s) for index in range(count)),
        deadline_s=deadline_s,
        tail_prefill_s=0.25,
        engine_slowness=slowness,
    )
    return simulate_transfer(
        request, SimulatedLink(link, delay_s=0.02), policy, make_estimator(estimator), start_s=5.0
    )


STEADY = StepLink(1e6, 1e6, 0.0)


def test_a_fixed_level_takes_link_then_decoder_then_question() -> None:
    record = carry(FixedPolicy("cachegen:2"), STEADY)
    assert record.ttft_s == pytest.approx(4.0 + 0.02 + 0.1 + 0.25, abs=0.005)
    assert record.num_bytes == 4_000_000
    assert record.meets_deadline
    assert [chunk.choice for chunk in record.chunks] == ["cachegen:2"] * 4


def test_text_takes_the_engine_alone() -> None:
    record = carry(TextPolicy(), STEADY, slowness=1.5)
    assert record.ttft_s == pytest.approx(0.02 + 4 * 2.0 * 1.5 + 0.25 * 1.5, abs=0.005)
    assert (record.num_bytes, record.loss) == (0, 0.0)
    assert not record.meets_deadline


def test_computing_and_loading_at_once_beats_either_alone() -> None:
    """At the rate where all text and all levels take 8 s, both at once take little over half."""
    link = StepLink(1e6, 1e6, 0.0)
    text = carry(TextPolicy(), link).ttft_s
    levels = carry(FixedPolicy("cachegen:1"), link).ttft_s
    mixed = carry(make_policy("kvtide"), link, deadline_s=5.2)
    assert levels == pytest.approx(text, rel=0.02)
    assert min(text, levels) / mixed.ttft_s > 1.6
    assert mixed.meets_deadline


def test_the_same_arguments_give_the_same_record() -> None:
    link = StepLink(2e6, 5e5, 7.0)
    policies = ("kvtide", "cachegen", "robust-mpc", "kvtide-fastest")
    for name in policies:
        one = carry(make_policy(name), link, estimator="predictive")
        other = carry(make_policy(name), link, estimator="predictive")
        assert one == other


def test_a_link_that_drops_costs_quality_and_not_the_deadline() -> None:
    link = StepLink(2e6, 6e5, 6.5)
    stubborn = carry(FixedPolicy("cachegen:0"), link, deadline_s=9.0, prefill_s=50.0)
    adaptive = carry(
        make_policy("kvtide"), link, deadline_s=9.0, prefill_s=50.0, estimator="predictive"
    )
    assert not stubborn.meets_deadline
    assert adaptive.meets_deadline
    assert any(chunk.epoch > 0 or chunk.choice == "cachegen:2" for chunk in adaptive.chunks)


def test_an_abandoned_epoch_is_counted_in_the_bytes() -> None:
    link = StepLink(2e6, 4e5, 5.6)
    record = carry(
        make_policy("kvtide"), link, deadline_s=9.0, prefill_s=50.0, estimator="last-sample"
    )
    abandoned = [decision for _, decision in record.decisions if decision.abandons]
    assert abandoned
    whole = {"cachegen:0": 4_000_000, "cachegen:1": 2_000_000, "cachegen:2": 1_000_000}
    assert record.num_bytes > sum(
        whole[chunk.choice] for chunk in record.chunks if chunk.choice != "text"
    )
    assert max(chunk.epoch for chunk in record.chunks) <= 2


def test_a_link_that_dies_never_ends() -> None:
    record = carry(FixedPolicy("cachegen:0"), StepLink(1e6, 0.0, 6.0))
    assert math.isinf(record.ttft_s)
    assert not record.meets_deadline


def test_text_behind_levels_waits_for_them() -> None:
    """The paper's order: chunk by chunk, and text in its turn."""
    record = carry(make_policy("cachegen"), StepLink(2e6, 1e5, 7.0), deadline_s=8.0)
    kinds = [chunk.choice == "text" for chunk in record.chunks]
    assert kinds == sorted(kinds)
    assert kinds[-1]
    for before, after in zip(record.chunks, record.chunks[1:], strict=False):
        if after.choice == "text":
            assert after.work_begun_s >= before.ready_s - 1e-9


def test_robust_mpc_begins_in_the_middle_and_uses_text_when_nothing_fits() -> None:
    record = carry(MpcPolicy(), StepLink(2e6, 2e5, 7.0), deadline_s=7.0)
    assert record.chunks[0].choice == "cachegen:1"
    assert "text" in total_choices([record])
    rich = carry(MpcPolicy(), StepLink(1e8, 1e8, 0.0), deadline_s=7.0)
    assert rich.chunks[-1].choice == "cachegen:0"


def test_the_observer_sees_every_acknowledgement() -> None:
    seen: list[tuple[float, int, float]] = []
    request = SimulatedRequest((options(0),), deadline_s=10.0)
    simulate_transfer(
        request,
        SimulatedLink(STEADY, segment_bytes=100_000),
        FixedPolicy("cachegen:2"),
        MedianRate(),
        start_s=0.0,
        observer=lambda now, in_flight, free_s: seen.append((now, in_flight, free_s)),
    )
    assert len(seen) == 10
    assert [at for at, _, _ in seen] == sorted(at for at, _, _ in seen)
    assert seen[-1][1] == 0


class Twice:
    """A policy with a bug: it chooses the same chunk again and again."""

    name = "twice"

    def next_decision(self, state: object, estimator: object, now: float) -> Decision | None:
        return FixedPolicy("cachegen:0").next_decision(self.first, LastSample(), now)

    def reconsider(self, state: object, estimator: object, now: float) -> Decision | None:
        return None

    def __init__(self) -> None:
        from tests.planner.builders import state

        self.first = state(options(0), options(1))


def test_a_policy_that_breaks_its_promise_is_found_out() -> None:
    with pytest.raises(PlannerError, match="twice"):
        carry(Twice(), STEADY)
