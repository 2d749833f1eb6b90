"""Scenarios: traces, links, workloads, replays and reports.

This room runs the two programs as processes over a link that follows a recorded or generated trace,
and says what came of it. `run.py` is its front door, `cli.py` the command `kvtide`.
"""

from __future__ import annotations

from scenarios.errors import (
    FileFormatError,
    ReplayError,
    ReportError,
    ScenarioConfigError,
    ScenarioError,
    TraceError,
)
from scenarios.importers import load_trace
from scenarios.link import Link, LinkConfig
from scenarios.trace import Outage, Trace

__all__ = [
    "FileFormatError",
    "Link",
    "LinkConfig",
    "Outage",
    "ReplayError",
    "ReportError",
    "ScenarioConfigError",
    "ScenarioError",
    "Trace",
    "TraceError",
    "load_trace",
]
