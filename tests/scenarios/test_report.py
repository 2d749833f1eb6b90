"""The page, the tables and the file of a report: complete, self-contained, readable, and the same again."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from scenarios.charts import Scale, nice_ticks, number
from scenarios.errors import ReportError
from scenarios.metrics import figures, lower_bound_s, percentile
from scenarios.report import chosen_requests, html_page
from scenarios.results import RunReport, load_report, to_json
from scenarios.tables import csv_text, diff_table, terminal_table
from tests.scenarios.samples import RATE, report, request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PROBE = Path(__file__).with_name("probe.js")


def many(count: int = 40) -> RunReport:
    """Return a report with many requests per policy, long names and one failure."""
    requests = []
    for policy, choices in (
        ("text", ("text",) * 4),
        ("fixed:cachegen:2", ("cachegen:2",) * 4),
        ("kvtide-fastest", ("text", "klt:1", "klt:1", "klt:1")),
    ):
        for index in range(count):
            one = request(policy, choices, kl=0.01 * index / count)
            ttft_s = (one.ttft_s or 0.0) * (0.6 + 0.9 * index / count)
            requests.append(dataclasses.replace(one, ttft_s=ttft_s, repetition=index))
    requests.append(
        dataclasses.replace(
            requests[-1],
            policy="cachegen",
            ttft_s=None,
            bytes_sent=0,
            chunks=(),
            evaluation=None,
            error='HTTP 503: no <worker> & "nobody" answered',
            link=None,
        )
    )
    return dataclasses.replace(report(requests=tuple(requests)), summary=("long " * 18).strip())


# ---- figures -------------------------------------------------------------------------------------


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([], 0.5) is None


def test_figures_count_late_and_failed_requests() -> None:
    by_policy = {item.policy: item for item in figures(many(10))}
    assert by_policy["cachegen"].num_failed == by_policy["cachegen"].slo_violations == 1
    assert by_policy["cachegen"].ttft_p50_s is None
    assert by_policy["cachegen"].kl_mean is None
    mine = [r.ttft_s for r in many(10).requests if r.policy == "text" and r.ttft_s]
    assert by_policy["text"].slo_violations == sum(t > 15.0 for t in mine)
    assert by_policy["text"].choices == (("text", 40),)
    assert by_policy["kvtide-fastest"].choices == (("klt:1", 30), ("text", 10))


def test_lower_bound_is_the_bytes_over_the_link() -> None:
    one = request("int8", ("int8",), kl=0.0)
    assert one.link is not None
    flat = dataclasses.replace(one.link, capacity_bytes_per_s=(RATE,) * 200)
    bound = lower_bound_s(dataclasses.replace(one, link=flat))
    assert bound == pytest.approx(one.bytes_sent / RATE)
    assert lower_bound_s(dataclasses.replace(one, link=None)) is None


# ---- file ----------------------------------------------------------------------------------------


def test_report_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(to_json(many(3)), encoding="utf-8")
    assert load_report(path) == many(3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": "kvtide.scenario-report/2"}, "has the schema 'kvtide.scenario-report/2'"),
        ({"slo_s": "soon"}, "slo_s: must be a number"),
        ({"extra": 1}, "extra: unknown key"),
        ({"requests": [{"policy": "x"}]}, r"requests\[0\]\.context: is missing"),
    ],
)
def test_report_file_with_a_wrong_field_is_refused(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(json.loads(to_json(report())) | change), encoding="utf-8")
    with pytest.raises(ReportError, match=problem):
        load_report(path)


def test_report_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for text, problem in (("{", "no JSON"), ("[1]", "schema None"), ("{}", "schema None")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ReportError, match=problem):
            load_report(path)
    with pytest.raises(ReportError, match="No such file"):
        load_report(tmp_path / "none.json")


# ---- tables --------------------------------------------------------------------------------------


def test_terminal_table_has_a_row_per_policy_and_names_failures() -> None:
    text = terminal_table(many(3))
    for policy in ("text", "fixed:cachegen:2", "kvtide-fastest", "cachegen"):
        assert re.search(rf"^{re.escape(policy)} ", text, re.MULTILINE)
    assert 'no answer under cachegen: HTTP 503: no <worker> & "nobody" answered' in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_csv_has_a_row_per_request_that_a_reader_gets_back() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(many(3)))))
    assert len(rows) == len(many(3).requests)
    assert rows[0]["choices"] == "text text text text"
    assert rows[-1]["ttft_s"] == ""
    assert float(rows[0]["ttft_s"]) == many(3).requests[0].ttft_s


def test_diff_says_ratios_and_what_else_differs() -> None:
    before = report()
    slower = tuple(
        dataclasses.replace(r, ttft_s=(r.ttft_s or 0.0) * 2) for r in before.requests[:-1]
    )
    after = dataclasses.replace(
        before, requests=slower, policies=before.policies[:-1], machine="another"
    )
    text = diff_table(before, after)
    assert "differs: machine: a processor, 2 cores -> another" in text
    assert "only in the first: kvtide" in text
    assert re.search(r"^int8 .*2\.000.*1\.000", text, re.MULTILINE)
    with pytest.raises(ReportError, match="no policy in common"):
        diff_table(before, dataclasses.replace(before, policies=()))


# ---- page ----------------------------------------------------------------------------------------


def test_page_is_the_same_again_and_asks_for_nothing_from_outside() -> None:
    page = html_page(many())
    assert page == html_page(many())
    for address in re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page):
        assert address.startswith("data:")
    assert "@import" not in page
    assert "url(" not in page
    assert "<script" not in page


def test_text_from_outside_is_escaped() -> None:
    page = html_page(many(2))
    assert "no &lt;worker&gt; &amp; &quot;nobody&quot; answered" in page
    assert "<worker>" not in page
    assert "Which &lt;gate&gt; is it &amp; why?" in html_page(report())


def test_every_figure_of_the_table_is_on_the_page() -> None:
    page = html.unescape(html_page(report()))
    for item in figures(report()):
        assert f"{item.ttft_p50_s:.2f}" in page
        assert item.policy in page


def test_chosen_request_is_the_one_with_the_median() -> None:
    chosen = chosen_requests(many(11))
    assert [r.policy for r in chosen] == ["text", "fixed:cachegen:2", "kvtide-fastest", "cachegen"]
    mine = sorted(r.ttft_s for r in many(11).requests if r.policy == "text" and r.ttft_s)
    assert chosen[0].ttft_s == mine[5]


def test_simulated_report_shows_no_answers_and_no_time_of_day() -> None:
    page = html_page(dataclasses.replace(report(), mode="simulated", started_at="", machine=""))
    assert "in virtual time" in page
    assert "<h2>Answers</h2>" not in page
    assert "<dt>when</dt>" not in page


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0.0, 10.0, count=5) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.0, 0.037, count=4) == [0, 0.01, 0.02, 0.03]
    assert nice_ticks(0.0, 0.0, count=4) == [0.0]
    scale = Scale(0.0, 100.0, 50.0, 150.0)
    assert (scale.px(0), scale.px(100), scale.px(1000), scale.px(-5)) == (50, 150, 150, 50)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (12.345, "12.3"),
        (123456.0, "123456"),
        (0.00001, "1e-05"),
        (2.0, "2"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


# ---- in a browser --------------------------------------------------------------------------------


def browse(folder: Path, page: str, width: int) -> tuple[dict[str, list[str]], str]:
    """Lay the page out at a width and return what the probe found, and what the console said."""
    assert CHROMIUM is not None
    probed = page.replace("</body>", f"<script>{PROBE.read_text(encoding='utf-8')}</script></body>")
    (folder / "page.html").write_text(probed, encoding="utf-8")
    # A frame, since a browser's window has a least width that is wider than a phone.
    frame = f'<iframe src="page.html" width="{width}" height="4000" style="border:0"></iframe>'
    (folder / "frame.html").write_text(
        f"<!doctype html><body style='margin:0'>{frame}<script>"
        "addEventListener('message', e => {document.body.dataset.found = e.data})"
        "</script></body>",
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                CHROMIUM,
                *FLAGS,
                f"--user-data-dir={profile}",
                "--allow-file-access-from-files",
                "--enable-logging=stderr",
                "--virtual-time-budget=4000",
                f"--window-size={max(width, 600)},4000",
                "--dump-dom",
                (folder / "frame.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(html.unescape(match.group(1)))
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return found, console


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [340, 390, 768, 1280])
@pytest.mark.parametrize("which", ["few", "many"])
def test_page_fits_and_no_texts_overlap_in_a_browser(
    tmp_path: Path, width: int, which: str
) -> None:
    page = html_page(report() if which == "few" else many())
    found, console = browse(tmp_path, page, width)
    assert console == ""
    assert found["wide"] == []
    assert found["overlaps"] == []
    assert found["outside"] == []
    assert int(found["texts"][0]) > 50


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_probe_finds_overlaps_and_a_page_that_is_too_wide(tmp_path: Path) -> None:
    bad = (
        "<!doctype html><body><div style='width:2000px'>x</div><svg viewBox='0 0 100 50' width='100'>"
        "<text x='10' y='20'>hello</text><text x='12' y='22'>world</text>"
        "<text x='90' y='40'>outside</text></svg></body>"
    )
    found, _ = browse(tmp_path, bad, 500)
    assert found["wide"]
    assert found["overlaps"]
    assert found["outside"]
