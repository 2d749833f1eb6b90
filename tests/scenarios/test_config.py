"""A scenario file is read strictly; every fault names its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from scenarios.config import (
    CATALOG_DIR,
    Kind,
    QuestionSpec,
    catalog_names,
    load_scenario,
    parse_scenario,
    request_policy,
)
from scenarios.errors import FileFormatError, ScenarioConfigError
from scenarios.levels import wanted_levels
from scenarios.link import LinkConfig
from scenarios.trace import BYTES_PER_S_PER_MBPS
from scenarios.workload import build_context

MINIMAL = """
summary = "a test"
policies = ["text"]
questions = ["Why?"]
[[contexts]]
name = "c"
parts = ["handbook"]
"""


def parse(text: str, *, source: Path = Path("given.toml")) -> object:
    return parse_scenario(text, source=source)


def test_minimal_scenario_has_the_documented_defaults() -> None:
    scenario = parse_scenario(MINIMAL, source=Path("given.toml"))
    assert scenario.name == "given"
    assert scenario.kind is Kind.SEQUENCE
    assert scenario.questions == (QuestionSpec("Why?"),)
    assert scenario.contexts[0].parts[0].text == "handbook"
    assert scenario.uplink.trace == "lte-uplink.txt"
    up = scenario.uplink_config(scenario.load_trace())
    assert (up.delay_s, up.queue_bytes, up.offset_s) == (0.02, 128 * 1024, 0.0)
    down = scenario.downlink_config(up)
    assert down.delay_s == up.delay_s
    assert down.trace.mean_bytes_per_s == pytest.approx(50 * BYTES_PER_S_PER_MBPS)


@pytest.mark.parametrize("name", catalog_names())
def test_catalog_scenario_is_valid_and_its_files_exist(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert 10 < len(scenario.summary) <= 100
    trace = scenario.load_trace()
    assert trace.mean_bytes_per_s > 0
    for context in scenario.contexts:
        assert build_context(scenario, context).strip()
    assert wanted_levels(scenario)


def test_catalog_has_the_promised_scenarios() -> None:
    promised = {
        "demo", "lte-drive", "starlink", "outage", "step", "contest", "fleet", "multi-turn",
        "shared-prefix", "worker-loss", "paper",
    }  # fmt: skip
    assert promised <= {path.stem for path in CATALOG_DIR.glob("*.toml")}


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        ("sede = 3", "sede", "unknown key"),
        ("source = 'x'", "source", "unknown key"),
        ("seed = 'x'", "seed", "must be a whole number"),
        ("seed = true", "seed", "must be a whole number"),
        ("seed = 1.5", "seed", "must be a whole number"),
        ("evaluate = 1", "evaluate", "must be true or false"),
        ("slo_s = 0", "slo_s", "must be from"),
        ("slo_s = nan", "slo_s", "must be from"),
        ("max_tokens = 0", "max_tokens", "must be from"),
        ("kind = 'party'", "kind", "must be one of sequence, fleet"),
        ("levels = 'fp16'", "levels", "must be a list"),
        ("levels = [1]", "levels[0]", "must be text"),
        ("uplink = 3", "uplink", "must be a table"),
        ("uplink = {tracee = 'x'}", "uplink.tracee", "unknown key; known are trace"),
        ("uplink = {scale = -1}", "uplink.scale", "must be from"),
        ("uplink = {format = 'pcap'}", "uplink.format", "must be one of mahimahi"),
        ("uplink = {unit = 'mph'}", "uplink.unit", "must be one of bps"),
        ("uplink = {queue_bytes = 1}", "uplink.queue_bytes", "must be from"),
        (
            "kind = 'fleet'\nuplink = {tie_level = 'int8'}",
            "uplink.tie_level",
            "first policy is text",
        ),
        ("faults = {kill_worker_s = 1}", "faults.spare_workers", "needs a spare"),
        ("cost = {levels = [{name = 'x'}]}", "cost.levels[0].bits_per_element", "is missing"),
    ],
)
def test_bad_value_names_its_key(change: str, key: str, problem: str) -> None:
    with pytest.raises(ScenarioConfigError, match=problem) as caught:
        parse(change + "\n" + MINIMAL)
    assert caught.value.key == key
    assert "given.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "key", "problem"),
    [
        ('policies = ["text"]', "policies = []", "policies", "at least one"),
        ('policies = ["text"]', 'policies = ["fast"]', "policies", "unknown policy 'fast'"),
        ('policies = ["text"]', 'policies = ["text", "text"]', "policies", "twice"),
        ('policies = ["text"]', "", "policies", "is missing"),
        ('summary = "a test"', "", "summary", "is missing"),
        ('questions = ["Why?"]', "questions = []", "questions", "at least one"),
        ('["Why?"]', '[{text = "Why?", context = "d"}]', "questions[0].context", "no context 'd'"),
        ('["Why?"]', '["  "]', "questions[0].text", "is empty"),
        ('name = "c"', 'name = "c d"', "contexts[0].name", "cannot be"),
        ('parts = ["handbook"]', "parts = []", "contexts[0].parts", "at least one"),
        ('parts = ["handbook"]', "parts = [3]", "contexts[0].parts[0]", "must be a table"),
        ("[[contexts]]", "[[context]]", "context", "unknown key"),
    ],
)
def test_bad_structure_names_its_key(old: str, new: str, key: str, problem: str) -> None:
    with pytest.raises(ScenarioConfigError, match=problem) as caught:
        parse(MINIMAL.replace(old, new))
    assert caught.value.key == key


def test_context_named_twice_is_refused() -> None:
    again = '[[contexts]]\nname = "c"\nparts = ["handbook"]\n'
    with pytest.raises(ScenarioConfigError, match="used twice"):
        parse(MINIMAL + again)


def test_file_that_is_no_toml_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioConfigError, match="is no TOML"):
        parse("= 3")
    with pytest.raises(ScenarioConfigError, match="neither a scenario of the catalog"):
        load_scenario(str(tmp_path / "none.toml"))
    with pytest.raises(ScenarioConfigError, match="demo"):
        load_scenario("no-such-scenario")


def test_trace_is_looked_for_beside_the_scenario_and_scaled(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("up\n8\n16\n", encoding="utf-8")
    extra = '[uplink]\ntrace = "mine.csv"\ncolumn = "up"\nscale = 0.5\ndelay_s = 0.1\n'
    scenario = parse_scenario(MINIMAL + extra, source=tmp_path / "s.toml")
    trace = scenario.load_trace()
    assert trace.bytes_per_s == (5e5, 1e6)
    assert scenario.uplink_config(trace) == LinkConfig(trace, delay_s=0.1, queue_bytes=131072)


def test_trace_that_is_nowhere_is_named() -> None:
    scenario = parse_scenario(MINIMAL + '[uplink]\ntrace = "gone.up"\n', source=Path("s.toml"))
    with pytest.raises(FileFormatError, match=r"gone\.up: there is no such file"):
        scenario.load_trace()


def test_plain_level_as_a_policy_means_that_level_for_all() -> None:
    assert request_policy("fp16") == "fixed:fp16"
    assert request_policy("cachegen") == "cachegen"


@pytest.mark.parametrize(
    ("policies", "levels"),
    [
        ('["text"]', ("int8",)),
        ('["fp16", "int8"]', ("fp16", "int8")),
        ('["fixed:cachegen:2"]', ("cachegen:2",)),
        ('["fixed:cachegen:2", "cachegen"]', ("cachegen:*",)),
    ],
)
def test_agent_encodes_the_levels_that_the_policies_need(
    policies: str, levels: tuple[str, ...]
) -> None:
    text = MINIMAL.replace('["text"]', policies)
    assert wanted_levels(parse_scenario(text, source=Path("s.toml"))) == levels
