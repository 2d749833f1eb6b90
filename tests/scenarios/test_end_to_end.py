"""The real agent and worker on a tiny random model, over a real nats-server and the link."""

from __future__ import annotations

from pathlib import Path

import pytest

from scenarios import run
from scenarios.config import Scenario, parse_scenario
from scenarios.metrics import figures
from scenarios.progress import SilentProgress
from scenarios.replay import replay
from scenarios.report import html_page
from scenarios.results import load_report
from scenarios.workload import handbook, shorten

pytestmark = [pytest.mark.nats, pytest.mark.e2e]


def tiny(
    folder: Path, model: Path, *, policies: str, rate_mbps: float, extra: str = ""
) -> Scenario:
    """Return a scenario on the tiny model whose context has about 800 of its tokens."""
    (folder / "flat.txt").write_text(f"0 {rate_mbps}\n1000 {rate_mbps}\n", encoding="utf-8")
    (folder / "text.txt").write_text(shorten(handbook(), 400), encoding="utf-8")
    text = f"""
summary = "a tiny model"
policies = {policies}
slo_s = 60.0
max_tokens = 6
chunk_tokens = 256
timeout_s = 200.0
questions = ["Who answers?"]
{extra}
[[contexts]]
name = "rules"
parts = ["text.txt"]
[model]
name = "{model}"
[uplink]
trace = "flat.txt"
"""
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return parse_scenario(text, source=path)


async def test_real_programs_answer_under_every_policy_as_over_the_exact_cache(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    policies = '["text", "fp16", "int8"]'
    scenario = tiny(tmp_path, tiny_model_dir, policies=policies, rate_mbps=8)
    report = await replay(scenario, progress=SilentProgress(), keep_folder=tmp_path / "work")
    (ingest,) = report.ingests
    assert ingest.num_chunks == -(-ingest.num_tokens // 256)
    elements = ingest.num_tokens * 4 * 2 * 2 * 16
    by_policy = {request.policy: request for request in report.requests}
    assert [request.error for request in report.requests] == [""] * 3
    for policy in ("text", "fp16"):
        evaluation = by_policy[policy].evaluation
        assert evaluation is not None
        assert evaluation.greedy_match
        assert evaluation.kl < 1e-4
        assert by_policy[policy].answer == evaluation.exact_text
    assert by_policy["text"].bytes_sent == 0
    assert by_policy["fp16"].bytes_sent == pytest.approx(2 * elements, rel=0.02)
    assert by_policy["int8"].bytes_sent < 0.65 * by_policy["fp16"].bytes_sent
    for request in report.requests:
        assert [c.choice for c in request.chunks] == [request.policy] * ingest.num_chunks
        assert request.ttft_s is not None
        # Nothing is faster than the link: 8 Mbit/s are 1e6 bytes/s.
        assert request.ttft_s > request.bytes_sent / 1e6
        assert request.link is not None
        carried = sum(request.link.carried_bytes_per_s) * request.link.step_s
        assert carried > request.bytes_sent
        if request.policy != "text":
            assert request.delivery
    assert all(item.num_failed == 0 for item in figures(report))
    assert "no first token" not in html_page(report)


async def test_killed_worker_is_replaced_by_the_spare_one(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    scenario = tiny(
        tmp_path,
        tiny_model_dir,
        policies='["int8"]',
        rate_mbps=0.5,
        extra="evaluate = false\nfaults = {kill_worker_s = 2.0, spare_workers = 1}",
    )
    report = await replay(scenario, progress=SilentProgress(), keep_folder=tmp_path / "work")
    (request,) = report.requests
    assert request.error == ""
    assert request.worker_changes == 1
    assert request.ttft_s is not None
    assert request.ttft_s > 2.0 + request.chunks[-1].num_bytes / 62_500
    # What the dead worker had was sent again.
    assert request.bytes_sent > sum(chunk.num_bytes for chunk in request.chunks)


async def test_fleet_of_two_agents_shares_a_worker(tmp_path: Path, tiny_model_dir: Path) -> None:
    scenario = tiny(
        tmp_path,
        tiny_model_dir,
        policies='["int8"]',
        rate_mbps=8,
        extra='kind = "fleet"\nfleet = {agents = 2, num_requests = 4, mean_gap_s = 0.3}',
    )
    report = await replay(scenario, progress=SilentProgress())
    assert [request.error for request in report.requests] == [""] * 4
    assert {request.agent for request in report.requests} == {0, 1}


@pytest.mark.data
def test_recorded_trace_from_the_command_line_carries_the_real_programs(
    tmp_path: Path, tiny_model_dir: Path, data_dir: Path
) -> None:
    tiny(tmp_path, tiny_model_dir, policies='["text", "int8"]', rate_mbps=8)
    path = tmp_path / "tiny.toml"
    trace = data_dir / "traces" / "mahimahi" / "TMobile-LTE-short.up"
    out = tmp_path / "out.json"
    arguments = ["--policies", "int8", "--trace", str(trace), "--json", str(out), "--quiet"]
    assert run.main([str(path), *arguments]) == 0
    report = load_report(out)
    assert report.trace == "TMobile-LTE-short.up"
    (request,) = report.requests
    assert request.ttft_s is not None
    assert request.evaluation is not None
