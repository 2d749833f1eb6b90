"""What a run found out, as records that go into a JSON file and come back.

Owns the schema of the report file. Invariant: every figure of a report is computed from these records
(`metrics.py`), so whoever has the file can compute it again. Must not know: programs, HTML.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from scenarios import strict
from scenarios.errors import ReportError

SCHEMA = "kvtide.scenario-report/1"
"""Name and version; a change that a reader must know of counts up."""
TEXT_CHOICE = "text"
HAVE_CHOICE = "have"
"""The worker had the chunk; nothing was sent."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One chunk of one request; times in seconds since the request's arrival at the agent."""

    index: int
    token_start: int
    token_stop: int
    choice: str
    """Level, `text`, or `have`."""
    num_bytes: int
    epoch: int = 0
    send_start_s: float | None = None
    acked_s: float | None = None
    decode_start_s: float | None = None
    decode_end_s: float | None = None
    ready_s: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The answer's KV cache against the exact one."""

    kl: float
    """Mean KL(exact || lossy) along the exact answer. Unit: nats."""
    top1: float | None
    """Share of positions with the same likeliest token; none in a simulation."""
    greedy_match: bool | None
    """Whether the answer is the exact one, token by token; none in a simulation."""
    exact_text: str = ""


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """What the uplink could carry and what it carried, in steps from the request's start."""

    step_s: float
    capacity_bytes_per_s: tuple[float, ...]
    carried_bytes_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One question under one policy."""

    policy: str
    """As the scenario names it."""
    context: str
    question: str
    repetition: int
    deadline_s: float
    num_tokens: int = 0
    """Tokens of the context."""
    ttft_s: float | None = None
    """From the request's arrival at the agent to the first token at the agent; none: it never came."""
    bytes_sent: int = 0
    """Chunk bytes, abandoned ones included."""
    answer: str = ""
    chunks: tuple[ChunkRecord, ...] = ()
    prefill_start_s: float | None = None
    """Prefill of the question."""
    prefill_end_s: float | None = None
    last_token_s: float | None = None
    delivery: tuple[tuple[float, float], ...] = ()
    """Delivery-rate samples: seconds, bytes per second."""
    decisions: tuple[dict[str, Any], ...] = ()
    worker_changes: int = 0
    evaluation: EvaluationRecord | None = None
    link: LinkRecord | None = None
    error: str = ""
    """Why there is no answer, in one sentence."""
    started_s: float = 0.0
    """When the request was made, from the start of its policy. Unit: seconds."""
    agent: int = 0
    """Which agent asked, in a fleet."""

    @property
    def is_slo_met(self) -> bool:
        """Whether the first token came within the deadline."""
        return self.ttft_s is not None and self.ttft_s <= self.deadline_s


@dataclass(frozen=True, slots=True)
class IngestRecord:
    """One context as it was stored."""

    context: str
    num_tokens: int
    num_chunks: int
    bytes_by_level: dict[str, int]
    duration_s: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of one scenario."""

    scenario: str
    summary: str
    mode: str
    """`real`: the programs over a link; `simulated`: in virtual time."""
    policies: tuple[str, ...]
    slo_s: float
    seed: int
    model: str
    dtype: str
    trace: str
    trace_mean_bytes_per_s: float
    one_way_delay_s: float
    queue_bytes: int
    version: str
    commit: str
    """Commit of the code, with `+` when files differ from it; empty where there is no checkout."""
    machine: str
    started_at: str
    """UTC, ISO 8601; empty in a simulation, whose report depends on nothing but its inputs."""
    duration_s: float
    ingests: tuple[IngestRecord, ...]
    requests: tuple[RequestRecord, ...]
    schema: str = SCHEMA


def to_json(report: RunReport) -> str:
    """Write a report as JSON, keys in the order of the fields."""
    return json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False) + "\n"


def load_report(path: Path) -> RunReport:
    """Read a report file.

    Raises:
        ReportError: it cannot be read, is of another schema, or names a wrong field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ReportError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, Mapping) else None
        raise ReportError(f"{path} has the schema {found!r}, this version reads {SCHEMA!r}")

    def refuse(key: str, problem: str) -> NoReturn:
        raise ReportError(f"{path}: {key}: {problem}")

    # "summary" and everything else are fields; figures in a file are ignored and computed again.
    fields = {key: value for key, value in document.items() if key != "figures"}
    return strict.build(RunReport, fields, refuse)
