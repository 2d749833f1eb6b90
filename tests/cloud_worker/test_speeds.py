from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cloud_worker.speeds import DecodeSample, PrefillCost, PrefillSample, SpeedModel


def sample(cost: PrefillCost, start: int, num_tokens: int) -> PrefillSample:
    return PrefillSample(start, num_tokens, cost.seconds(start, num_tokens))


def test_the_cost_of_a_step_is_the_sum_over_its_positions() -> None:
    cost = PrefillCost(call_s=3.0, a_s=2.0, b_s=0.5)
    by_hand = 3.0 + sum(2.0 + 0.5 * position for position in range(10, 14))
    assert cost.seconds(10, 4) == pytest.approx(by_hand)


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-5))
def test_the_three_numbers_are_found_from_three_kinds_of_steps(
    call: float, a: float, b: float
) -> None:
    cost = PrefillCost(call, a, b)
    model = SpeedModel([sample(cost, 0, 8), sample(cost, 0, 256), sample(cost, 4096, 256)])
    for start, num_tokens in ((1000, 512), (0, 20), (6000, 100)):
        expected = cost.seconds(start, num_tokens)
        assert model.prefill_seconds(start, num_tokens) == pytest.approx(expected, rel=2e-2)


def test_one_position_gives_a_flat_line_that_predicts_it() -> None:
    model = SpeedModel([PrefillSample(0, 100, 1.0)])
    assert model.prefill_seconds(0, 100) == pytest.approx(1.0, rel=1e-3)


def test_the_line_never_falls_with_the_position() -> None:
    model = SpeedModel([PrefillSample(0, 100, 2.0), PrefillSample(5000, 100, 1.0)])
    cost = model.prefill
    assert cost is not None
    assert cost.b_s == 0.0
    assert cost.a_s > 0.0


def test_attention_alone_gives_no_negative_number() -> None:
    model = SpeedModel([PrefillSample(0, 100, 0.001), PrefillSample(1000, 100, 10.0)])
    cost = model.prefill
    assert cost is not None
    assert min(cost.call_s, cost.a_s) >= 0.0
    assert cost.b_s > 0.0


def test_a_worker_that_got_slower_is_followed() -> None:
    fast, slow = PrefillCost(0.02, 0.001, 1e-7), PrefillCost(0.06, 0.003, 3e-7)
    model = SpeedModel([sample(fast, start, 256) for start in (0, 2048) * 10])
    for start in (0, 512, 1024, 2048) * 30:
        model.observe_prefill(sample(slow, start, 256))
    assert model.prefill_seconds(1000, 256) == pytest.approx(slow.seconds(1000, 256), rel=0.1)


def test_decode_speed_is_kept_per_level_set() -> None:
    model = SpeedModel(
        decode=[DecodeSample("int8", 1000, 0.1), DecodeSample("cachegen", 1000, 1.0)]
    )
    assert model.decode_bytes_per_s("int8") == pytest.approx(10_000)
    assert model.decode_seconds("cachegen", 5000) == pytest.approx(5.0)
    assert model.level_sets == ("cachegen", "int8")


def test_what_was_never_measured_is_unknown_and_counts_nothing() -> None:
    model = SpeedModel()
    assert model.prefill is None
    assert model.decode_bytes_per_s("fp16") is None
    assert model.prefill_seconds(0, 10) == model.decode_seconds("fp16", 10) == 0.0


def test_a_clock_that_did_not_tick_does_not_break_the_model() -> None:
    model = SpeedModel([PrefillSample(0, 1, 0.0)], [DecodeSample("fp16", 10, 0.0)])
    assert model.decode_seconds("fp16", 10) >= 0.0
    assert model.prefill_seconds(0, 1) >= 0.0


def test_empty_measurements_are_refused() -> None:
    model = SpeedModel()
    with pytest.raises(ValueError, match="0 tokens"):
        model.observe_prefill(PrefillSample(0, 0, 1.0))
    with pytest.raises(ValueError, match="0 bytes"):
        model.observe_decode(DecodeSample("fp16", 0, 1.0))
