"""The command `kvtide`: the codec's and the planner's tools, traces, scenarios and reports.

A shell: reads the command line and calls. Exit codes: 0 done, 1 a run failed, 2 a bad input.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scenarios.charts import number
from scenarios.errors import ScenarioError
from scenarios.importers import CsvColumns, TraceFormat, load_ping_delay, load_trace
from scenarios.results import load_report
from scenarios.tables import diff_table, terminal_table
from scenarios.trace import Trace, mbps

EXIT_BAD_INPUT = 2
_BARS = " ▁▂▃▄▅▆▇█"
_PERCENTILES = (5, 25, 50, 75, 95)

USAGE = """usage: kvtide COMMAND …

  kvtide codec profile|encode|decode|inspect …   calibrate a profile; look into bitstreams
  kvtide plan explain|breakeven …                what the planner decided, and when not to bother
  kvtide trace info FILE …                       duration, rates and outages of a trace, drawn
  kvtide scenario NAME|FILE.toml …               run a scenario (also: kvtide scenario --list)
  kvtide report show FILE.json                   the table of a report
  kvtide report diff A.json B.json               what changed between two reports

Each command has --help. The programs are kvtide-edge and kvtide-worker.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "codec": lambda rest: _room_tool("codec.cli", rest),
        "plan": lambda rest: _room_tool("planner.cli", rest),
        "trace": _trace,
        "scenario": _scenario,
        "report": _report,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else EXIT_BAD_INPUT
    command = commands.get(arguments[0])
    if command is None:
        print(f"error: no command {arguments[0]!r}\n\n{USAGE}", end="", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        return command(arguments[1:])
    except ScenarioError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _room_tool(module: str, rest: list[str]) -> int:
    """Call the command line of another room; it is loaded only when asked for."""
    try:
        tool = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        print(f"error: this installation has no {module}", file=sys.stderr)
        return EXIT_BAD_INPUT
    code = tool.main(rest)
    return int(code or 0)


def _scenario(rest: list[str]) -> int:
    from scenarios.run import main as run

    return run(rest, prog="kvtide scenario")


def _trace(rest: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvtide trace", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="duration, rates and outages of a trace, drawn")
    info.add_argument("file", type=Path)
    info.add_argument("--format", choices=[str(f) for f in TraceFormat], help="default: look")
    info.add_argument("--column", help="for CSV: the column of rates")
    info.add_argument("--unit", default="mbps", help="for CSV: its unit [default: mbps]")
    info.add_argument("--time-column", help="for CSV: the column of times; none: rows are steps")
    info.add_argument("--step", type=float, default=1.0, help="for CSV: seconds per row")
    info.add_argument("--ping", type=Path, help="output of ping, for the one-way delay")
    arguments = parser.parse_args(rest)
    columns = None
    if arguments.column:
        columns = CsvColumns(
            arguments.column,
            unit=arguments.unit,
            time=arguments.time_column,
            step_s=arguments.step,
        )
    trace = load_trace(
        arguments.file,
        trace_format=TraceFormat(arguments.format) if arguments.format else None,
        columns=columns,
    )
    delay_s = load_ping_delay(arguments.ping) if arguments.ping else trace.delay_s
    width = max(20, min(100, shutil.get_terminal_size().columns - 12))
    print(trace_info(trace, delay_s=delay_s, width=width))
    return 0


def trace_info(trace: Trace, *, delay_s: float | None, width: int) -> str:
    """Return what a person wants to know of a trace, as text with a drawing."""
    outages = trace.outages()
    longest_s = max((outage.duration_s for outage in outages), default=0.0)
    shares = ", ".join(f"{p}% {number(mbps(trace.percentile(p / 100)))}" for p in _PERCENTILES)
    lines = [
        f"{trace.name}",
        f"duration     {number(trace.duration_s)} s, then it loops",
        f"mean         {number(mbps(trace.mean_bytes_per_s))} Mbit/s, {number(trace.total_bytes / 1e6)} MB in all",
        f"percentiles  {shares} Mbit/s (means over 1 s)",
        f"outages      {len(outages)} of 1 s or longer"
        + (f", the longest {number(longest_s)} s" if outages else ""),
    ]
    if delay_s is not None:
        lines.append(
            f"delay        {number(delay_s * 1000)} ms one way (half the least round trip)"
        )
    return "\n".join([*lines, "", *draw(trace, width=width)])


def draw(trace: Trace, *, width: int, height: int = 8) -> list[str]:
    """Draw the mean capacity of each column of time with block characters."""
    rates = [mbps(rate) for rate in trace.binned(0.0, trace.duration_s, trace.duration_s / width)]
    rates = rates[:width]
    top = max(rates)
    label = f"{number(top)} Mbit/s"
    rows: list[str] = [label]
    for row in range(height - 1, -1, -1):
        cells = []
        for rate in rates:
            eighths = round(rate / top * height * 8) - row * 8
            cells.append(_BARS[min(8, max(0, eighths))])
        rows.append("│" + "".join(cells).rstrip())
    rows.append("└" + "─" * len(rates))
    end = f"{number(trace.duration_s)} s"
    rows.append("0 s" + end.rjust(len(rates) - 2))
    return rows


def _report(rest: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvtide report", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="the table of a report")
    show.add_argument("file", type=Path)
    diff = commands.add_parser("diff", help="what changed between two reports")
    diff.add_argument("before", type=Path)
    diff.add_argument("after", type=Path)
    arguments = parser.parse_args(rest)
    if arguments.command == "show":
        print(terminal_table(load_report(arguments.file)))
    else:
        print(diff_table(load_report(arguments.before), load_report(arguments.after)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
