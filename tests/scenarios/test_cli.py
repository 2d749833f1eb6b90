"""The command lines: what they print, what they write, and how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scenarios import cli, run
from scenarios.calibrate import costs_from, prediction_text, predictions
from scenarios.config import CostSpec, catalog_names
from scenarios.errors import ReportError
from scenarios.generate import TRACES_DIR
from scenarios.results import load_report, to_json
from tests.scenarios.samples import CHUNK_BYTES, report

REPO = Path(__file__).resolve().parents[2]
SCENARIO = """
summary = "cheap"
policies = ["text", "int8"]
slo_s = 20.0
questions = ["Why?"]
[[contexts]]
name = "c"
parts = [{text = "handbook", tokens = 800}]
[cost]
levels = [{name = "int8", bits_per_element = 8.25, kl = 0.001}]
"""


@pytest.fixture
def cheap(tmp_path: Path) -> str:
    path = tmp_path / "cheap.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return str(path)


def test_list_has_a_line_per_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == catalog_names()


def test_simulation_writes_all_files_and_the_same_again(
    tmp_path: Path, cheap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for turn in ("1", "2"):
        folder = tmp_path / turn / "deep"
        arguments = [
            "--json",
            f"{folder}/r.json",
            "--html",
            f"{folder}/r.html",
            "--csv",
            f"{folder}/r.csv",
        ]
        assert run.main([cheap, "--simulate", *arguments]) == 0
        outputs.append([(folder / f"r.{kind}").read_bytes() for kind in ("json", "html", "csv")])
    assert outputs[0] == outputs[1]
    assert all(outputs[0])
    assert "int8" in capsys.readouterr().out


def test_policies_trace_and_deadline_can_be_given(tmp_path: Path, cheap: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("down,up\n1,800\n1,800\n", encoding="utf-8")
    out = tmp_path / "r.json"
    arguments = ["--policies", "int8", "--trace", str(trace), "--column", "up", "--unit", "kbps"]
    assert run.main([cheap, "--simulate", *arguments, "--slo", "3", "--json", str(out)]) == 0
    made = load_report(out)
    assert made.policies == ("int8",)
    assert made.slo_s == 3.0
    assert made.trace == "t.csv"
    assert made.trace_mean_bytes_per_s == 100_000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "name a scenario"),
        (["nothing-like-it"], "neither a scenario of the catalog"),
        (["demo", "--policies", "fast"], "unknown policy 'fast'"),
        (["demo", "--policies", ","], "at least one"),
        (["demo", "--slo", "-1"], "--slo is -1.0"),
        (["demo", "--simulate", "--trace", "/no/such/file"], "/no/such/file"),
        (["demo", "--json", "/proc/none/r.json"], "/proc/none/r.json cannot be written"),
        (["demo", "--simulate", "--like", "/no/report"], "/no/report cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert problem in said
    assert len(said.splitlines()) == 1


def test_trace_info_prints_figures_and_a_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "info", str(TRACES_DIR / "outage.txt")]) == 0
    said = capsys.readouterr().out
    assert "duration     180 s" in said
    assert "mean         6.87 Mbit/s" in said
    assert "outages      1 of 1 s or longer, the longest 77 s" in said
    assert "█" in said
    assert max(len(line) for line in said.splitlines()) <= 120


def test_trace_info_of_a_csv_names_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("t,up\n0,8000\n1,8000\n", encoding="utf-8")
    assert cli.main(["trace", "info", str(path)]) == 2
    assert "one of: t, up" in capsys.readouterr().err
    ping = tmp_path / "ping.log"
    ping.write_text("64 bytes: time=30.0 ms\n", encoding="utf-8")
    arguments = ["--column", "up", "--unit", "kbps", "--time-column", "t", "--ping", str(ping)]
    assert cli.main(["trace", "info", str(path), *arguments]) == 0
    said = capsys.readouterr().out
    assert "mean         8 Mbit/s" in said
    assert "delay        15 ms" in said


def test_report_show_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(to_json(report()), encoding="utf-8")
    assert cli.main(["report", "show", str(path)]) == 0
    assert "fixed:cachegen:2" in capsys.readouterr().out
    assert cli.main(["report", "diff", str(path), str(path)]) == 0
    assert "1.000" in capsys.readouterr().out
    assert cli.main(["report", "diff", str(path), str(tmp_path / "none.json")]) == 2


def test_umbrella_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "kvtide trace info" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    assert cli.main(["scenario", "--list"]) == 0


def test_umbrella_passes_the_rest_to_the_rooms_tools() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["codec", "--help"])
    assert ended.value.code == 0


def test_costs_of_a_real_run_are_measured_from_its_records() -> None:
    cost = costs_from(report(), CostSpec())
    # The sample's text chunks take 4.9, 5.9, 6.9 and 7.9 s for 1536 tokens each.
    assert cost.prefill_b_s == pytest.approx(1.0 / 1536 / 1536, rel=1e-6)
    assert cost.prefill_a_s == pytest.approx(4.9 / 1536 - cost.prefill_b_s * 768, rel=1e-6)
    kv_bytes = 1536 * 30 * 2 * 3 * 64 * 2
    assert cost.decode_bytes_per_s == pytest.approx(kv_bytes / 0.35, rel=1e-6)
    by_name = {level.name: level for level in cost.levels}
    assert by_name["fp16"].bits_per_element == pytest.approx(16.0)
    assert by_name["fp16"].kl == 0.0
    assert by_name["int8"].kl == 0.0002
    assert CHUNK_BYTES["fp16"] == kv_bytes
    with pytest.raises(ReportError, match="was simulated"):
        costs_from(dataclasses.replace(report(), mode="simulated"), CostSpec())


def test_prediction_error_is_relative_to_the_real_run() -> None:
    real = report()
    twice = dataclasses.replace(
        real,
        requests=tuple(dataclasses.replace(r, ttft_s=(r.ttft_s or 0) * 1.2) for r in real.requests),
    )
    found = predictions(twice, real)
    assert [item.policy for item in found] == list(real.policies)
    assert all(item.error == pytest.approx(0.2) for item in found)
    assert "median error 20.0%" in prediction_text(found)
    assert "no policy" in prediction_text([])


def test_simulation_like_a_report_prints_the_comparison(
    tmp_path: Path, cheap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tmp_path / "real.json"
    real.write_text(to_json(report()), encoding="utf-8")
    assert run.main([cheap, "--simulate", "--like", str(real)]) == 0
    assert "median error" in capsys.readouterr().out


@pytest.mark.nats
def test_interrupted_run_says_so_and_leaves_no_program(tmp_path: Path, cheap: str) -> None:
    logs = tmp_path / "logs"
    process = subprocess.Popen(
        [sys.executable, "scenarios/run.py", cheap, "--logs", str(logs)],
        cwd=REPO,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    give_up = time.monotonic() + 120
    while not (logs / "worker-0.log").exists() and time.monotonic() < give_up:
        assert process.poll() is None
        os.sched_yield()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == run.EXIT_INTERRUPTED
    assert "interrupted" in said
    left = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(logs) in _command_line(entry)
    ]
    assert left == []


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_report_file_is_json_with_the_schema(tmp_path: Path, cheap: str) -> None:
    out = tmp_path / "r.json"
    assert run.main([cheap, "--simulate", "--json", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["schema"] == "kvtide.scenario-report/1"
