from __future__ import annotations

from pathlib import Path

from telemetry.names import EDGE_METRICS, WORKER_METRICS, Event, Label

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "telemetry.md").read_text()


def test_every_metric_event_and_label_is_documented() -> None:
    named = [spec.name for spec in WORKER_METRICS + EDGE_METRICS]
    named += [event.value for event in Event] + [label.label for label in Label]
    assert [name for name in named if f"`{name}`" not in TEXT] == []
