"""docs/scenarios.md names everything that a user can write or meet."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from planner import policy_names
from scenarios import errors
from scenarios.config import (
    ContextSpec,
    CostSpec,
    DownlinkSpec,
    FaultSpec,
    FleetSpec,
    LevelCost,
    ModelSpec,
    QuestionSpec,
    Scenario,
    TextPart,
    UplinkSpec,
    catalog_names,
    parse_scenario,
)
from scenarios.importers import UNITS_BYTES_PER_S, TraceFormat
from scenarios.results import SCHEMA
from scenarios.run import build_parser
from scenarios.workload import TextFormat

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scenarios.md").read_text(encoding="utf-8")
SECTIONS: dict[str, type] = {
    "model": ModelSpec,
    "uplink": UplinkSpec,
    "downlink": DownlinkSpec,
    "fleet": FleetSpec,
    "faults": FaultSpec,
    "cost": CostSpec,
}


def keys() -> list[str]:
    found = [f.name for f in dataclasses.fields(Scenario) if f.name not in (*SECTIONS, "source")]
    for name, kind in SECTIONS.items():
        found += [f"{name}.{f.name}" for f in dataclasses.fields(kind)]
    for kind in (ContextSpec, TextPart, QuestionSpec, LevelCost):
        found += [f.name for f in dataclasses.fields(kind)]
    return found


@pytest.mark.parametrize("key", keys())
def test_every_key_of_a_scenario_is_documented(key: str) -> None:
    assert f"`{key}`" in PAGE


def test_every_option_format_error_and_scenario_is_documented() -> None:
    for action in build_parser()._actions:
        for option in action.option_strings:
            if option.startswith("--") and option != "--help":
                assert re.search(rf"`{option}[ `]", PAGE), option
    words = [*TraceFormat, *TextFormat, *UNITS_BYTES_PER_S, *policy_names(), *catalog_names()]
    for word in words:
        assert f"`{word}`" in PAGE, word
    for name, item in inspect.getmembers(errors, inspect.isclass):
        if issubclass(item, errors.ScenarioError):
            assert f"`{name}`" in PAGE
    assert SCHEMA in PAGE


def test_example_scenario_is_read() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    scenario = parse_scenario(example, source=Path("clinic.toml"))
    assert scenario.uplink.column == "up"
