"""What the planner can complain about: one root, typed, naming the offending value."""

from __future__ import annotations

from collections.abc import Sequence


class PlannerError(ValueError):
    """Root of every error of this room."""


class _UnknownName(PlannerError):
    """A name that no registry entry answers to."""

    kind = "name"

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"unknown {self.kind} {name!r}; known: {', '.join(known)}")
        self.name = name
        self.known = tuple(known)


class UnknownPolicy(_UnknownName):
    """No policy of that name."""

    kind = "policy"


class UnknownEstimator(_UnknownName):
    """No estimator of that name."""

    kind = "estimator"


class InvalidSample(PlannerError):
    """A delivery sample that cannot be: negative, or not a number."""


class InvalidState(PlannerError):
    """A transfer state or a plan request that contradicts itself."""


class InvalidHistory(PlannerError):
    """A saved prior that was not written by this version."""


class LevelUnavailable(PlannerError):
    """A fixed level that a chunk does not have."""

    def __init__(self, level: str, chunk_index: int, available: Sequence[str]) -> None:
        super().__init__(
            f"level {level!r} is not available for chunk {chunk_index}; it has: {', '.join(available)}"
        )
        self.level = level
        self.chunk_index = chunk_index
        self.available = tuple(available)
