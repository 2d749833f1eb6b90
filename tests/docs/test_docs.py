"""The documents name every setting, error, metric, frame type and message: new ones must be added."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import cloud_worker.config
import edge_agent.config
import telemetry.names
from wire import frames, messages, states

DOCS = Path(__file__).resolve().parents[2] / "docs"
ERROR_ROOMS = (
    "codec",
    "planner",
    "wire",
    "engine",
    "telemetry",
    "edge_agent",
    "cloud_worker",
    "scenarios",
)


def read(name: str) -> str:
    return (DOCS / name).read_text()


def error_classes() -> list[str]:
    names = set()
    for room in ERROR_ROOMS:
        package = importlib.import_module(room)
        for module_info in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not module_info.name.rpartition(".")[2].endswith("errors"):
                continue
            module = importlib.import_module(module_info.name)
            for name, value in inspect.getmembers(module, inspect.isclass):
                if issubclass(value, Exception) and value.__module__ == module_info.name:
                    names.add(name)
    return sorted(names)


@pytest.mark.parametrize(
    ("config", "prefix"),
    [(edge_agent.config.EdgeConfig, "edge"), (cloud_worker.config.WorkerConfig, "worker")],
)
def test_every_setting_is_documented(config: type, prefix: str) -> None:
    page = f"config-{prefix}.md"
    assert page in read("config.md")
    missing = [f.name for f in dataclasses.fields(config) if f"`{f.name}`" not in read(page)]
    assert not missing


def test_every_error_is_documented() -> None:
    text = read("errors.md")
    names = error_classes()
    assert len(names) > 30
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_metric_and_event_is_documented() -> None:
    text = read("telemetry.md")
    source = inspect.getsource(telemetry.names)
    metrics = set(re.findall(r'"(kvtide_[a-z0-9_]+)"', source))
    events = {event.value for event in telemetry.names.Event}
    assert metrics
    assert not [name for name in metrics | events if f"`{name}`" not in text]


def test_every_frame_type_and_message_is_documented() -> None:
    text = read("wire-protocol.md")
    names = [kind.name for kind in frames.FrameType] + list(messages._KINDS)
    assert not [name for name in names if f"`{name}`" not in text]


def test_state_diagrams_are_those_of_the_tables() -> None:
    text = read("wire-protocol.md")
    assert states.draw(states.SENDER_TRANSITIONS) in text
    assert states.draw(states.RECEIVER_TRANSITIONS) in text


def test_links_between_documents_lead_somewhere() -> None:
    root = DOCS.parent
    broken = [
        f"{page.name}: {target}"
        for page in [*DOCS.rglob("*.md"), root / "README.md"]
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
