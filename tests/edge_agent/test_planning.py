from __future__ import annotations

import json
import math
from typing import Any

import pytest

from edge_agent.keys import ChunkSpan
from edge_agent.planning import SHARED_CORES_SLOWDOWN, Plan, build_plan
from planner import TEXT, Decision, Reason, Stage
from planner.log import decision_record
from wire import Accept, HaveChunk, Speeds

SPANS = (ChunkSpan(0, 100, b"a" * 32), ChunkSpan(100, 150, b"b" * 32))


def make_plan(**changes: Any) -> Plan:
    accept = Accept(
        worker="w",
        window_bytes=changes.pop("window_bytes", 10**6),
        segment_bytes=65536,
        speeds=Speeds(decode_bytes_per_s=1000.0, prefill_base_s=0.001, prefill_slope_s=0.0),
        queue_delay_s=0.5,
        backend=changes.pop("backend", "cuda"),
        have=changes.pop("have", ()),
    )
    return build_plan(
        spans=SPANS,
        sizes=[{"fp16": 2000, "cachegen:1": 300}, {"fp16": 1000}],
        level_loss={"fp16": 0.0, "cachegen:1": 0.02},
        accept=accept,
        kv_bytes_per_token=20,
        question_tokens=10,
        deadline_s=3.0,
        arrived_at=100.0,
        accepted_at=100.1,
        **changes,
    )


def test_choices_carry_bytes_times_and_measured_losses() -> None:
    plan = make_plan()
    options = plan.options(plan.chunks[0])
    fine, coarse, text = options.choices
    assert (fine.name, fine.num_bytes, fine.loss) == ("fp16", 2000, 0.0)
    # 100 tokens of 20 bytes at 1000 bytes a second; 0.02 nats a token over 100 tokens.
    assert coarse.decode_s == pytest.approx(2.0)
    assert coarse.loss == pytest.approx(2.0)
    assert (text.name, text.num_bytes, text.is_text) == (TEXT, 0, True)
    assert text.prefill_s == pytest.approx(0.1)


def test_worker_whose_cores_also_decode_is_planned_slower_at_prefill_alone() -> None:
    shared, alone = (make_plan(backend=name) for name in ("cpu", "cuda"))
    slow, fast = (plan.options(plan.chunks[0]).choices for plan in (shared, alone))
    assert slow[-1].prefill_s == pytest.approx(SHARED_CORES_SLOWDOWN * fast[-1].prefill_s)
    assert slow[:-1] == fast[:-1]


def test_level_without_a_measured_loss_is_offered_last() -> None:
    plan = make_plan()
    plan.level_loss = {}
    plan.learned()
    assert math.isinf(plan.options(plan.chunks[0]).choices[0].loss)


def test_level_larger_than_the_window_is_not_offered() -> None:
    plan = make_plan(window_bytes=1500)
    assert [c.name for c in plan.options(plan.chunks[0]).choices] == ["cachegen:1", TEXT]
    assert [c.name for c in plan.options(plan.chunks[1]).choices] == ["fp16", TEXT]


def test_chunk_that_the_worker_has_is_ready() -> None:
    plan = make_plan(have=(HaveChunk(1, "fp16"), HaveChunk(7, "fp16")))
    state = plan.state(bytes_in_flight=0, now=101.0)
    assert [chunk.stage for chunk in state.chunks] == [Stage.MISSING, Stage.READY]


def test_state_counts_from_the_arrival() -> None:
    plan = make_plan()
    state = plan.state(bytes_in_flight=7, now=100.3)
    assert state.elapsed_s == pytest.approx(0.3)
    assert state.deadline_s == 3.0
    assert state.bytes_in_flight == 7
    # Half a second of queue at the acceptance, 0.2 s ago.
    assert state.worker.queue_delay_s == pytest.approx(0.3)
    assert state.worker.tail_prefill_s == pytest.approx(0.01)


def test_worker_that_is_slower_than_it_said_corrects_the_choices() -> None:
    plan = make_plan()
    before = plan.options(plan.chunks[1]).choice(TEXT)
    plan.measured(plan.chunks[0], level=TEXT, seconds=0.2)
    after = plan.options(plan.chunks[1]).choice(TEXT)
    assert before is not None
    assert after is not None
    assert after.prefill_s > before.prefill_s


def test_only_a_damaged_chunk_falls_back_to_text() -> None:
    plan = make_plan()
    assert plan.fall_back(0) is None
    plan.drop_level(0, "fp16")
    decision = plan.fall_back(0)
    assert decision is not None
    assert decision.choice.is_text
    assert [c.name for c in plan.options(plan.chunks[0]).choices] == ["cachegen:1", TEXT]


def test_text_in_flight_counts_since_it_was_begun() -> None:
    plan = make_plan()
    chunk = plan.chunks[0]
    chunk.stage, chunk.choice, chunk.begun_s = Stage.IN_FLIGHT, plan.options(chunk).text, 100.5
    assert plan.state(bytes_in_flight=0, now=101.0).worker.text_begun_s == pytest.approx(0.5)


def test_decision_record_is_json_even_when_nothing_is_known() -> None:
    plan = make_plan()
    state = plan.state(bytes_in_flight=0, now=101.0)
    choice = plan.options(plan.chunks[0]).choices[0]
    decision = Decision(
        0, choice, Reason.FIXED, math.inf, ttft_quantiles=((0.5, math.inf),), plan={0: "fp16"}
    )
    record = json.loads(json.dumps(decision_record(decision, state), allow_nan=False))
    assert record["expected_ttft_s"] is None
    assert record["choice"] == "fp16"
    assert [c["choice"] for c in record["candidates"]] == ["fp16", "cachegen:1", TEXT]
