from __future__ import annotations

from edge_agent.timeline import MAX_DELIVERY_POINTS, ChunkRecord, Timeline


def make_timeline() -> Timeline:
    return Timeline(
        arrived_at=100.0,
        session="s",
        policy="cachegen",
        estimator="median-rate",
        deadline_s=2.0,
    )


def test_times_are_relative_to_the_arrival() -> None:
    timeline = make_timeline()
    timeline.chunks.append(ChunkRecord(0, 0, 10, choice="fp16", num_bytes=7, send_start_s=0.25))
    timeline.token(101.5)
    timeline.token(103.0)
    body = timeline.to_json(trace=False)
    assert body["ttft_s"] == body["first_token_s"] == 1.5
    assert body["last_token_s"] == 3.0
    assert body["slo_met"] is True
    assert body["chunks"][0]["send_start_s"] == 0.25
    assert body["chunks"][0]["ready_s"] is None


def test_late_or_missing_first_token_misses_the_deadline() -> None:
    timeline = make_timeline()
    assert not timeline.is_slo_met
    timeline.token(102.5)
    assert not timeline.is_slo_met


def test_trace_gives_everything_and_a_plain_answer_a_digest() -> None:
    timeline = make_timeline()
    for step in range(10 * MAX_DELIVERY_POINTS):
        timeline.delivered(100.0 + step, 5.0)
    timeline.decisions.append({"chunk": 0, "candidates": [1, 2]})
    plain, traced = timeline.to_json(trace=False), timeline.to_json(trace=True)
    assert len(plain["delivery"]) == MAX_DELIVERY_POINTS
    assert len(traced["delivery"]) == 10 * MAX_DELIVERY_POINTS
    assert plain["delivery"][0] == traced["delivery"][0] == [0.0, 5]
    assert plain["decisions"] == [{"chunk": 0}]
    assert traced["decisions"] == [{"chunk": 0, "candidates": [1, 2]}]
