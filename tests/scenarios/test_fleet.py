"""Request traces are read strictly and become the same arrivals every time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scenarios.config import Scenario, parse_scenario
from scenarios.errors import FileFormatError
from scenarios.fleet import Arrival, load_arrivals, plan_arrivals, plan_fleet_asks

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def fleet(tmp_path: Path, extra: str = "") -> Scenario:
    text = (
        'summary = "s"\nkind = "fleet"\npolicies = ["int8", "text"]\nquestions = ["a?", "b?"]\n'
        f"max_tokens = 20\nfleet = {{agents = 2, num_requests = 5{extra}}}\n"
        '[[contexts]]\nname = "x"\nparts = ["handbook"]\n[[contexts]]\nname = "y"\nparts = ["handbook"]\n'
    )
    return parse_scenario(text, source=tmp_path / "s.toml")


def test_azure_rows_become_arrivals_since_the_first(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n"
    arrivals = load_arrivals(write(tmp_path, "a.csv", AZURE + rows))
    assert [(a.context_tokens, a.answer_tokens) for a in arrivals] == [(4808, 10), (3180, 8)]
    assert [a.at_s for a in arrivals] == pytest.approx([0.0, 0.5])


def test_mooncake_lines_keep_their_block_ids(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
        '{"timestamp": 2500, "input_length": 500, "output_length": 6, "hash_ids": [0]}\n'
    )
    arrivals = load_arrivals(write(tmp_path, "m.jsonl", lines))
    assert arrivals == [Arrival(0.0, 600, 5, (0, 7)), Arrival(2.0, 500, 6, (0,))]


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("a.csv", "a,b\n1,2\n", 1, "has the header"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,1\n", 2, "2 fields"),
        ("a.csv", AZURE + "noon,1,2\n", 2, "noon"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,-1,2\n", 2, "negative"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,1,2\n2023-11-16 18:17:02,1,2\n", 3, "before"),
        ("a.csv", AZURE, None, "no request"),
        ("m.jsonl", "{oops\n", 1, "no request with timestamp"),
        ("m.jsonl", '{"timestamp": 1}\n', 1, "input_length"),
        (
            "m.jsonl",
            '{"timestamp": 1.5, "input_length": 1, "output_length": 1, "hash_ids": []}\n',
            1,
            "no count",
        ),
    ],
)
def test_fault_names_file_and_line(
    tmp_path: Path, name: str, text: str, line: int | None, problem: str
) -> None:
    with pytest.raises(FileFormatError, match=problem) as caught:
        load_arrivals(write(tmp_path, name, text))
    assert caught.value.line == line


def test_arrivals_from_the_seed_are_the_same_again_and_differ_by_seed(tmp_path: Path) -> None:
    scenario = fleet(tmp_path)
    first = plan_arrivals(scenario)
    assert first == plan_arrivals(scenario)
    assert [a.at_s for a in first] == sorted(a.at_s for a in first)
    assert first != plan_arrivals(dataclasses.replace(scenario, seed=9))
    assert len(first) == 5


def test_requests_of_a_trace_are_scaled_and_go_round_the_agents(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:17:0{i},{1000 * i + 1},{i + 1}\n" for i in range(4))
    write(tmp_path, "a.csv", AZURE + rows)
    scenario = fleet(tmp_path, ', requests = "a.csv", time_scale = 0.5, token_scale = 0.1')
    asks = plan_fleet_asks(scenario, "int8")
    assert [at_s for at_s, _ in asks] == [0.0, 0.5, 1.0, 1.5]
    assert [ask.agent for _, ask in asks] == [0, 1, 0, 1]
    assert [ask.max_tokens for _, ask in asks] == [1, 2, 3, 4]
    assert [ask.context for _, ask in asks] == ["x", "y", "x", "y"]
    assert {ask.request_policy for _, ask in asks} == {"fixed:int8"}
    assert not any(ask.evaluate for _, ask in asks)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "num_requests", "mean_tokens"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8819, 2048),
        ("AzureLLMInferenceTrace_conv.head8000.csv", 8000, 1196),
        ("mooncake_conversation_trace.head1500.jsonl", 1500, 13988),
    ],
)
def test_real_request_traces_have_the_figures_of_their_manifest(
    data_dir: Path, name: str, num_requests: int, mean_tokens: int
) -> None:
    arrivals = load_arrivals(data_dir / "requests" / name)
    assert len(arrivals) == num_requests
    mean = sum(a.context_tokens for a in arrivals) / len(arrivals)
    assert mean == pytest.approx(mean_tokens, abs=1)
