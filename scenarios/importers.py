"""Reading traces in the formats that people have them in.

Owns: Mahimahi packet-delivery files, `time Mbit/s` text (Pensieve, Puffer), `time rtt rate` text,
CSV with named columns and units, `iperf3 -J`, and the output of `ping`. Invariant: a file is read
whole or refused with its name and the line of the first fault; nothing is skipped or guessed.
Must not know: links, scenarios.
"""

from __future__ import annotations

import csv
import datetime
import enum
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from scenarios.errors import FileFormatError, TraceError
from scenarios.trace import BYTES_PER_S_PER_MBPS, Trace

PACKET_BYTES = 1500
"""Bytes of one delivery opportunity. Source: mahimahi(1), mm-link; one MTU per line."""
MAX_FILE_BYTES = 256 * 1024 * 1024
"""A trace is small; more is somebody's mistake."""
_MS_PER_S = 1000

UNITS_BYTES_PER_S = {
    "bps": 1 / 8,
    "kbps": 1e3 / 8,
    "mbps": BYTES_PER_S_PER_MBPS,
    "gbps": 1e9 / 8,
    "bytes_per_s": 1.0,
}
"""Units that a column of rates may have, all decimal."""


class TraceFormat(enum.StrEnum):
    """Formats of a trace file."""

    MAHIMAHI = "mahimahi"
    """One line per delivery opportunity of 1500 bytes: its time in whole milliseconds."""
    TIME_RATE = "time-rate"
    """Lines `seconds Mbit/s`; a value holds until the next time."""
    PING_RATE = "ping-rate"
    """Lines `seconds rtt-milliseconds Mbit/s`; half the least round trip is the one-way delay."""
    CSV = "csv"
    """A header and rows; the columns are named by the caller."""
    IPERF3 = "iperf3"
    """What `iperf3 -J` prints."""


@dataclass(frozen=True, slots=True)
class CsvColumns:
    """Which columns of a CSV file are the trace."""

    rate: str
    """Name of the column of rates."""
    unit: str = "mbps"
    """Unit of that column, one of `UNITS_BYTES_PER_S`."""
    time: str | None = None
    """Name of the column of times: seconds, ISO 8601 or `YYYY.MM.DD_HH.MM.SS`; None: rows are steps."""
    step_s: float = 1.0
    """Length of one row when there is no column of times. Unit: seconds."""


def load_trace(
    path: Path,
    *,
    trace_format: TraceFormat | None = None,
    columns: CsvColumns | None = None,
) -> Trace:
    """Read a trace.

    Args:
        path: the file.
        trace_format: its format; None looks at the name and the first line.
        columns: for CSV only: which columns.

    Raises:
        FileFormatError: the file is missing, too large, or not what its format promises.
    """
    text = _read(path)
    chosen = trace_format or detect_format(path, text)
    lines = text.splitlines()
    try:
        match chosen:
            case TraceFormat.MAHIMAHI:
                return _mahimahi(path, lines)
            case TraceFormat.TIME_RATE:
                return _time_rate(path, lines, has_rtt=False)
            case TraceFormat.PING_RATE:
                return _time_rate(path, lines, has_rtt=True)
            case TraceFormat.CSV:
                return _csv(path, lines, columns)
            case TraceFormat.IPERF3:
                return _iperf3(path, text)
    except TraceError as error:
        raise FileFormatError(path, None, str(error)) from error


def detect_format(path: Path, text: str) -> TraceFormat:
    """Say which format a file has, from its name and its first line."""
    if path.suffix == ".csv":
        return TraceFormat.CSV
    if text.lstrip()[:1] == "{":
        return TraceFormat.IPERF3
    for number, line in _content(text.splitlines()):
        fields = len(line.split())
        if fields in (1, 2, 3):
            return (TraceFormat.MAHIMAHI, TraceFormat.TIME_RATE, TraceFormat.PING_RATE)[fields - 1]
        raise FileFormatError(path, number, "is in no trace format that is known here")
    raise FileFormatError(path, None, "is empty")


def load_ping_delay(path: Path) -> float:
    """Read the output of `ping` and return the one-way delay: half the least round trip, in seconds."""
    rtts = [float(match.group(1)) for match in re.finditer(r"time[=<]([0-9.]+) ?ms", _read(path))]
    if not rtts:
        raise FileFormatError(path, None, "has no line with `time=… ms`, as ping prints it")
    return min(rtts) / 2 / _MS_PER_S


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FileFormatError(path, None, f"is larger than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, None, "is not text") from error


def _content(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Return the lines that say something, with their numbers; `#` starts a comment line."""
    return [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _mahimahi(path: Path, lines: Sequence[str]) -> Trace:
    packets: dict[int, int] = {}
    last_ms = 0
    for number, line in _content(lines):
        word = line.strip()
        if not (word.isascii() and word.isdigit()):
            raise FileFormatError(path, number, f"{word[:40]!r} is no whole number of milliseconds")
        time_ms = int(word)
        if time_ms < last_ms:
            raise FileFormatError(path, number, f"{time_ms} ms comes after {last_ms} ms")
        last_ms = time_ms
        # An opportunity at ms t is spread over the ms that ends at t, so that the last one lies inside
        # the period; one at 0 belongs to the first ms.
        slot = max(0, time_ms - 1)
        packets[slot] = packets.get(slot, 0) + 1
    if last_ms == 0:
        raise FileFormatError(path, None, "has no time above 0 ms, so it has no period")
    times = [0.0]
    rates = [0.0]
    for slot, count in sorted(packets.items()):
        if slot / _MS_PER_S != times[-1]:
            times.append(slot / _MS_PER_S)
            rates.append(0.0)
        rates[-1] = count * PACKET_BYTES * float(_MS_PER_S)
        if slot + 1 < last_ms:
            times.append((slot + 1) / _MS_PER_S)
            rates.append(0.0)
    return Trace.from_samples(path.name, times, rates, duration_s=last_ms / _MS_PER_S)


def _number(path: Path, line: int, word: str, what: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise FileFormatError(path, line, f"{what} {word[:40]!r} is no number that is 0 or more")
    return value


def _time_rate(path: Path, lines: Sequence[str], *, has_rtt: bool) -> Trace:
    names = ("time", "round trip", "rate") if has_rtt else ("time", "rate")
    times: list[float] = []
    rates: list[float] = []
    rtts_ms: list[float] = []
    for number, line in _content(lines):
        words = line.split()
        if len(words) != len(names):
            raise FileFormatError(path, number, f"has {len(words)} fields, not {len(names)}")
        values = [
            _number(path, number, word, name) for word, name in zip(words, names, strict=True)
        ]
        if times and values[0] <= times[-1]:
            raise FileFormatError(path, number, f"{values[0]} s does not come after {times[-1]} s")
        times.append(values[0])
        rates.append(values[-1] * BYTES_PER_S_PER_MBPS)
        if has_rtt:
            rtts_ms.append(values[1])
    if len(times) < 2:  # one sample has no step, so it would have no duration
        raise FileFormatError(path, None, "has fewer than two samples")
    delay_s = min(rtts_ms) / 2 / _MS_PER_S if rtts_ms else None
    return Trace.from_samples(
        path.name, times, rates, duration_s=times[-1] + _typical_step_s(times), delay_s=delay_s
    )


def _typical_step_s(times: Sequence[float]) -> float:
    """Return how long the last sample holds: as long as the median one."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _csv(path: Path, lines: Sequence[str], columns: CsvColumns | None) -> Trace:
    rows = csv.reader(lines, strict=True)
    try:
        header = next(rows, [])
        if columns is None:
            _fail(path, f"is CSV; name the column of rates, one of: {', '.join(header)}")
        unit = UNITS_BYTES_PER_S.get(columns.unit)
        if unit is None:
            known = ", ".join(UNITS_BYTES_PER_S)
            _fail(path, f"unit {columns.unit!r} is unknown; known are {known}")
        rate_at = _column(path, header, columns.rate)
        time_at = None if columns.time is None else _column(path, header, columns.time)
        times: list[float] = []
        rates: list[float] = []
        for row in rows:
            if len(row) != len(header):
                problem = f"has {len(row)} fields, the header {len(header)}"
                raise FileFormatError(path, rows.line_num, problem)
            rates.append(_number(path, rows.line_num, row[rate_at].strip(), columns.rate) * unit)
            if time_at is None:
                times.append(len(times) * columns.step_s)
                continue
            time_s = _moment_s(path, rows.line_num, row[time_at].strip())
            if times and time_s < times[-1]:
                problem = f"{columns.time} {row[time_at]!r} comes before the line above"
                raise FileFormatError(path, rows.line_num, problem)
            times.append(time_s)
    except csv.Error as error:
        raise FileFormatError(path, rows.line_num, str(error)) from error
    if len(times) < 2:
        _fail(path, "has fewer than two rows")
    spread = _spread_repeats(times)
    return Trace.from_samples(path.name, spread, rates, duration_s=spread[-1] + _last_step_s(times))


def _fail(path: Path, problem: str) -> NoReturn:
    raise FileFormatError(path, None, problem)


def _column(path: Path, header: Sequence[str], name: str) -> int:
    found = [index for index, title in enumerate(header) if title.strip() == name]
    if len(found) != 1:
        problem = "there is no column" if not found else "there are several columns"
        raise FileFormatError(path, 1, f"{problem} {name!r}; there are: {', '.join(header)}")
    return found[0]


def _moment_s(path: Path, line: int, word: str) -> float:
    """Return a time in seconds from a number, from ISO 8601, or from what G-NetTrack writes."""
    try:
        return float(word)
    except ValueError:
        pass
    trimmed = re.sub(r"(\.\d{6})\d+", r"\1", word)  # nanoseconds are more than datetime takes
    for parse in (
        datetime.datetime.fromisoformat,
        lambda text: datetime.datetime.strptime(text, "%Y.%m.%d_%H.%M.%S"),  # noqa: DTZ007
    ):
        try:
            moment = parse(trimmed)
        except ValueError:
            continue
        if moment.tzinfo is None:  # only differences count
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp()
    raise FileFormatError(path, line, f"time {word[:40]!r} is neither seconds nor a date and time")


def _last_step_s(times: Sequence[float]) -> float:
    distinct = sorted(set(times))
    return _typical_step_s(distinct) if len(distinct) > 1 else 1.0


def _spread_repeats(times: Sequence[float]) -> list[float]:
    """Spread rows of one moment evenly up to the next one; clocks of a whole second repeat."""
    spread: list[float] = []
    groups = [(moment, len(list(rows))) for moment, rows in itertools.groupby(times)]
    nexts = [moment for moment, _ in groups[1:]] + [groups[-1][0] + _last_step_s(times)]
    for (moment, count), following in zip(groups, nexts, strict=True):
        spread += [moment + (following - moment) * index / count for index in range(count)]
    return spread


def _iperf3(path: Path, text: str) -> Trace:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileFormatError(path, error.lineno, f"is no JSON: {error.msg}") from error
    except RecursionError as error:
        raise FileFormatError(path, None, "is JSON nested too deep") from error
    if not isinstance(document, dict) or "intervals" not in document:
        _fail(path, "is JSON but not what `iperf3 -J` prints: no `intervals`")
    if document.get("error"):
        _fail(path, f"iperf3 reports an error: {document['error']}")
    times: list[float] = []
    rates: list[float] = []
    rtts_us: list[float] = []
    end_s = 0.0
    intervals = document["intervals"]
    if not isinstance(intervals, list):
        _fail(path, "`intervals` is no list")
    for index, interval in enumerate(intervals):
        try:
            total = interval["sum"]
            start_s, end_s = float(total["start"]), float(total["end"])
            rate = float(total["bytes"]) / (end_s - start_s)
            rtts_us += [float(s["rtt"]) for s in interval.get("streams", []) if s.get("rtt")]
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            problem = f"intervals[{index}] has no sum with start < end and bytes ({error!r})"
            raise FileFormatError(path, None, problem) from error
        if times and start_s <= times[-1]:
            _fail(path, f"intervals[{index}] does not come after the one before")
        times.append(start_s)
        rates.append(rate)
    delay_s = min(rtts_us) / 2 / 1e6 if rtts_us else None
    return Trace.from_samples(path.name, times, rates, duration_s=end_s, delay_s=delay_s)
