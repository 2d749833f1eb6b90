"""Each importer reads its format exactly and names file and line of a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scenarios.errors import FileFormatError
from scenarios.importers import (
    CsvColumns,
    TraceFormat,
    detect_format,
    load_ping_delay,
    load_trace,
)
from scenarios.trace import mbps


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mahimahi_line_is_1500_bytes_and_the_file_loops_at_its_last_time(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "a.up", "0\n1\n1\n3\n10\n"))
    assert trace.duration_s == 0.010
    assert trace.total_bytes == pytest.approx(5 * 1500)
    # 0 and both of 1 ms lie in the first ms, then 3 ms, then the last.
    assert trace.bytes_between(0.0, 0.001) == pytest.approx(3 * 1500)
    assert trace.bytes_between(0.001, 0.002) == 0.0
    assert trace.bytes_between(0.002, 0.003) == pytest.approx(1500)
    assert trace.bytes_between(0.003, 0.009) == pytest.approx(0, abs=1e-6)
    assert trace.bytes_between(0.010, 0.020) == pytest.approx(5 * 1500)


def test_mahimahi_opportunity_ends_at_its_millisecond(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "a.up", "5\n10\n"))
    assert trace.finish_s(0.0, 1500) == pytest.approx(0.005)
    assert trace.finish_s(0.0, 1501) > 0.009


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("1\n2\nx\n", 3, "no whole number"),
        ("1\n-2\n", 2, "no whole number"),
        ("1\n5\n4\n", 3, "comes after"),
        ("1\n1.5\n", 2, "no whole number"),
        ("0\n0\n", None, "no period"),
    ],
)
def test_mahimahi_fault_names_file_and_line(
    tmp_path: Path, text: str, line: int | None, problem: str
) -> None:
    path = write(tmp_path, "bad.up", text)
    with pytest.raises(FileFormatError, match=problem) as caught:
        load_trace(path, trace_format=TraceFormat.MAHIMAHI)
    assert caught.value.line == line
    assert str(path) in str(caught.value)


def test_time_rate_holds_uneven_steps_and_starts_at_the_first_time(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "p.txt", "# comment\n0.5\t8\n1.5 16\n\n4.5 0\n"))
    assert trace.starts_s == (0.0, 1.0, 4.0)
    assert trace.bytes_per_s == (1e6, 2e6, 0.0)
    assert trace.duration_s == 6.0  # the last holds as long as the median step, 2 s


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("0 1\n1 x\n", 2, "rate 'x'"),
        ("0 1\n1 nan\n", 2, "rate 'nan'"),
        ("0 1\n1 -3\n", 2, "rate '-3'"),
        ("0 1\n0 2\n", 2, "does not come after"),
        ("0 1\n1 2 3\n", 2, "3 fields"),
        ("0 1\n", None, "fewer than two"),
        ("0 0\n1 0\n", None, "never carries"),
    ],
)
def test_time_rate_fault_names_the_line(
    tmp_path: Path, text: str, line: int | None, problem: str
) -> None:
    with pytest.raises(FileFormatError, match=problem) as caught:
        load_trace(write(tmp_path, "bad.txt", text))
    assert caught.value.line == line


def test_ping_rate_gives_half_the_least_round_trip_as_delay(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "p.txt", "0 60 8\n1 44 8\n2 80 4\n"))
    assert trace.delay_s == pytest.approx(0.022)
    assert trace.rate_at(2.5) == 0.5e6


def test_ping_output_gives_half_the_least_round_trip(tmp_path: Path) -> None:
    text = (
        "PING example.org (192.0.2.1) 56(84) bytes of data.\n"
        "[1701325646.1] 64 bytes from 192.0.2.1: icmp_seq=1 ttl=57 time=23.4 ms\n"
        "[1701325647.1] 64 bytes from 192.0.2.1: icmp_seq=2 ttl=57 time=31.0 ms\n"
    )
    assert load_ping_delay(write(tmp_path, "ping.log", text)) == pytest.approx(0.0117)
    with pytest.raises(FileFormatError, match="as ping prints it"):
        load_ping_delay(write(tmp_path, "no.log", "hello\n"))


def test_csv_reads_the_named_column_in_its_unit(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "when,up,down\n0,800,1\n1,1600,1\n3,0,1\n")
    trace = load_trace(path, columns=CsvColumns("up", unit="kbps", time="when"))
    assert trace.starts_s == (0.0, 1.0, 3.0)
    assert trace.bytes_per_s == (1e5, 2e5, 0.0)
    steps = load_trace(path, columns=CsvColumns("up", unit="bytes_per_s", step_s=0.5))
    assert (steps.starts_s, steps.duration_s) == ((0.0, 0.5, 1.0), 1.5)


def test_csv_rows_of_one_second_share_it(tmp_path: Path) -> None:
    rows = "2020.02.14_13.21.26,8\n2020.02.14_13.21.27,16\n2020.02.14_13.21.27,8\n2020.02.14_13.21.29,8\n"
    trace = load_trace(write(tmp_path, "u.csv", "t,r\n" + rows), columns=CsvColumns("r", time="t"))
    assert trace.starts_s == (0.0, 1.0, 2.0)
    assert trace.bytes_per_s == (1e6, 2e6, 1e6)


def test_csv_takes_iso_times_with_nanoseconds(tmp_path: Path) -> None:
    rows = "2024-04-19 16:33:42.000000000,8\n2024-04-19 16:33:43.250000123,4\n"
    trace = load_trace(write(tmp_path, "i.csv", "t,r\n" + rows), columns=CsvColumns("r", time="t"))
    assert trace.starts_s == (0.0, 1.25)


@pytest.mark.parametrize(
    ("text", "columns", "line", "problem"),
    [
        ("a,b\n1,2\n", None, None, "one of: a, b"),
        ("a,b\n1,2\n3,4\n", CsvColumns("c"), 1, "no column 'c'"),
        ("a,a\n1,2\n3,4\n", CsvColumns("a"), 1, "several columns"),
        ("a,b\n1,2\n3\n", CsvColumns("a"), 3, "1 fields, the header 2"),
        ("a,b\n1,2\n-,4\n", CsvColumns("a"), 3, "a '-'"),
        ("a,b\n1,2\n", CsvColumns("a"), None, "fewer than two"),
        ("a,b\n1,2\n3,4\n", CsvColumns("a", unit="mph"), None, "unit 'mph'"),
        ("a,b\n1,5\n3,4\n", CsvColumns("a", time="b"), 3, "before the line above"),
        ("a,b\n1,5\n3,noon\n", CsvColumns("a", time="b"), 3, "neither seconds nor"),
        ('a,b\n1,2\n"3,4\n', CsvColumns("a"), 3, "unexpected end"),
    ],
)
def test_csv_fault_names_the_line(
    tmp_path: Path, text: str, columns: CsvColumns | None, line: int | None, problem: str
) -> None:
    with pytest.raises(FileFormatError, match=problem) as caught:
        load_trace(write(tmp_path, "bad.csv", text), columns=columns)
    assert caught.value.line == line


def iperf3(*sums: tuple[float, float, float], rtt_us: int | None = None) -> str:
    streams = [{"rtt": rtt_us}] if rtt_us else []
    intervals = [
        {"streams": streams, "sum": {"start": start, "end": end, "bytes": count}}
        for start, end, count in sums
    ]
    return json.dumps({"start": {}, "intervals": intervals, "end": {}})


def test_iperf3_bytes_over_their_interval_are_the_rate(tmp_path: Path) -> None:
    text = iperf3((0, 1.0, 1e6), (1.0, 3.0, 1e6), rtt_us=40000)
    trace = load_trace(write(tmp_path, "i.json", text))
    assert (trace.starts_s, trace.bytes_per_s) == ((0.0, 1.0), (1e6, 5e5))
    assert (trace.duration_s, trace.delay_s) == (3.0, 0.02)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON"),
        ("{}", "no `intervals`"),
        ('{"intervals": [], "error": "unable to connect"}', "unable to connect"),
        ('{"intervals": {}}', "no list"),
        ('{"intervals": [{"sum": {"start": 0, "end": 0, "bytes": 1}}]}', r"intervals\[0\]"),
        ('{"intervals": [{}]}', r"intervals\[0\]"),
        ('{"intervals": [3]}', r"intervals\[0\]"),
        ('{"intervals": []}', "0 times"),
        ('{"a":' * 100000, "nested too deep|no JSON"),
        (iperf3((1, 2, 5.0), (0, 1, 5.0)), "does not come after"),
    ],
)
def test_iperf3_fault_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(FileFormatError, match=problem):
        load_trace(write(tmp_path, "i.json", text), trace_format=TraceFormat.IPERF3)


def test_format_is_found_from_name_and_first_line(tmp_path: Path) -> None:
    assert detect_format(tmp_path / "x.csv", "") is TraceFormat.CSV
    assert detect_format(tmp_path / "x", " {") is TraceFormat.IPERF3
    assert detect_format(tmp_path / "x", "# c\n12\n") is TraceFormat.MAHIMAHI
    with pytest.raises(FileFormatError, match="line 1"):
        detect_format(tmp_path / "x", "a b c d\n")
    with pytest.raises(FileFormatError, match="is empty"):
        detect_format(tmp_path / "x", "\n")


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="No such file"):
        load_trace(tmp_path / "missing.up")
    binary = tmp_path / "b.up"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="not text"):
        load_trace(binary)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "duration_s", "mean_mbps", "outage_s"),
    [
        ("mahimahi/ATT-LTE-driving-2016.up", 120, 1.91, 3),
        ("mahimahi/ATT-LTE-driving.up", 1012, 0.83, 77),
        ("mahimahi/TMobile-LTE-short.up", 140, 13.32, 0),
        ("mahimahi/Verizon-EVDO-driving.up", 1065, 0.84, 11),
        ("pensieve-cooked/norway_ferry_3", 317, 1.25, 0),
        ("puffer/puffer_220218_a.trace", 2858, 2.66, 0),
    ],
)
def test_recorded_traces_have_the_figures_of_their_manifest(
    data_dir: Path, name: str, duration_s: float, mean_mbps: float, outage_s: float
) -> None:
    trace = load_trace(data_dir / "traces" / name)
    assert trace.duration_s == pytest.approx(duration_s, abs=1.0)
    assert mbps(trace.mean_bytes_per_s) == pytest.approx(mean_mbps, abs=0.006)
    longest_s = max((outage.duration_s for outage in trace.outages()), default=0.0)
    assert outage_s <= longest_s < outage_s + 2  # the manifest counts whole seconds


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "columns", "mean_mbps"),
    [
        (
            "starlink/autobahn_throughput_rows560-1579.csv",
            CsvColumns("upload", time="timestamp_start_ul"),
            17.1,
        ),
        ("5g/5gophers_walking-trace.csv", CsvColumns("throughput_mbps"), 333.0),
        (
            "5g/ucc_5g_download_static_B_2020.02.14_13.21.26.csv",
            CsvColumns("DL_bitrate", unit="kbps", time="Timestamp"),
            121.0,
        ),
    ],
)
def test_recorded_csv_traces_have_about_the_mean_of_their_manifest(
    data_dir: Path, name: str, columns: CsvColumns, mean_mbps: float
) -> None:
    trace = load_trace(data_dir / "traces" / name, columns=columns)
    assert mbps(trace.mean_bytes_per_s) == pytest.approx(mean_mbps, rel=0.1)
