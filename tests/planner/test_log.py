from __future__ import annotations

import json
import math

import pytest

from planner import LastSample, make_policy
from planner.log import InvalidLog, decision_record, read_decisions, to_lines
from tests.planner.builders import options, sample, state


def records() -> list[dict[str, object]]:
    estimator = LastSample()
    rows = []
    now_state = state(options(0), options(1), deadline_s=5.0)
    for rate in (None, 1e6):
        if rate is not None:
            estimator.on_delivery(sample(rate, 0.0))
        decision = make_policy("cachegen").next_decision(now_state, estimator, 0.0)
        assert decision is not None
        rows.append(decision_record(decision, now_state))
    return rows


def test_what_is_written_is_read_again() -> None:
    first, second = read_decisions(to_lines(records()))
    assert first.expected_ttft_s is None  # infinite: nothing was known
    assert first.rate_bytes_per_s is None
    assert first.reason == "default_level"
    assert second.choice == "cachegen:1"
    assert second.rate_bytes_per_s == pytest.approx(1e6)
    assert [candidate.choice for candidate in second.candidates][-1] == "text"
    assert second.plan == {0: "cachegen:1"}


def test_equal_logs_are_equal_bytes() -> None:
    assert to_lines(records()) == to_lines(records())


def test_a_list_an_answer_and_lines_are_all_read() -> None:
    rows = records()
    answer = {"choices": [], "kvtide": {"policy": "cachegen", "decisions": rows}}
    lines = read_decisions(to_lines(rows) + "\n")
    assert read_decisions(json.dumps(rows)) == lines
    assert read_decisions(json.dumps(answer)) == lines
    assert read_decisions(json.dumps(rows[0])) == lines[:1]


def test_the_agents_own_log_is_read_past_its_other_events() -> None:
    rows = records()
    log: list[dict[str, object]] = [{"event": "listening"}]
    log += [{"event": "plan.decision", "decision": row} for row in rows]
    assert read_decisions(to_lines(log)) == read_decisions(to_lines(rows))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        ("{}\nnonsense", "line 2"),
        ('"text"', "neither lines"),
        ('{"event": "ready"}\n{"event": "stopped"}', "holds no decision.*level debug"),
        ("[5]", "decision 1 is not an object"),
        ("[{}]", "decision 1 has reason None"),
        ('[{"reason": "whim"}]', "unknown reason 'whim'"),
        ('[{"reason": "fixed", "at_s": true}]', "at_s True"),
        ('[{"reason": "fixed", "at_s": 1, "chunk": "0"}]', "chunk '0'"),
        ('[{"reason": "fixed", "candidates": [{}]}]', "candidate that lacks"),
        ('[{"reason": "fixed", "plan": {"x": "text"}}]', "plan that is not"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_by_place(text: str, complaint: str) -> None:
    with pytest.raises(InvalidLog, match=complaint):
        read_decisions(text)


def test_no_infinity_reaches_the_log() -> None:
    unmeasured = options(0, levels=(("x:0", 5, math.inf),))
    decision = make_policy("fixed:x:0").next_decision(state(unmeasured), LastSample(), 0.0)
    assert decision is not None
    line = to_lines([decision_record(decision, state(unmeasured))])
    assert "Infinity" not in line
    assert read_decisions(line)[0].candidates[0].loss is None
