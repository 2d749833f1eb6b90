"""The pictures of a report: TTFT per policy, one request over time, quality against bytes.

Each function takes a width in pixels and returns SVG; a page shows the wide or the narrow one. Invariant:
every axis has its unit. Must not know: HTML around the picture, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scenarios.charts import Scale, Sheet, number, text_px
from scenarios.metrics import PolicyFigures
from scenarios.results import HAVE_CHOICE, TEXT_CHOICE, ChunkRecord, LinkRecord, RequestRecord
from scenarios.trace import mbps

WIDE_PX = 760
NARROW_PX = 340
_MEGA = 1e6
_LANE_PX = 16.0
_GAP_PX = 10.0


def choice_class(choice: str) -> str:
    """Return the CSS class of a chunk's choice."""
    level_set, _, index = choice.partition(":")
    if choice in (TEXT_CHOICE, HAVE_CHOICE, "fp16", "int8"):
        return f"c-{choice}"
    if level_set in ("cachegen", "klt"):
        step = min(4, int(index)) if index.isdigit() else 0
        return f"c-{level_set} shade-{step}"
    return "c-other"


def ttft_plot(
    figures: Sequence[PolicyFigures],
    requests: Sequence[RequestRecord],
    *,
    slo_s: float,
    width: float,
) -> str:
    """Draw a bar to the median, a whisker to the 95th percentile, a mark per request, and the deadline."""
    gutter = max(text_px(f.policy) for f in figures) + 12
    row, top = 30.0, 26.0
    height = top + row * len(figures) + 40
    sheet = Sheet(width, height, label="time to first token per policy")
    ttfts = [r.ttft_s for r in requests if r.ttft_s is not None]
    value_px = text_px("000.0 s") + 8
    scale = Scale(0.0, max([slo_s, *ttfts]) * 1.02, gutter, width - value_px)
    bottom = top + row * len(figures)
    sheet.x_axis(scale, bottom, top, title="time to first token, seconds")
    for index, item in enumerate(figures):
        y = top + row * index + row / 2
        sheet.text(gutter - 8, y + 4, item.policy, anchor="end", css_class="name")
        if item.ttft_p50_s is None or item.ttft_p95_s is None:
            sheet.text(gutter + 6, y + 4, "no first token", css_class="late")
            continue
        is_late = item.slo_violations > 0
        bar_px = scale.px(item.ttft_p50_s) - gutter
        sheet.rect(gutter, y - 9, bar_px, 18, "bar late-bar" if is_late else "bar")
        if item.num_requests > 1:
            sheet.line(gutter + bar_px, y, scale.px(item.ttft_p95_s), y, "whisker")
            for request in requests:
                if request.policy == item.policy and request.ttft_s is not None:
                    x = scale.px(request.ttft_s)
                    sheet.line(x, y - 12, x, y + 12, "mark")
        right = scale.px(max(item.ttft_max_s or 0.0, item.ttft_p95_s))
        sheet.text(right + 7, y + 4, f"{number(item.ttft_p50_s)} s", css_class="value")
    x = scale.px(slo_s)
    sheet.line(x, top - 6, x, bottom, "slo")
    sheet.text(x, top - 11, f"deadline {number(slo_s)} s", anchor="middle", css_class="slo-name")
    return sheet.svg()


@dataclass(frozen=True, slots=True)
class _Span:
    """One bar of the Gantt picture."""

    start_s: float
    stop_s: float
    css_class: str
    label: str
    tip: str


def timeline_plot(request: RequestRecord, *, width: float) -> str:
    """Draw one request: what was on the link, decoded and prefilled when, over the link's rate."""
    rows = _rows(request)
    gutter = 74.0
    right = width - 12
    lanes = {name: _lanes(spans) for name, spans in rows}
    height_of = {name: max(1, len(lanes[name])) * _LANE_PX for name, _ in rows}
    top = 24.0
    gantt_px = sum(height_of.values()) + _GAP_PX * len(rows)
    rate_top = top + gantt_px + 30
    rate_bottom = rate_top + 110 if request.link is not None else top + gantt_px
    forecasts = _forecasts(request)
    forecast_top = rate_bottom + 34
    bottom = forecast_top + 80 if forecasts else rate_bottom
    sheet = Sheet(width, bottom + 40, label=f"timeline of one request under {request.policy}")
    stop_s = _stop_s(request)
    scale = Scale(0.0, stop_s, gutter, right)
    sheet.x_axis(scale, bottom, top, title="seconds since the request arrived at the agent")
    y = top
    for name, _ in rows:
        sheet.text(gutter - 8, y + _LANE_PX - 4, name, anchor="end", css_class="name")
        for lane_index, lane in enumerate(lanes[name]):
            for span in lane:
                _draw_span(sheet, scale, span, y + lane_index * _LANE_PX)
        y += height_of[name] + _GAP_PX
    _draw_moments(sheet, scale, request, top, bottom)
    if request.link is not None:
        _draw_rate(sheet, scale, request, request.link, rate_top, rate_bottom)
    if forecasts:
        _draw_forecasts(sheet, scale, request, forecasts, forecast_top, bottom)
    return sheet.svg()


def _stop_s(request: RequestRecord) -> float:
    ends = [c.acked_s or c.send_start_s or 0.0 for c in request.chunks]
    ends += [c.decode_end_s or 0.0 for c in request.chunks]
    ends.append(request.ttft_s or request.deadline_s)
    return max(*ends, 0.1) * 1.04


def _rows(request: RequestRecord) -> list[tuple[str, list[_Span]]]:
    link = [s for c in request.chunks if (s := _link_span(c))]
    decode = [s for c in request.chunks if c.choice != TEXT_CHOICE and (s := _work_span(c))]
    prefill = [s for c in request.chunks if c.choice == TEXT_CHOICE and (s := _work_span(c))]
    if request.prefill_start_s is not None and request.prefill_end_s is not None:
        prefill.append(
            _Span(
                request.prefill_start_s,
                request.prefill_end_s,
                "c-question",
                "question",
                _tip("prefill of the question", request.prefill_start_s, request.prefill_end_s),
            )
        )
    answer: list[_Span] = []
    if request.ttft_s is not None:
        stop_s = request.last_token_s or request.ttft_s
        tip = _tip("answer", request.ttft_s, stop_s)
        answer.append(_Span(request.ttft_s, stop_s, "c-answer", "", tip))
    return [("link", link), ("decode", decode), ("prefill", prefill), ("answer", answer)]


def _tip(what: str, start_s: float, stop_s: float) -> str:
    return f"{what}: {number(start_s)} to {number(stop_s)} s"


def _link_span(chunk: ChunkRecord) -> _Span | None:
    if chunk.send_start_s is None or chunk.acked_s is None or chunk.choice == HAVE_CHOICE:
        return None
    size = f"{number(chunk.num_bytes / _MEGA)} MB"
    what = f"chunk {chunk.index}, {chunk.choice}, {size}"
    return _Span(
        chunk.send_start_s,
        chunk.acked_s,
        choice_class(chunk.choice),
        f"{chunk.index} {chunk.choice}",
        _tip(what, chunk.send_start_s, chunk.acked_s),
    )


def _work_span(chunk: ChunkRecord) -> _Span | None:
    stop_s = chunk.decode_end_s if chunk.decode_end_s is not None else chunk.ready_s
    if chunk.decode_start_s is None or stop_s is None:
        return None
    what = f"chunk {chunk.index}, {'prefill' if chunk.choice == TEXT_CHOICE else 'decode'}"
    return _Span(
        chunk.decode_start_s,
        stop_s,
        choice_class(chunk.choice),
        str(chunk.index),
        _tip(what, chunk.decode_start_s, stop_s),
    )


def _lanes(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Put spans that overlap in time on lanes of their own."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.stop_s)):
        free = next((lane for lane in lanes if lane[-1].stop_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _draw_span(sheet: Sheet, scale: Scale, span: _Span, y: float) -> None:
    x1, x2 = scale.px(span.start_s), scale.px(span.stop_s)
    sheet.rect(x1, y + 1, x2 - x1, _LANE_PX - 2, f"span {span.css_class}", tip=span.tip)
    for label in (span.label, span.label.partition(" ")[0]):
        if label and text_px(label) + 6 <= x2 - x1:
            sheet.text((x1 + x2) / 2, y + 12, label, anchor="middle", css_class="in-span")
            break


def _draw_moments(
    sheet: Sheet, scale: Scale, request: RequestRecord, top: float, bottom: float
) -> None:
    """Mark first token and deadline; their names share the line above the picture without meeting."""
    taken: tuple[float, float] | None = None
    moments: list[tuple[float, str, str]] = []
    if request.ttft_s is not None:
        moments.append((request.ttft_s, f"first token {number(request.ttft_s)} s", "first"))
    if request.deadline_s <= scale.high:
        moments.append((request.deadline_s, f"deadline {number(request.deadline_s)} s", "slo"))
    for moment_s, label, css_class in moments:
        x = scale.px(moment_s)
        sheet.line(x, top - 4, x, bottom, css_class)
        width = text_px(label)
        left = min(max(0.0, x - width / 2), sheet.width - width)
        if taken is not None and left < taken[1] + 8 and left + width > taken[0] - 8:
            left = taken[0] - 8 - width
            if left < 0:
                left = taken[1] + 8
            if left + width > sheet.width:
                continue  # the line and the legend still show it
        sheet.text(left, top - 9, label, css_class=f"{css_class}-name")
        taken = (left, left + width)


def _draw_rate(
    sheet: Sheet,
    scale: Scale,
    request: RequestRecord,
    link: LinkRecord,
    top: float,
    bottom: float,
) -> None:
    shown = [c for i, c in enumerate(link.capacity_bytes_per_s) if i * link.step_s < scale.high]
    peak = max([mbps(rate) for rate in shown] or [1.0]) * 1.1 or 1.0
    y_scale = Scale(0.0, peak, bottom, top)
    sheet.y_axis(y_scale, scale.start_px, scale.stop_px, title="uplink, Mbit/s")
    outline: list[tuple[float, float]] = []
    for index, rate in enumerate(shown):
        y = y_scale.px(mbps(rate))
        outline.append((scale.px(index * link.step_s), y))
        outline.append((scale.px((index + 1) * link.step_s), y))
    if outline:
        closed = [(outline[0][0], bottom), *outline, (outline[-1][0], bottom)]
        sheet.path(closed, "capacity")
    carried: list[tuple[float, float]] = []
    for index, rate in enumerate(link.carried_bytes_per_s):
        if (index + 1) * link.step_s > scale.high:
            break
        middle_s = (index + 0.5) * link.step_s
        carried.append((scale.px(middle_s), y_scale.px(mbps(rate))))
    sheet.path(carried, "carried")
    estimates = [
        (scale.px(float(d["at_s"])), y_scale.px(mbps(float(d["rate_bytes_per_s"]))))
        for d in request.decisions
        if isinstance(d.get("rate_bytes_per_s"), int | float)
        and isinstance(d.get("at_s"), int | float)
    ]
    steps: list[tuple[float, float]] = []
    for x, y in estimates:
        if steps:
            steps.append((x, steps[-1][1]))
        steps.append((x, y))
    samples = [(t, r) for t, r in request.delivery if 0 <= t <= scale.high]
    step = max(1, len(samples) // 200)
    for time_s, rate in samples[::step]:
        sheet.circle(scale.px(time_s), y_scale.px(mbps(rate)), 1.8, "sample")
    sheet.path(steps, "estimate")


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What the planner expected at one decision."""

    at_s: float
    expected_s: float
    late_s: float
    """Highest quantile that it knew; the expectation where it knew none."""


def _forecasts(request: RequestRecord) -> list[_Forecast]:
    found: list[_Forecast] = []
    for decision in request.decisions:
        at_s, expected_s = decision.get("at_s"), decision.get("expected_ttft_s")
        if not isinstance(at_s, int | float) or not isinstance(expected_s, int | float):
            continue
        known = [
            float(pair[1])
            for pair in decision.get("ttft_quantiles") or ()
            if len(pair) == 2 and isinstance(pair[1], int | float)
        ]
        late_s = max([float(expected_s), *known])
        found.append(_Forecast(float(at_s), float(expected_s), late_s))
    return found


def _draw_forecasts(
    sheet: Sheet,
    scale: Scale,
    request: RequestRecord,
    forecasts: Sequence[_Forecast],
    top: float,
    bottom: float,
) -> None:
    """Draw the expected TTFT at each decision, up to its highest quantile, beside what it became."""
    sheet.line(scale.start_px, bottom, scale.stop_px, bottom, "axis")
    sheet.line(scale.start_px, top - 34, scale.stop_px, top - 34, "axis")
    actual_s = request.ttft_s if request.ttft_s is not None else request.deadline_s
    # A wild first guess must not flatten the rest.
    high = max(actual_s, request.deadline_s, *(f.expected_s for f in forecasts))
    y_scale = Scale(0.0, min(high, 2.5 * max(actual_s, request.deadline_s)) * 1.1, bottom, top)
    sheet.y_axis(y_scale, scale.start_px, scale.stop_px, title="expected first token, seconds")
    if request.ttft_s is not None:
        y = y_scale.px(request.ttft_s)
        sheet.line(scale.start_px, y, scale.stop_px, y, "first")
    for item in forecasts:
        x = scale.px(item.at_s)
        sheet.line(x, y_scale.px(item.expected_s), x, y_scale.px(item.late_s), "forecast-range")
        sheet.circle(x, y_scale.px(item.expected_s), 2.6, "forecast")


def quality_plot(figures: Sequence[PolicyFigures], *, width: float) -> str:
    """Draw mean KL against mean bytes, one numbered dot per policy; empty without evaluations."""
    shown = [
        (index, f, f.bytes_mean, f.kl_mean)
        for index, f in enumerate(figures, start=1)
        if f.bytes_mean is not None and f.kl_mean is not None
    ]
    if not shown:
        return ""
    height, gutter, top = 230.0, 60.0, 30.0
    bottom = height - 40
    sheet = Sheet(width, height, label="mean KL against bytes per policy")
    x_scale = Scale(0.0, max(b for _, _, b, _ in shown) / _MEGA * 1.08 or 1.0, gutter, width - 18)
    y_scale = Scale(0.0, max(k for _, _, _, k in shown) * 1.15 or 1e-3, bottom, top)
    sheet.y_axis(y_scale, gutter, width - 18, title="mean KL to the exact KV cache, nats")
    sheet.x_axis(x_scale, bottom, top, title="megabytes sent per request")
    taken: list[tuple[float, float]] = []
    for index, item, size, kl in shown:
        x, y = x_scale.px(size / _MEGA), y_scale.px(kl)
        sheet.circle(x, y, 4.5, "dot", tip=item.policy)
        label_x, label_y = x + 8, y - 7
        while any(abs(label_x - ox) < 20 and abs(label_y - oy) < 15 for ox, oy in taken):
            label_x += 20
        taken.append((label_x, label_y))
        sheet.text(label_x, label_y, str(index), css_class="value")
    return sheet.svg()
