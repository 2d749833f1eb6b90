"""A replay with stand-in programs: real nats-server, real link, real processes, no model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path

import pytest

from scenarios.client import Ask
from scenarios.config import Scenario, parse_scenario
from scenarios.errors import ReplayError
from scenarios.metrics import figures
from scenarios.programs import Commands, running
from scenarios.progress import SilentProgress
from scenarios.replay import replay
from scenarios.results import RequestRecord, RunReport
from scenarios.workload import handbook

pytestmark = pytest.mark.nats

FAKE = str(Path(__file__).with_name("fake_programs.py"))


def commands(*, agent: str = "ok", worker: str = "ok") -> Commands:
    return Commands(
        agent=(sys.executable, FAKE, "agent", agent),
        worker=(sys.executable, FAKE, "worker", worker),
    )


def scenario(
    tmp_path: Path, extra: str = "", policies: str = '["text", "int8", "cachegen"]'
) -> Scenario:
    (tmp_path / "flat.txt").write_text("0 8\n1000 8\n", encoding="utf-8")
    text = (
        f'summary = "test"\npolicies = {policies}\nslo_s = 5.0\nquestions = ["Why?"]\n{extra}\n'
        '[[contexts]]\nname = "handbook"\nparts = ["handbook"]\n[uplink]\ntrace = "flat.txt"\n'
    )
    return parse_scenario(text, source=tmp_path / "test.toml")


class Watcher(SilentProgress):
    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.answers: list[str] = []

    def ingest(self, context: str, stage: str, done: int, total: int) -> None:
        self.stages.append((stage, done, total))

    def answered(self, record: RequestRecord) -> None:
        self.answers.append(record.policy)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of living processes that were started with a file of this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


async def test_every_policy_is_asked_and_its_bytes_take_the_links_time(tmp_path: Path) -> None:
    watcher = Watcher()
    made = scenario(tmp_path)
    report = await replay(
        made, progress=watcher, commands=commands(), keep_folder=tmp_path / "work"
    )
    assert watcher.answers == ["text", "int8", "cachegen"]
    assert ("encode", 2, 2) in watcher.stages
    by_policy = {item.policy: item for item in figures(report)}
    assert by_policy["int8"].bytes_mean == 200_000
    assert by_policy["text"].bytes_mean == 0
    assert dict(by_policy["cachegen"].choices) == {"cachegen:2": 2}
    assert by_policy["int8"].kl_mean == 0.0
    assert all(item.exact_answers == item.num_evaluated == 1 for item in by_policy.values())
    for request in report.requests:
        assert request.error == ""
        assert request.answer == "It works."
        assert request.ttft_s is not None
        # 8 Mbit/s are 1e6 bytes/s, and each chunk is a round trip of 40 ms at least.
        assert request.ttft_s >= request.bytes_sent / 1e6 + 0.08
        assert request.link is not None
        carried = sum(request.link.carried_bytes_per_s) * request.link.step_s
        assert carried >= request.bytes_sent
    assert report.ingests[0].num_tokens == len(handbook()) // 4
    assert processes_of(tmp_path) == []
    assert "levels" in (tmp_path / "work" / "agent-0.toml").read_text(encoding="utf-8")


async def test_settings_of_the_surrounding_shell_do_not_reach_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_EDGE_TENANT", "somebody-else")
    script = "import os, json, time; print(json.dumps({'event': 'listening', 'port': 1 if 'KVTIDE_EDGE_TENANT' in os.environ else 2}), flush=True); time.sleep(60)"
    async with running(
        "probe", (sys.executable, "-c", script), {}, folder=tmp_path, ready_timeout_s=20
    ) as program:
        assert program.port == 2


@pytest.mark.parametrize(
    ("agent", "worker", "problem"),
    [
        ("exit", "ok", "agent-0 ended with exit code 2: .*the port is busy"),
        ("ok", "exit", "worker-0 ended with exit code 2: .*the port is busy"),
        ("refuse-ingest", "ok", "HTTP 507: the disk is full"),
        ("garble", "ok", "lacks or garbles 'choice'"),
        ("die", "ok", "agent-0 ended with exit code 3"),
    ],
)
async def test_program_that_fails_is_named_and_nothing_is_left(
    tmp_path: Path, agent: str, worker: str, problem: str
) -> None:
    with pytest.raises(ReplayError, match=problem):
        await replay(
            scenario(tmp_path),
            progress=SilentProgress(),
            commands=commands(agent=agent, worker=worker),
            keep_folder=tmp_path / "work",
        )
    assert processes_of(tmp_path) == []


async def test_refused_request_is_a_record_and_the_run_goes_on(tmp_path: Path) -> None:
    report = await replay(
        scenario(tmp_path), progress=SilentProgress(), commands=commands(agent="no-worker")
    )
    assert [r.error for r in report.requests] == ["HTTP 503: no worker answered within 2 s"] * 3
    assert all(item.num_failed == item.slo_violations == 1 for item in figures(report))


async def test_cancelled_run_ends_its_programs(tmp_path: Path) -> None:
    slow = dataclasses.replace(scenario(tmp_path), policies=("fp16",) * 1, repetitions=50)
    started = asyncio.Event()

    class Notice(SilentProgress):
        def asking(self, request: Ask) -> None:
            started.set()

    task = asyncio.create_task(
        replay(slow, progress=Notice(), commands=commands(), keep_folder=tmp_path / "work")
    )
    await started.wait()
    assert len(processes_of(tmp_path)) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_of(tmp_path) == []


async def test_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    command = (sys.executable, FAKE, "worker", "stubborn")
    async with running(
        "stubborn",
        command,
        {"http_port": 0},
        folder=tmp_path,
        ready_timeout_s=20,
        stop_timeout_s=0.3,
    ) as program:
        pid = program.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_program_that_never_listens_is_given_up(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)")
    with pytest.raises(ReplayError, match=r"mute did not listen within 1\.5 s: hello"):
        async with running("mute", command, {}, folder=tmp_path, ready_timeout_s=1.5):
            pass


async def test_tie_scales_the_uplink_to_the_time_that_text_took(tmp_path: Path) -> None:
    made = scenario(tmp_path, policies='["text", "int8"]')
    tied = dataclasses.replace(made, uplink=dataclasses.replace(made.uplink, tie_level="int8"))
    report = await replay(tied, progress=SilentProgress(), commands=commands())
    text, level = report.requests
    assert text.ttft_s is not None
    assert level.ttft_s is not None
    assert report.trace_mean_bytes_per_s == pytest.approx(200_000 / text.ttft_s, rel=0.01)
    # Two chunks with a round trip each; the machine may be late.
    assert text.ttft_s < level.ttft_s < 2 * text.ttft_s + 1.0


async def test_fleet_asks_from_every_agent(tmp_path: Path) -> None:
    made = scenario(
        tmp_path,
        'kind = "fleet"\nfleet = {agents = 2, num_requests = 4, mean_gap_s = 0.05}',
        '["int8"]',
    )
    report: RunReport = await replay(made, progress=SilentProgress(), commands=commands())
    assert [request.agent for request in report.requests] == [0, 1, 0, 1]
    assert all(request.ttft_s is not None for request in report.requests)
