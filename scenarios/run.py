"""Run a scenario: `python scenarios/run.py NAME|FILE.toml`.

A shell: reads the command line, runs, writes what was asked for. Exit codes: 0 done, 1 a run failed, 2 a
bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the rooms are beside this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from scenarios.calibrate import costs_from, prediction_text, predictions
from scenarios.config import (
    Scenario,
    catalog_names,
    check_policies,
    load_scenario,
)
from scenarios.errors import ReplayError, ScenarioError
from scenarios.progress import SilentProgress, TerminalProgress
from scenarios.replay import replay
from scenarios.report import html_page
from scenarios.results import RunReport, load_report, to_json
from scenarios.simulate import simulate
from scenarios.tables import csv_text, terminal_table

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def build_parser(prog: str = "scenarios/run.py") -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run a scenario and report what each policy made of it.",
        allow_abbrev=False,
    )
    parser.add_argument("scenario", nargs="?", help="name in the catalog, or a TOML file")
    parser.add_argument("--list", action="store_true", help="list the catalog, one line each")
    parser.add_argument("--policies", help="comma-separated, instead of the scenario's own")
    parser.add_argument("--trace", type=Path, help="trace file for the uplink, instead of its own")
    parser.add_argument("--column", help="for a CSV trace: the column of rates")
    parser.add_argument("--unit", help="for a CSV trace: its unit, such as mbps or kbps")
    parser.add_argument("--time-column", help="for a CSV trace: the column of times")
    parser.add_argument("--slo", type=float, metavar="SECONDS", help="deadline of the first token")
    parser.add_argument("--seed", type=int, help="seed of everything random")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write the report as a page")
    parser.add_argument("--csv", type=Path, metavar="OUT", help="write one row per request")
    parser.add_argument(
        "--simulate", action="store_true", help="compute in virtual time instead of running"
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="REPORT",
        help="with --simulate: take the costs from this report of a real run, and compare with it",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the programs' logs here")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "scenarios/run.py") -> int:
    """Run the command line and return the exit code."""
    arguments = build_parser(prog).parse_args(argv)
    try:
        if arguments.list:
            _list_catalog()
            return 0
        if arguments.scenario is None:
            raise ScenarioError("name a scenario or a TOML file, or use --list")
        scenario = _override(load_scenario(arguments.scenario), arguments)
        for path in (arguments.json, arguments.html, arguments.csv):
            _check_writable(path)
        report = _run(scenario, arguments)
        _write(report, arguments)
    except ReplayError as error:
        return _fail(error, EXIT_FAILED)
    except ScenarioError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; everything that was started has been ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    if not any(request.ttft_s is not None for request in report.requests):
        return EXIT_FAILED
    return 0


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _list_catalog() -> None:
    names = catalog_names()
    width = max(len(name) for name in names)
    for name in names:
        print(f"{name.ljust(width)}  {load_scenario(name).summary}")


def _override(scenario: Scenario, arguments: argparse.Namespace) -> Scenario:
    """Put what the command line says in place of what the file says."""
    changes: dict[str, object] = {}
    if arguments.policies is not None:
        policies = tuple(p.strip() for p in arguments.policies.split(",") if p.strip())
        check_policies(policies, "--policies")
        changes["policies"] = policies
    if arguments.slo is not None:
        if not 0 < arguments.slo < 86400:
            raise ScenarioError(f"--slo is {arguments.slo}, must be from 0 to 86400 seconds")
        changes["slo_s"] = arguments.slo
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    if arguments.trace is not None:
        changes["uplink"] = dataclasses.replace(
            scenario.uplink,
            trace=str(arguments.trace.expanduser().absolute()),
            format="",
            column=arguments.column or "",
            unit=arguments.unit or "mbps",
            time_column=arguments.time_column or "",
        )
    return dataclasses.replace(scenario, **changes)  # type: ignore[arg-type]


def _check_writable(path: Path | None) -> None:
    """Refuse an output that cannot be written before a run of minutes, not after it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ScenarioError(f"{path} cannot be written: {error.strerror}") from error


def _run(scenario: Scenario, arguments: argparse.Namespace) -> RunReport:
    if arguments.simulate:
        return _simulate(scenario, arguments.like)
    progress = SilentProgress() if arguments.quiet else TerminalProgress()
    try:
        work = replay(scenario, progress=progress, keep_folder=arguments.logs)
        return asyncio.run(_ended_by_sigterm(work))
    finally:
        progress.close()


def _simulate(scenario: Scenario, like: Path | None) -> RunReport:
    if like is None:
        return simulate(scenario)
    real = load_report(like)
    cost = costs_from(real, scenario.cost)
    report = simulate(dataclasses.replace(scenario, cost=cost))
    print(prediction_text(predictions(report, real)) + "\n")
    return report


async def _ended_by_sigterm(work: Coroutine[object, object, RunReport]) -> RunReport:
    """Run, and end in order when the process is told to end, as it does on Ctrl-C."""
    task = asyncio.create_task(work)
    with contextlib.suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _write(report: RunReport, arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        arguments.json.write_text(to_json(report), encoding="utf-8")
    if arguments.csv is not None:
        arguments.csv.write_text(csv_text(report), encoding="utf-8")
    if arguments.html is not None:
        arguments.html.write_text(html_page(report), encoding="utf-8")
    print(terminal_table(report))
    for path in (arguments.json, arguments.csv, arguments.html):
        if path is not None:
            print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
