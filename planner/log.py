"""Decisions as plain data: one JSON object a line, to be read by people and played again.

Invariant: what `decision_record` writes, `read_decisions` reads; no infinity and no NaN in it, for
JSON has neither. Must not know: files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import PlannerError
from planner.model import Decision, Reason, TransferState


class InvalidLog(PlannerError):
    """A decision log that cannot be read."""


@dataclass(frozen=True, slots=True)
class LoggedCandidate:
    """A choice that a decision had."""

    choice: str
    num_bytes: int
    decode_s: float
    prefill_s: float
    loss: float | None
    """None: nobody measured it."""


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A decision as it was logged."""

    at_s: float
    """Since the request's arrival."""
    chunk: int
    choice: str
    reason: str
    abandons: bool
    meets_deadline: bool
    expected_ttft_s: float | None
    rate_bytes_per_s: float | None
    candidates: tuple[LoggedCandidate, ...]
    plan: Mapping[int, str]


def decision_record(decision: Decision, state: TransferState) -> dict[str, Any]:
    """Build the record of a decision: what was known, what could be chosen, what was and why."""
    first = state.chunks[0].options.index if state.chunks else 0
    options = state.chunks[decision.chunk_index - first].options
    return {
        "at_s": round(state.elapsed_s, 6),
        "deadline_s": state.deadline_s,
        "chunk": decision.chunk_index,
        "choice": decision.choice.name,
        "reason": decision.reason.value,
        "abandons": decision.abandons,
        "meets_deadline": decision.meets_deadline,
        "expected_ttft_s": _finite(decision.expected_ttft_s),
        "ttft_quantiles": [[q, _finite(value)] for q, value in decision.ttft_quantiles],
        "rate_bytes_per_s": _finite(decision.rate_bytes_per_s),
        "expected_loss": _finite(decision.expected_loss),
        "plan": {str(chunk): name for chunk, name in decision.plan.items()},
        "candidates": [
            {
                "choice": choice.name,
                "bytes": choice.num_bytes,
                "decode_s": round(choice.decode_s, 6),
                "prefill_s": round(choice.prefill_s, 6),
                "loss": _finite(choice.loss),
            }
            for choice in options.choices
        ],
    }


def to_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Write records one a line, keys in order, so that equal logs are equal bytes."""
    return "".join(
        json.dumps(record, allow_nan=False, separators=(",", ":"), sort_keys=True) + "\n"
        for record in records
    )


def read_decisions(text: str) -> list[LoggedDecision]:
    """Read decisions: JSON lines, a JSON list, an answer of the agent, or the agent's own log.

    Raises:
        InvalidLog: it is none of these; the message names the line and the field.
    """
    rows = _rows(text)
    return [_decision(row, number) for number, row in enumerate(rows, start=1)]


def _rows(text: str) -> Sequence[Any]:
    stripped = text.strip()
    if not stripped:
        raise InvalidLog("the decision log is empty")
    try:
        whole = json.loads(stripped)
    except json.JSONDecodeError:
        rows = []
        for number, line in enumerate(stripped.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise InvalidLog(f"line {number} of the decision log is not JSON") from error
        return _of_program_log(rows)
    for key in ("kvtide", "decisions"):
        if isinstance(whole, dict) and key in whole:
            whole = whole[key]
    if isinstance(whole, dict):
        return [whole]
    if not isinstance(whole, list):
        raise InvalidLog("the decision log is neither lines, nor a list, nor an answer")
    return whole


def _of_program_log(rows: Sequence[Any]) -> Sequence[Any]:
    """Pick the decisions out of a program's log, where each is the `decision` of an event."""
    if not all(isinstance(row, dict) and "event" in row for row in rows):
        return rows
    decisions = [row["decision"] for row in rows if "decision" in row]
    if not decisions:
        raise InvalidLog("the log holds no decision; the agent logs them at level debug")
    return decisions


def _decision(row: Any, number: int) -> LoggedDecision:
    if not isinstance(row, dict):
        raise InvalidLog(f"decision {number} is not an object")

    def field(name: str, kind: type | tuple[type, ...]) -> Any:
        value = row.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidLog(f"decision {number} has {name} {value!r}")
        return value

    def number_or_none(name: str) -> float | None:
        value = row.get(name)
        return None if value is None else float(field(name, (int, float)))

    candidates = []
    for entry in row.get("candidates") or []:
        try:
            loss = entry["loss"]
            candidates.append(
                LoggedCandidate(
                    choice=str(entry["choice"]),
                    num_bytes=int(entry["bytes"]),
                    decode_s=float(entry["decode_s"]),
                    prefill_s=float(entry["prefill_s"]),
                    loss=None if loss is None else float(loss),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidLog(f"decision {number} has a candidate that lacks a field") from error
    reason = field("reason", str)
    if reason not in {known.value for known in Reason}:
        raise InvalidLog(f"decision {number} has the unknown reason {reason!r}")
    plan = row.get("plan") or {}
    if not isinstance(plan, dict) or not all(str(chunk).isdigit() for chunk in plan):
        raise InvalidLog(f"decision {number} has a plan that is not chunk numbers to names")
    return LoggedDecision(
        at_s=float(field("at_s", (int, float))),
        chunk=field("chunk", int),
        choice=field("choice", str),
        reason=reason,
        abandons=bool(row.get("abandons", False)),
        meets_deadline=bool(row.get("meets_deadline", True)),
        expected_ttft_s=number_or_none("expected_ttft_s"),
        rate_bytes_per_s=number_or_none("rate_bytes_per_s"),
        candidates=tuple(candidates),
        plan={int(chunk): str(name) for chunk, name in plan.items()},
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
