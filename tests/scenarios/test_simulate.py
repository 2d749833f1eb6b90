"""Virtual time: the same report byte for byte, and figures that follow from the inputs by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scenarios.config import (
    CostSpec,
    LevelCost,
    Scenario,
    catalog_names,
    load_scenario,
    parse_scenario,
)
from scenarios.errors import ScenarioConfigError
from scenarios.metrics import figures
from scenarios.results import RequestRecord, to_json
from scenarios.simulate import SILENCE_S, SLOWNESS, simulate

LEVELS = (
    LevelCost("fp16", 16.0, 0.0),
    LevelCost("int8", 8.25, 0.0005),
    LevelCost("cachegen:0", 5.5, 0.004),
    LevelCost("cachegen:1", 4.2, 0.01),
    LevelCost("cachegen:2", 3.1, 0.03),
    LevelCost("cachegen:3", 2.4, 0.08),
    LevelCost("klt:4", 0.63, 0.01),
)
COST = CostSpec(levels=LEVELS, overhead_s=0.1)


def scenario(
    tmp_path: Path, extra: str = "", policies: str = '["text", "int8", "cachegen"]'
) -> Scenario:
    (tmp_path / "flat.txt").write_text("0 16\n1000 16\n", encoding="utf-8")
    text = (
        f'summary = "test"\npolicies = {policies}\nslo_s = 15.0\nquestions = ["Why?", "How?"]\n{extra}\n'
        '[[contexts]]\nname = "handbook"\nparts = ["handbook"]\n[uplink]\ntrace = "flat.txt"\n'
    )
    parsed = parse_scenario(text, source=tmp_path / "test.toml")
    return dataclasses.replace(parsed, cost=COST)


def of(requests: tuple[RequestRecord, ...], policy: str) -> list[RequestRecord]:
    return [request for request in requests if request.policy == policy]


@pytest.mark.parametrize("name", catalog_names())
def test_catalog_scenario_runs_in_virtual_time_twice_alike(name: str) -> None:
    catalog = dataclasses.replace(load_scenario(name), cost=COST)
    report = simulate(catalog)
    assert to_json(report) == to_json(simulate(catalog))
    assert [item.policy for item in figures(report)] == list(catalog.policies)
    assert all(request.ttft_s is not None for request in report.requests)


def test_fixed_level_takes_its_bytes_over_the_rate(tmp_path: Path) -> None:
    report = simulate(scenario(tmp_path))
    first = of(report.requests, "int8")[0]
    elements = first.num_tokens * 30 * 2 * 3 * 64
    assert first.bytes_sent == pytest.approx(elements * 8.25 / 8, abs=4)
    assert first.ttft_s is not None
    link_s = first.bytes_sent / 2e6
    last_decode_s = 1536 * 30 * 2 * 3 * 64 * 2 / COST.decode_bytes_per_s
    assert link_s < first.ttft_s < link_s + last_decode_s + 1.0
    assert first.link is not None
    carried = sum(first.link.carried_bytes_per_s) * first.link.step_s
    assert carried == pytest.approx(first.bytes_sent, rel=0.001)
    assert all(
        rate <= capacity * 1.001
        for rate, capacity in zip(
            first.link.carried_bytes_per_s, first.link.capacity_bytes_per_s, strict=True
        )
    )


def test_text_takes_the_prefill_of_all_tokens(tmp_path: Path) -> None:
    (first, _) = of(simulate(scenario(tmp_path)).requests, "text")
    tokens = first.num_tokens
    expected_s = COST.prefill_a_s * tokens + COST.prefill_b_s * tokens * tokens / 2
    assert first.ttft_s is not None
    assert first.bytes_sent == 0
    assert SLOWNESS[0] * expected_s < first.ttft_s < SLOWNESS[1] * expected_s + 1.5
    assert first.evaluation is not None
    assert first.evaluation.kl == 0.0


def test_faster_link_is_never_slower(tmp_path: Path) -> None:
    slow = scenario(tmp_path)
    fast = dataclasses.replace(slow, uplink=dataclasses.replace(slow.uplink, scale=2.0))
    for before, after in zip(simulate(slow).requests, simulate(fast).requests, strict=True):
        assert before.ttft_s is not None
        assert after.ttft_s is not None
        assert after.ttft_s <= before.ttft_s + 0.1


def test_reuse_sends_nothing_the_second_time_and_starts_anew_per_policy(tmp_path: Path) -> None:
    report = simulate(scenario(tmp_path, "reuse = true"))
    for policy in ("int8", "cachegen"):
        first, second = of(report.requests, policy)
        assert first.bytes_sent > 0
        assert second.bytes_sent == 0
        assert {chunk.choice for chunk in second.chunks} == {"have"}
        assert first.ttft_s is not None
        assert second.ttft_s is not None
        assert second.ttft_s < first.ttft_s


def test_lost_worker_costs_the_time_until_its_silence_is_noticed(tmp_path: Path) -> None:
    calm = simulate(scenario(tmp_path, policies='["int8"]')).requests[0]
    extra = "faults = {kill_worker_s = 2.0, spare_workers = 1}"
    hit = simulate(scenario(tmp_path, extra, policies='["int8"]')).requests[0]
    assert calm.ttft_s is not None
    assert hit.ttft_s is not None
    assert hit.worker_changes == 1
    assert hit.ttft_s == pytest.approx(calm.ttft_s + 2.0 + SILENCE_S, abs=0.2)
    # 16 Mbit/s for 2 s went for nothing.
    assert hit.bytes_sent - calm.bytes_sent == pytest.approx(4e6, rel=0.1)


def test_fleet_shares_the_worker_in_order_of_arrival(tmp_path: Path) -> None:
    extra = 'kind = "fleet"\nfleet = {agents = 2, num_requests = 6, mean_gap_s = 1.0}'
    report = simulate(scenario(tmp_path, extra, policies='["text"]'))
    ends = [r.started_s + (r.ttft_s or 0.0) for r in report.requests]
    assert ends == sorted(ends)
    assert report.requests[-1].ttft_s is not None
    assert report.requests[0].ttft_s is not None
    assert report.requests[-1].ttft_s > 2 * report.requests[0].ttft_s


def test_link_that_ends_is_a_request_without_a_token(tmp_path: Path) -> None:
    base = scenario(tmp_path, policies='["int8"]')
    (tmp_path / "flat.txt").write_text("0 16\n0.5 0\n100000 0\n", encoding="utf-8")
    request = simulate(base).requests[0]
    assert request.ttft_s is None
    assert "never carried" in request.error


def test_level_that_nobody_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioConfigError, match="klt:9"):
        simulate(scenario(tmp_path, policies='["fixed:klt:9"]'))
    other = scenario(tmp_path)
    unknown = dataclasses.replace(
        other, cost=CostSpec(), model=dataclasses.replace(other.model, name="mine")
    )
    with pytest.raises(ScenarioConfigError, match=r"cost\.levels"):
        simulate(unknown)


def test_tied_level_takes_as_long_as_text(tmp_path: Path) -> None:
    made = scenario(tmp_path, policies='["text", "fixed:cachegen:2"]')
    tied = dataclasses.replace(
        made, uplink=dataclasses.replace(made.uplink, tie_level="cachegen:2")
    )
    report = simulate(tied)
    text, level = (of(report.requests, policy)[0] for policy in made.policies)
    assert text.ttft_s is not None
    assert level.ttft_s == pytest.approx(text.ttft_s, rel=0.1)
    assert report.trace_mean_bytes_per_s != 2e6
    gone = dataclasses.replace(made, uplink=dataclasses.replace(made.uplink, tie_level="klt:9"))
    with pytest.raises(ScenarioConfigError, match="no level klt:9"):
        simulate(gone)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("mahimahi/TMobile-LTE-short.up", ""),
        ("mahimahi/ATT-LTE-driving-2016.up", ""),
        ("pensieve-cooked/norway_train_14", ""),
        ("puffer/puffer_220218_a.trace", ""),
        ("starlink/autobahn_throughput_rows560-1579.csv", "upload"),
    ],
)
def test_recorded_traces_carry_a_scenario(
    tmp_path: Path, data_dir: Path, name: str, column: str
) -> None:
    base = scenario(tmp_path)
    path = str((data_dir / "traces" / name).absolute())
    uplink = dataclasses.replace(base.uplink, trace=path, column=column)
    report = simulate(dataclasses.replace(base, uplink=uplink))
    assert report.trace == Path(name).name
    for request in report.requests:
        assert request.ttft_s is not None
        assert request.link is not None
        for rate, capacity in zip(
            request.link.carried_bytes_per_s, request.link.capacity_bytes_per_s, strict=True
        ):
            # Segments are spread evenly over their time on the link, a packet trace is not even.
            assert rate <= capacity + 66_000 / request.link.step_s
