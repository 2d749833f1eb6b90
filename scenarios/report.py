"""The report page: one HTML file that needs nothing else.

Invariants: no request leaves the page (no script, font, image or style from elsewhere); every text that
came from outside is escaped; the same report gives the same bytes. Must not know: how figures are
computed or plots drawn.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path

from scenarios import plots, tables
from scenarios.charts import number
from scenarios.metrics import PolicyFigures, figures, lower_bound_s, percentile
from scenarios.results import RequestRecord, RunReport
from scenarios.trace import mbps

_STYLE = Path(__file__).parent / "report.css"
_MEGA = 1e6


def html_page(report: RunReport) -> str:
    """Return the whole page."""
    items = figures(report)
    body = "\n".join(
        (
            f"<h1>{_esc(report.scenario)}</h1>",
            f'<p class="lead">{_esc(report.summary)}</p>',
            _facts(report),
            _summary(items, report),
            _ttft(items, report),
            _quality(items),
            _timelines(report),
            _answers(report),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>kvtide: {_esc(report.scenario)}</title>\n"
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _esc(text: str) -> str:
    return html.escape(text)


def _both(draw: Callable[[float], str]) -> str:
    """Return a picture for wide pages and print, and one for phones; the style sheet shows one."""
    wide, narrow = draw(plots.WIDE_PX), draw(plots.NARROW_PX)
    if not wide:
        return ""
    return wide.replace('class=""', 'class="wide"', 1) + narrow.replace(
        'class=""', 'class="narrow"', 1
    )


def _facts(report: RunReport) -> str:
    tokens = "; ".join(
        f"{i.context}: {i.num_tokens:,} tokens in {i.num_chunks} chunks" for i in report.ingests
    )
    how = {
        "real": "the programs as processes, over a link that replays the trace",
        "simulated": "in virtual time: planner, link model and cost model, no programs",
    }
    pairs = [
        ("run", how.get(report.mode, report.mode)),
        ("model", f"{report.model}, {report.dtype}"),
        ("contexts", tokens),
        (
            "uplink",
            f"{report.trace}, mean {number(mbps(report.trace_mean_bytes_per_s))} Mbit/s, one-way delay "
            f"{number(report.one_way_delay_s * 1000)} ms, queue {number(report.queue_bytes / 1024)} KiB",
        ),
        ("deadline", f"{number(report.slo_s)} s to the first token"),
        ("machine", report.machine),
        (
            "code",
            f"kvtide {report.version}" + (f", commit {report.commit}" if report.commit else ""),
        ),
        ("when", f"{report.started_at}, took {number(report.duration_s)} s"),
    ]
    if not report.started_at:
        pairs.pop()
    inside = "".join(f"<dt>{name}</dt><dd>{_esc(value)}</dd>" for name, value in pairs if value)
    return f'<dl class="facts">{inside}</dl>'


def _summary(items: Sequence[PolicyFigures], report: RunReport) -> str:
    head = "".join(
        f'<th{_left(column.is_left)} scope="col">{_esc(column.title)}</th>'
        for column in tables.COLUMNS
    )
    best = min((i.ttft_p50_s for i in items if i.ttft_p50_s is not None), default=None)
    rows = []
    for item in items:
        row = []
        for column, cell in zip(tables.COLUMNS, tables.cells(item), strict=True):
            classes = ["left"] if column.is_left else []
            if column.title == "chunks by level":
                classes.append("wrap")
            if column.title == "SLO missed" and item.slo_violations:
                classes.append("bad")
            if column.title == "TTFT p50, s" and item.ttft_p50_s == best is not None:
                classes.append("best")
            css = f' class="{" ".join(classes)}"' if classes else ""
            row.append(f'<td{css} data-name="{_esc(column.name)}">{_esc(cell)}</td>')
        rows.append(f"<tr>{''.join(row)}</tr>")
    failures = "".join(
        f'<p class="note">No answer under {_esc(r.policy)}: {_esc(r.error)}</p>'
        for r in report.requests
        if r.error
    )
    data = base64.b64encode(tables.csv_text(report).encode()).decode()
    return (
        '<section><h2>Policies side by side</h2><table class="wide-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{failures}"
        '<p class="note">TTFT: from the request\'s arrival at the agent to the first token at the agent. '
        "Exact answers, KL and top-1 compare with the same model over the KV cache of a full prefill.</p>"
        f'<p class="note no-print"><a download="{_esc(report.scenario)}.csv" '
        f'href="data:text/csv;base64,{data}">Every request as CSV</a></p></section>'
    )


def _left(is_left: bool) -> str:
    return ' class="left"' if is_left else ""


def _ttft(items: Sequence[PolicyFigures], report: RunReport) -> str:
    picture = _both(
        lambda width: plots.ttft_plot(items, report.requests, slo_s=report.slo_s, width=width)
    )
    note = "The bar ends at the median; orange missed the deadline at least once."
    if any(item.num_requests > 1 for item in items):
        note += " The line reaches the 95th percentile; each mark is a request."
    return f'<section><h2>Time to first token</h2>{picture}<p class="note">{note}</p></section>'


def _quality(items: Sequence[PolicyFigures]) -> str:
    picture = _both(lambda width: plots.quality_plot(items, width=width))
    if not picture:
        return ""
    names = "".join(
        f"<li>{index} {_esc(item.policy)}</li>"
        for index, item in enumerate(items, start=1)
        if item.kl_mean is not None
    )
    return (
        f'<section><h2>Quality against bytes</h2>{picture}<ul class="legend">{names}</ul></section>'
    )


def chosen_requests(report: RunReport) -> list[RequestRecord]:
    """Return one request per policy to look at: the one with the median TTFT, else the first."""
    chosen = []
    for policy in report.policies:
        mine = [r for r in report.requests if r.policy == policy]
        median = percentile([r.ttft_s for r in mine if r.ttft_s is not None], 0.5)
        found = [r for r in mine if r.ttft_s == median] if median is not None else mine
        chosen += found[:1]
    return chosen


def _timelines(report: RunReport) -> str:
    parts = []
    for request in chosen_requests(report):
        if not request.chunks and request.ttft_s is None:
            continue

        def draw(width: float, shown: RequestRecord = request) -> str:
            return plots.timeline_plot(shown, width=width)

        parts.append(
            f"<section><h3>{_esc(request.policy)}</h3><p class='note'>{_esc(_sentence(request))}</p>"
            f"{_both(draw)}{_legend(request)}</section>"
        )
    if not parts:
        return ""
    return "<h2>One request of each policy over time</h2>" + "".join(parts)


def _sentence(request: RequestRecord) -> str:
    sent = f"{number(request.bytes_sent / _MEGA)} MB sent"
    if request.ttft_s is None:
        return f"{sent}, no first token"
    parts = [sent, f"first token after {number(request.ttft_s)} s"]
    bound = lower_bound_s(request)
    if bound is not None and request.bytes_sent:
        parts.append(f"the bytes alone need {number(bound)} s of this link")
    if request.worker_changes:
        parts.append(f"{request.worker_changes} change of worker")
    return ", ".join(parts)


def _legend(request: RequestRecord) -> str:
    choices = dict.fromkeys(chunk.choice for chunk in request.chunks)
    entries = [
        f'<li><i class="{plots.choice_class(choice)}"></i>{_esc(_choice_name(choice))}</li>'
        for choice in choices
    ]
    if request.prefill_start_s is not None:
        entries.append('<li><i class="c-question"></i>prefill of the question</li>')
    entries.append('<li><i class="c-answer"></i>answer</li>')
    if request.link is not None:
        entries += [
            '<li><i style="background:var(--capacity)"></i>what the link could carry</li>',
            '<li><i class="l" style="border-color:var(--carried)"></i>what it carried</li>',
        ]
        if request.delivery:
            entries.append(
                '<li><i class="d" style="background:var(--sample)"></i>rate measured from '
                "acknowledgements</li>"
            )
    if any(d.get("rate_bytes_per_s") is not None for d in request.decisions):
        entries.append(
            '<li><i class="l" style="border-color:var(--ink)"></i>the planner\'s estimate</li>'
        )
    if any(d.get("expected_ttft_s") is not None for d in request.decisions):
        entries.append(
            '<li><i class="d" style="background:var(--bar)"></i>first token expected at a decision, with '
            "its highest quantile; the green line is what it became</li>"
        )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _choice_name(choice: str) -> str:
    return {
        "text": "text: tokens sent, prefilled by the worker",
        "have": "the worker had it",
    }.get(choice, choice)


def _answers(report: RunReport) -> str:
    if report.mode != "real":
        return ""
    parts = []
    for request in chosen_requests(report):
        exact = request.evaluation.exact_text if request.evaluation else ""
        same = bool(request.evaluation and request.evaluation.greedy_match)
        note = " (the exact one)" if same else ""
        answer = request.answer or request.error or "no answer"
        parts.append(
            f"<p><strong>{_esc(request.policy)}</strong>{note}</p>"
            f"<blockquote>{_esc(answer)}</blockquote>"
            + (
                f'<p class="note">Exact: {_esc(exact)}</p>'
                if exact and not same and exact != request.answer
                else ""
            )
        )
    questions = dict.fromkeys(r.question for r in chosen_requests(report))
    asked = "".join(f'<p class="lead">{_esc(question)}</p>' for question in questions)
    if not parts:
        return ""
    return f"<section><h2>Answers</h2>{asked}{''.join(parts)}</section>"
