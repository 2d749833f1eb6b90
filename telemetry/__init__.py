"""Names of every metric and log event, the logging set-up and the metric registry.

The only room that knows structlog and prometheus-client. It knows no program and no core.
"""

from __future__ import annotations

from telemetry.logs import announce, configure_logging, get_logger
from telemetry.metrics import MetricSet, TelemetryError, UnknownLabelValue
from telemetry.names import Event, Label, MetricKind, MetricSpec, level_label

__all__ = [
    "Event",
    "Label",
    "MetricKind",
    "MetricSet",
    "MetricSpec",
    "TelemetryError",
    "UnknownLabelValue",
    "announce",
    "configure_logging",
    "get_logger",
    "level_label",
]
