"""The figures of a run as text: a table for the terminal, CSV, and the difference of two runs.

Must not know: HTML, how the figures are computed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from scenarios.charts import number
from scenarios.errors import ReportError
from scenarios.metrics import PolicyFigures, figures
from scenarios.results import RunReport
from scenarios.trace import mbps

_MEGA = 1e6
_MISSING = "-"
_MATCH = {True: "1", False: "0", None: ""}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the summary table."""

    title: str
    name: str
    """Title where there is room for a line of its own."""
    is_left: bool = False


COLUMNS: tuple[Column, ...] = (
    Column("policy", "policy", is_left=True),
    Column("TTFT p50, s", "time to first token, median, s"),
    Column("TTFT p95, s", "time to first token, 95th percentile, s"),
    Column("SLO missed", "deadlines missed"),
    Column("sent, MB", "sent per request, MB"),
    Column("chunks by level", "chunks by level", is_left=True),
    Column("exact answers", "answers equal to the exact-KV answer"),
    Column("mean KL, nats", "mean KL of next-token distributions, nats"),
    Column("top-1", "same likeliest token"),
)


def cells(item: PolicyFigures) -> list[str]:
    """Return a policy's cells in the order of `COLUMNS`."""
    return [
        item.policy,
        _seconds(item.ttft_p50_s),
        _seconds(item.ttft_p95_s),
        f"{item.slo_violations} of {item.num_requests}",
        _MISSING if item.bytes_mean is None else number(item.bytes_mean / _MEGA),
        ", ".join(f"{count} x {choice}" for choice, count in item.choices) or _MISSING,
        f"{item.exact_answers} of {item.num_evaluated}" if item.num_evaluated else _MISSING,
        _MISSING if item.kl_mean is None else f"{item.kl_mean:.4f}",
        _MISSING if item.top1_mean is None else f"{item.top1_mean:.3f}",
    ]


def _seconds(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"


def terminal_table(report: RunReport) -> str:
    """Return the summary as a table in characters, with what it was measured on."""
    rows = [cells(item) for item in figures(report)]
    grid = _grid([[column.title for column in COLUMNS], *rows])
    tokens = ", ".join(f"{i.context} {i.num_tokens} tokens" for i in report.ingests)
    lines = [
        f"{report.scenario} ({report.mode}): {report.summary}",
        f"model {report.model} {report.dtype}; context {tokens or 'none'}; uplink {report.trace}, "
        f"mean {number(mbps(report.trace_mean_bytes_per_s))} Mbit/s, "
        f"one-way delay {number(report.one_way_delay_s * 1000)} ms; "
        f"deadline {number(report.slo_s)} s",
        "",
        *grid,
    ]
    lines += [
        f"no answer under {request.policy}: {request.error}"
        for request in report.requests
        if request.error
    ]
    return "\n".join(lines)


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lefts = [column.is_left for column in COLUMNS] + [True] * (len(widths) - len(COLUMNS))
    lines = [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, lefts, strict=False)
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def csv_text(report: RunReport) -> str:
    """Return one row per request, with a header; times in seconds, sizes in bytes."""
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(
        (
            "policy",
            "agent",
            "context",
            "repetition",
            "started_s",
            "ttft_s",
            "deadline_s",
            "slo_met",
            "bytes_sent",
            "choices",
            "kl_nats",
            "top1",
            "greedy_match",
            "error",
        )
    )
    for request in report.requests:
        evaluation = request.evaluation
        writer.writerow(
            (
                request.policy,
                request.agent,
                request.context,
                request.repetition,
                request.started_s,
                "" if request.ttft_s is None else request.ttft_s,
                request.deadline_s,
                int(request.is_slo_met),
                request.bytes_sent,
                " ".join(chunk.choice for chunk in request.chunks),
                "" if evaluation is None else evaluation.kl,
                "" if evaluation is None or evaluation.top1 is None else evaluation.top1,
                "" if evaluation is None else _MATCH[evaluation.greedy_match],
                request.error,
            )
        )
    return sheet.getvalue()


def diff_table(before: RunReport, after: RunReport) -> str:
    """Return what changed between two runs, policy by policy.

    Raises:
        ReportError: the two have no policy in common.
    """
    old = {item.policy: item for item in figures(before)}
    new = {item.policy: item for item in figures(after)}
    common = [policy for policy in old if policy in new]
    if not common:
        raise ReportError("the two reports have no policy in common")
    rows = [["policy", "TTFT p50, s", "ratio", "sent, MB", "ratio", "SLO missed", "mean KL, nats"]]
    for policy in common:
        a, b = old[policy], new[policy]
        rows.append(
            [
                policy,
                f"{_seconds(a.ttft_p50_s)} -> {_seconds(b.ttft_p50_s)}",
                _ratio(a.ttft_p50_s, b.ttft_p50_s),
                f"{_mega(a.bytes_mean)} -> {_mega(b.bytes_mean)}",
                _ratio(a.bytes_mean, b.bytes_mean),
                f"{a.slo_violations} of {a.num_requests} -> {b.slo_violations} of {b.num_requests}",
                f"{_kl(a.kl_mean)} -> {_kl(b.kl_mean)}",
            ]
        )
    lines = _differences(before, after)
    lines += _grid(rows)
    for title, names in (
        ("only in the first", [p for p in old if p not in new]),
        ("only in the second", [p for p in new if p not in old]),
    ):
        if names:
            lines.append(f"{title}: {', '.join(names)}")
    return "\n".join(lines)


def _differences(before: RunReport, after: RunReport) -> list[str]:
    """Say what the two runs do not share, since then figures do not compare one to one."""
    keys = ("scenario", "mode", "model", "dtype", "trace", "slo_s", "seed", "machine", "version")
    found = [
        f"differs: {key}: {getattr(before, key)} -> {getattr(after, key)}"
        for key in (*keys, "commit")
        if getattr(before, key) != getattr(after, key)
    ]
    return [*found, ""] if found else []


def _mega(value: float | None) -> str:
    return _MISSING if value is None else number(value / _MEGA)


def _kl(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.4f}"


def _ratio(before: float | None, after: float | None) -> str:
    return f"{after / before:.3f}" if before and after is not None else _MISSING
