"""Paired timing: every candidate and its baseline in one process, in turn, on the same data."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Timing", "machine_lines", "time_interleaved"]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one candidate took."""

    name: str
    median_s: float
    ratio: float
    """Median over rounds of this candidate's time over the baseline's in the same round."""

    ratio_low: float
    ratio_high: float
    """Quartiles of the same."""

    rounds: int


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run all candidates once per round, in turn, after one round that is not counted.

    Args:
        candidates: name to function; results are thrown away.
        baseline: the name that ratios refer to.
        rounds: at least 3.
        clock: seconds.
    """
    if rounds < 3:
        raise ValueError(f"{rounds} rounds give no spread; at least 3")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = clock()
            run()
            if number > 0:
                times[name].append(clock() - start)
    out = {}
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        out[name] = Timing(name, statistics.median(taken), middle, low, high, rounds)
    return out


def machine_lines(*packages: str) -> list[str]:
    """Describe what the figures were made on: machine, load, versions, commit."""
    versions = " ".join(f"{name} {metadata.version(name)}" for name in packages)
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607 - whichever git there is
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    load = os.getloadavg()[0]
    return [
        f"machine: {_processor()}, {os.cpu_count()} cores, load {load:.1f}, {platform.platform()}",
        f"python {platform.python_version()} {versions}, commit {commit}",
    ]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
