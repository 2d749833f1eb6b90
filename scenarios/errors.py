"""Errors of the scenarios room; every one names the thing that is wrong.

Invariant: whatever a user hands in (a trace, a scenario, a text, an answer of a program) ends, when
it is bad, in one of these with one sentence. Must not know: how an error is shown.
"""

from __future__ import annotations

from pathlib import Path


class ScenarioError(ValueError):
    """Root of the errors of this room."""


class TraceError(ScenarioError):
    """Capacity over time that no link can follow."""


class FileFormatError(ScenarioError):
    """A file that is not what its format promises; names file and line."""

    def __init__(self, path: Path | str, line: int | None, problem: str) -> None:
        self.path = str(path)
        self.line = line
        self.problem = problem
        place = self.path if line is None else f"{self.path}, line {line}"
        super().__init__(f"{place}: {problem}")


class ScenarioConfigError(ScenarioError):
    """A scenario file with an unknown key or a bad value; names the key."""

    def __init__(self, source: Path | str, key: str | None, problem: str) -> None:
        self.source = str(source)
        self.key = key
        self.problem = problem
        place = self.source if key is None else f"{self.source}: {key}"
        super().__init__(f"{place}: {problem}")


class ReplayError(ScenarioError):
    """A program of a scenario did not start, died, or answered what it must not."""


class ReportError(ScenarioError):
    """A report file that cannot be read, or two that cannot be compared."""
