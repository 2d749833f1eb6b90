from __future__ import annotations

from dataclasses import replace

import pytest

from planner import (
    ChunkOptions,
    ChunkProgress,
    Decision,
    LastSample,
    Reason,
    Stage,
    TransferState,
    WorkerProgress,
)
from planner.adaptive import AdaptiveConfig, AdaptivePolicy
from tests.planner.builders import options, sample, state


def known(rate: float) -> LastSample:
    estimator = LastSample()
    estimator.on_delivery(sample(rate, 0.0, rtt_s=0.0))
    return estimator


def next_of(policy: AdaptivePolicy, now_state: TransferState, rate: float) -> Decision:
    decision = policy.next_decision(now_state, known(rate), 0.0)
    assert decision is not None
    return decision


def put(
    before: TransferState, index: int, stage: Stage, name: str, **changes: int
) -> TransferState:
    rows = list(before.chunks)
    choice = rows[index].options.choice(name)
    rows[index] = replace(
        rows[index],
        stage=stage,
        choice=choice,
        bytes_sent=changes.get("bytes_sent", 0),
        epoch=changes.get("epoch", 0),
    )
    return replace(before, chunks=tuple(rows))


def four(deadline_s: float, *, prefill_s: float = 2.0, tail_s: float = 0.0) -> TransferState:
    chunks = [options(index, prefill_s=prefill_s) for index in range(4)]
    return state(*chunks, deadline_s=deadline_s, tail_s=tail_s)


def test_text_goes_from_the_front_and_levels_from_the_back() -> None:
    start = four(5.0)
    first = next_of(AdaptivePolicy(), start, 1e6)
    assert (first.chunk_index, first.choice.name) == (0, "text")
    assert first.reason is Reason.RECOMPUTE_MEANWHILE
    then = next_of(AdaptivePolicy(), put(start, 0, Stage.IN_FLIGHT, "text"), 1e6)
    assert then.chunk_index == 3
    assert not then.choice.is_text
    assert then.plan == {1: "text", 2: then.plan[2], 3: then.choice.name}


def test_the_border_moves_with_the_engine_and_with_the_deadline() -> None:
    assert (
        sum(name == "text" for name in next_of(AdaptivePolicy(), four(3.0), 1e6).plan.values()) == 1
    )
    assert (
        sum(name == "text" for name in next_of(AdaptivePolicy(), four(7.0), 1e6).plan.values()) == 3
    )
    slow = next_of(AdaptivePolicy(), four(7.0, prefill_s=6.0), 1e6)
    assert sum(name == "text" for name in slow.plan.values()) == 1


def test_all_text_when_the_engine_is_fast_and_all_kv_when_it_is_slow() -> None:
    fast = next_of(AdaptivePolicy(), four(10.0), 100.0)
    assert set(fast.plan.values()) == {"text"}
    assert fast.meets_deadline
    slow = next_of(AdaptivePolicy(), four(10.0, prefill_s=100.0), 1e7)
    assert slow.choice.name == "cachegen:0"
    assert set(slow.plan.values()) == {"cachegen:0"}


def test_the_quality_follows_the_time_that_is_left() -> None:
    names = [
        next_of(AdaptivePolicy(), four(deadline_s, prefill_s=100.0), 1e6).choice.name
        for deadline_s in (4.2, 8.2, 16.2)
    ]
    assert names == ["cachegen:2", "cachegen:1", "cachegen:0"]


def test_when_nothing_fits_the_soonest_plan_is_taken_and_flagged() -> None:
    decision = next_of(AdaptivePolicy(), four(1.0, prefill_s=100.0), 1e5)
    assert (decision.choice.name, decision.reason) == ("cachegen:2", Reason.FINISH_FIRST)
    assert not decision.meets_deadline
    assert decision.expected_ttft_s > 1.0


def test_nothing_is_asked_of_the_engine_ahead_of_time() -> None:
    start = put(four(9.0), 0, Stage.IN_FLIGHT, "text")
    assert AdaptivePolicy().reconsider(start, known(1e6), 0.0) is None
    nearly = replace(start, worker=WorkerProgress(text_begun_s=2.0))
    decision = AdaptivePolicy().reconsider(nearly, known(1e6), 0.0)
    assert decision is not None
    assert (decision.chunk_index, decision.choice.name) == (1, "text")
    stuck = put(nearly, 1, Stage.IN_FLIGHT, "text")
    late = replace(stuck, worker=WorkerProgress(text_begun_s=60.0))
    assert AdaptivePolicy().reconsider(late, known(1e6), 0.0) is None


def test_a_blind_start_uses_both_ends() -> None:
    start = four(9.0)
    first = AdaptivePolicy().next_decision(start, LastSample(), 0.0)
    assert first is not None
    assert (first.chunk_index, first.choice.name) == (0, "text")
    then = AdaptivePolicy().next_decision(put(start, 0, Stage.IN_FLIGHT, "text"), LastSample(), 0.0)
    assert then is not None
    assert (then.chunk_index, then.choice.name, then.reason) == (
        3,
        "cachegen:1",
        Reason.DEFAULT_LEVEL,
    )
    busy = put(start, 0, Stage.IN_FLIGHT, "text")
    assert AdaptivePolicy().reconsider(busy, LastSample(), 0.0) is None


def test_a_link_that_seems_dead_is_still_tried() -> None:
    start = put(four(3.0), 0, Stage.IN_FLIGHT, "text")
    decision = next_of(AdaptivePolicy(), start, 100.0)
    assert (decision.chunk_index, decision.choice.name) == (3, "cachegen:2")
    assert decision.reason is Reason.FINISH_FIRST


def in_flight(deadline_s: float, level: str, sent: int, *, epoch: int = 0) -> TransferState:
    chunks = [options(index, prefill_s=100.0) for index in range(2)]
    return put(
        state(*chunks, deadline_s=deadline_s),
        1,
        Stage.IN_FLIGHT,
        level,
        bytes_sent=sent,
        epoch=epoch,
    )


def test_a_chunk_in_flight_is_given_up_when_the_link_drops() -> None:
    before = in_flight(6.0, "cachegen:0", 100_000)
    assert AdaptivePolicy().reconsider(before, known(1e6), 0.0) is None
    decision = AdaptivePolicy().reconsider(before, known(4e5), 0.0)
    assert decision is not None
    assert (decision.chunk_index, decision.choice.name) == (1, "cachegen:2")
    assert decision.abandons
    assert decision.reason is Reason.ABANDON_TOO_SLOW


def test_what_is_nearly_sent_is_finished() -> None:
    assert (
        AdaptivePolicy().reconsider(in_flight(3.0, "cachegen:0", 3_100_000), known(4e5), 0.0)
        is None
    )


def test_a_chunk_is_given_up_only_so_often_and_only_where_allowed() -> None:
    dropped = in_flight(6.0, "cachegen:0", 100_000, epoch=2)
    assert AdaptivePolicy().reconsider(dropped, known(4e5), 0.0) is None
    policy = AdaptivePolicy(AdaptiveConfig(may_abandon=False))
    assert policy.reconsider(in_flight(6.0, "cachegen:0", 100_000), known(4e5), 0.0) is None


def test_a_chunk_just_begun_is_upgraded_when_the_link_turns_out_fast() -> None:
    begun = in_flight(9.0, "cachegen:2", 100_000)
    decision = AdaptivePolicy().reconsider(begun, known(1e6), 0.0)
    assert decision is not None
    assert (decision.reason, decision.abandons) == (Reason.UPGRADE, True)
    assert decision.choice.loss < 200.0
    assert (
        AdaptivePolicy().reconsider(in_flight(9.0, "cachegen:2", 100_000, epoch=1), known(1e6), 0.0)
        is None
    )


def test_small_changes_of_the_rate_do_not_make_it_flap() -> None:
    """A plan fits at 1 MB/s; within 10 % of it nothing that was begun is given up."""
    for rate in (0.9e6, 1.0e6, 1.1e6):
        assert (
            AdaptivePolicy().reconsider(in_flight(6.5, "cachegen:0", 1_000_000), known(rate), 0.0)
            is None
        )


def test_the_fastest_variant_takes_the_border_where_both_end_together() -> None:
    policy = AdaptivePolicy(AdaptiveConfig(fastest_with_loss_per_token=0.06))
    decision = next_of(policy, four(100.0), 1e6)
    assert decision.plan == {0: "text", 1: "text", 2: "cachegen:1", 3: "cachegen:1"}
    # 2 x 2 s of prefill with its margin beside 2 x 2 MB at 1 MB/s and a decode.
    assert decision.expected_ttft_s == pytest.approx(4.1, abs=0.3)


def test_the_fastest_variant_never_abandons_for_a_level_that_loses_too_much() -> None:
    policy = AdaptivePolicy(AdaptiveConfig(fastest_with_loss_per_token=0.06))
    decision = policy.reconsider(in_flight(6.0, "cachegen:0", 100_000), known(1e5), 0.0)
    assert decision is None or decision.choice.loss <= 60.0


def test_nothing_missing_means_nothing_to_decide() -> None:
    done = state(options(0), stages={0: (Stage.READY, "text")})
    assert AdaptivePolicy().next_decision(done, known(1e6), 0.0) is None
    assert AdaptivePolicy().reconsider(done, known(1e6), 0.0) is None


def test_without_recomputing_everything_is_sent() -> None:
    policy = AdaptivePolicy(AdaptiveConfig(may_recompute=False))
    decision = next_of(policy, four(9.0), 1e6)
    assert not decision.choice.is_text
    assert "text" not in decision.plan.values()


def test_chunks_that_only_text_can_bring_are_recomputed() -> None:
    bare = ChunkOptions(0, 0, 10, (options(0).choices[-1],))
    decision = next_of(AdaptivePolicy(), state(bare, deadline_s=0.5), 1e6)
    assert decision.choice.is_text
    assert not decision.meets_deadline
    waiting = TransferState(
        (ChunkProgress(bare, Stage.IN_FLIGHT, bare.choices[0]),), elapsed_s=0.0, deadline_s=1.0
    )
    assert AdaptivePolicy().next_decision(waiting, known(1e6), 0.0) is None
