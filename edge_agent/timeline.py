"""What happened during one request, and when: the ``kvtide`` object of an answer.

Pure records; times come in as monotonic seconds and go out relative to the request's arrival at the
agent. Must not know: wire, planner, HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_DELIVERY_POINTS = 500
"""Delivery samples in an answer without ``trace``: enough for a plot, small enough for every answer."""


@dataclass(slots=True)
class ChunkRecord:
    """One chunk's way to the worker; times in seconds since arrival, None where it did not happen."""

    index: int
    token_start: int
    token_stop: int
    choice: str = ""
    """Level name, ``text`` for recompute, ``have`` where the worker had it already."""
    num_bytes: int = 0
    """Bytes of the bitstream that was sent last; 0 for text."""
    epoch: int = 0
    """Attempts before this one."""
    send_start_s: float | None = None
    acked_s: float | None = None
    decode_start_s: float | None = None
    decode_end_s: float | None = None
    ready_s: float | None = None
    """When the chunk was in the worker's KV cache."""


@dataclass(slots=True)
class Timeline:
    """Collects one request's times."""

    arrived_at: float
    """Monotonic time of the request's arrival. Unit: seconds."""
    session: str
    policy: str
    estimator: str
    deadline_s: float
    worker: str = ""
    backend: str = ""
    claimed_s: float | None = None
    chunks: list[ChunkRecord] = field(default_factory=list)
    question_sent_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_payload_bytes: int = 0
    """Chunk bytes handed to the transport, abandoned ones included."""
    num_resent_bytes: int = 0
    delivery: list[tuple[float, float]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    worker_changes: int = 0
    evaluation: dict[str, Any] | None = None

    def since_arrival(self, now: float) -> float:
        """Convert a monotonic time to seconds since arrival."""
        return now - self.arrived_at

    def delivered(self, now: float, bytes_per_s: float) -> None:
        """Record one delivery-rate sample."""
        self.delivery.append((self.since_arrival(now), bytes_per_s))

    def token(self, now: float) -> None:
        """Record the arrival of an answer token."""
        at = self.since_arrival(now)
        if self.first_token_s is None:
            self.first_token_s = at
        self.last_token_s = at

    @property
    def is_slo_met(self) -> bool:
        """Whether the first token came within the deadline."""
        return self.first_token_s is not None and self.first_token_s <= self.deadline_s

    def to_json(self, *, trace: bool) -> dict[str, Any]:
        """Build the ``kvtide`` object.

        Args:
            trace: give all delivery samples and each decision's candidates, not a digest.
        """
        points = self.delivery
        if not trace and len(points) > MAX_DELIVERY_POINTS:
            step = len(points) / MAX_DELIVERY_POINTS
            points = [points[int(i * step)] for i in range(MAX_DELIVERY_POINTS)]
        decisions = (
            self.decisions
            if trace
            else [{k: v for k, v in d.items() if k != "candidates"} for d in self.decisions]
        )
        return {
            "session": self.session,
            "worker": self.worker,
            "backend": self.backend,
            "policy": self.policy,
            "estimator": self.estimator,
            "deadline_s": self.deadline_s,
            "ttft_s": _rounded(self.first_token_s),
            "slo_met": self.is_slo_met,
            "claimed_s": _rounded(self.claimed_s),
            "bytes_sent": self.num_payload_bytes,
            "bytes_resent": self.num_resent_bytes,
            "chunks": [_chunk_json(chunk) for chunk in self.chunks],
            "question_sent_s": _rounded(self.question_sent_s),
            "prefill_start_s": _rounded(self.prefill_start_s),
            "prefill_end_s": _rounded(self.prefill_end_s),
            "first_token_s": _rounded(self.first_token_s),
            "last_token_s": _rounded(self.last_token_s),
            "delivery": [[_rounded(at), round(rate)] for at, rate in points],
            "decisions": decisions,
            "worker_changes": self.worker_changes,
            "evaluation": self.evaluation,
        }


def _chunk_json(chunk: ChunkRecord) -> dict[str, Any]:
    return {
        "index": chunk.index,
        "token_start": chunk.token_start,
        "token_stop": chunk.token_stop,
        "choice": chunk.choice,
        "bytes": chunk.num_bytes,
        "epoch": chunk.epoch,
        "send_start_s": _rounded(chunk.send_start_s),
        "acked_s": _rounded(chunk.acked_s),
        "decode_start_s": _rounded(chunk.decode_start_s),
        "decode_end_s": _rounded(chunk.decode_end_s),
        "ready_s": _rounded(chunk.ready_s),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
