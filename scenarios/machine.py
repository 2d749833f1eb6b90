"""Which code on which machine a figure comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent
_GIT_TIMEOUT_S = 10.0


def version() -> str:
    """Return the installed version of kvtide, or `unknown` in a bare checkout."""
    try:
        return importlib.metadata.version("kvtide")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """Return the checkout's commit, with `+` when tracked files differ; empty where there is none."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_HOME), *arguments],  # noqa: S607 - git is looked up on the path
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def describe() -> str:
    """Return processor, cores, system and Python in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{model}, {usable} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )
