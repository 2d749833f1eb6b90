from __future__ import annotations

import math

import pytest

from planner import Choice, InvalidState
from planner.cost import CostModel, LevelCost, WorkerSpeeds, level_set, makespan_s

SPEEDS = WorkerSpeeds(1e-3, 1e-6, {"cachegen": 1e8})


def test_prefill_grows_with_the_position() -> None:
    assert SPEEDS.prefill_s(0, 1000) == pytest.approx(1.0 + 1e-6 * 999 * 1000 / 2)
    assert SPEEDS.prefill_s(1000, 2000) == pytest.approx(
        SPEEDS.prefill_s(0, 2000) - SPEEDS.prefill_s(0, 1000)
    )


def test_decode_costs_by_the_kv_that_comes_out() -> None:
    model = CostModel(SPEEDS, kv_bytes_per_token=20_000)
    assert model.decode_s("cachegen:2", 1000) == pytest.approx(0.2)
    assert model.decode_s("fp16", 1000) == 0.0
    assert level_set("klt:3") == "klt"


def test_measurements_correct_the_predictions_and_hiccups_do_not() -> None:
    model = CostModel(SPEEDS, kv_bytes_per_token=20_000)
    for _ in range(20):
        model.on_prefill(0, 1000, 2 * SPEEDS.prefill_s(0, 1000))
        model.on_decode("cachegen:0", 1000, 0.1)
    assert model.prefill_correction == pytest.approx(2.0, rel=0.01)
    assert model.prefill_s(0, 1000) == pytest.approx(2 * SPEEDS.prefill_s(0, 1000), rel=0.01)
    assert model.decode_s("cachegen:1", 1000) == pytest.approx(0.1, rel=0.01)
    model.on_prefill(0, 1000, 1e6)
    model.on_prefill(0, 1000, 0.0)
    assert model.prefill_correction == pytest.approx(2.0, rel=0.01)


def test_options_hold_losses_per_token_times_tokens_and_text() -> None:
    model = CostModel(SPEEDS, kv_bytes_per_token=20_000)
    levels = [LevelCost("cachegen:0", 500, 0.002), LevelCost("cachegen:9", 10, None)]
    chunk = model.options(3, 0, 1000, levels)
    assert [choice.name for choice in chunk.choices] == ["cachegen:0", "text"]
    assert chunk.choices[0].loss == pytest.approx(2.0)
    assert chunk.text is not None
    assert chunk.text.prefill_s == pytest.approx(SPEEDS.prefill_s(0, 1000))
    bare = model.options(3, 0, 1000, levels[1:], can_recompute=False)
    assert [choice.name for choice in bare.choices] == ["cachegen:9"]
    assert bare.text is None


def test_the_pipeline_waits_for_whoever_is_last() -> None:
    text = Choice("text", 0, 0.0, 2.0, 0.0, is_text=True)
    level = Choice("level", 10, 1.0, 0.0, 1.0)
    # The decoder takes chunk 2 from 1 s, chunk 1 from 2 s; the engine is done at 2 s.
    assert makespan_s([text, level, level], arrivals_s=[0, 1.5, 1.0], send_order=[2, 1]) == 3.0
    # Text behind KV waits for it: the paper's order.
    assert makespan_s([level, text], arrivals_s=[3.0, 0], send_order=[0]) == 6.0
    assert makespan_s([text], arrivals_s=[0], send_order=[], engine_free_s=1.0) == 3.0
    assert makespan_s([level], arrivals_s=[0], send_order=[0], decoder_free_s=5.0) == 6.0


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(InvalidState):
        WorkerSpeeds(-1.0)
    with pytest.raises(InvalidState):
        WorkerSpeeds(math.inf)
    with pytest.raises(InvalidState, match="'x'"):
        Choice("x", -1, 0.0, 0.0, 0.0)
