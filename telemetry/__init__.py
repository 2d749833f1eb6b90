"""The operator's room: settings, logs and metrics, and the names of everything that shows there.

The only room that knows structlog and prometheus-client. It knows no program and no core.
"""

from __future__ import annotations

from telemetry.entry import run_program
from telemetry.logs import announce, configure_logging, get_logger
from telemetry.metrics import MetricSet, TelemetryError, UnknownLabelValue
from telemetry.names import Event, Label, MetricKind, MetricSpec, level_label
from telemetry.settings import (
    SettingsReader,
    check_broker_url,
    check_settings,
    check_subject_token,
    field_docs,
    read_secret,
)

__all__ = [
    "Event",
    "Label",
    "MetricKind",
    "MetricSet",
    "MetricSpec",
    "SettingsReader",
    "TelemetryError",
    "UnknownLabelValue",
    "announce",
    "check_broker_url",
    "check_settings",
    "check_subject_token",
    "configure_logging",
    "field_docs",
    "get_logger",
    "level_label",
    "read_secret",
    "run_program",
]
