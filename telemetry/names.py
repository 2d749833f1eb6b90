"""Every metric and every log event of the product, in one place.

Invariants: a metric is named ``kvtide_<room>_<noun>_<unit>`` in base units, a counter ends in
``_total``, and a label takes its values from a closed set that is written here, never an id.
Must not know: prometheus-client, structlog, any program.

Source: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Event(enum.StrEnum):
    """Names of log events; a shell logs nothing under another name."""

    # Life of a process, both programs.
    STARTING = "starting"
    LISTENING = "listening"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    MODEL_LOADED = "model.loaded"
    BROKER_CONNECTED = "broker.connected"
    BROKER_DISCONNECTED = "broker.disconnected"
    BROKER_RECONNECTED = "broker.reconnected"
    BROKER_ERROR = "broker.error"
    TASK_FAILED = "task.failed"
    LIBRARY = "library"
    # The agent.
    INGEST_STARTED = "ingest.started"
    INGEST_COMPLETE = "ingest.complete"
    INGEST_FAILED = "ingest.failed"
    REQUEST_STARTED = "request.started"
    TRANSFER_DONE = "transfer.done"
    DECISION = "plan.decision"
    CONTEXT_DELETED = "context.deleted"
    CONTEXT_EVICTED = "context.evicted"
    CHUNK_QUARANTINED = "chunk.quarantined"
    UPLINK_FORGOTTEN = "uplink.forgotten"
    WORKER_LOST = "worker.lost"
    WORKER_REPLACED = "worker.replaced"
    HTTP_ERROR = "http.error"
    # The worker.
    CALIBRATION_COMPLETE = "calibration.complete"
    SESSION_OPENED = "session.opened"
    SESSION_REFUSED = "session.refused"
    SESSION_DONE = "session.done"
    CHUNK_DECODED = "chunk.decoded"
    CHUNK_PREFILLED = "chunk.prefilled"
    CHUNK_CORRUPT = "chunk.corrupt"
    EVALUATION_COMPLETE = "evaluation.complete"
    EVALUATION_FAILED = "evaluation.failed"


class Label(enum.Enum):
    """Label names with the closed set of values that each may take."""

    LEVEL = (
        "level",
        (
            "fp16",
            "int8",
            "text",
            *(f"{level_set}:{index}" for level_set in ("cachegen", "klt") for index in range(16)),
            *(f"klt:{index + 2}>{index}" for index in range(14)),
            "other",
        ),
    )
    OUTCOME = ("outcome", ("ok", "cancelled", "refused", "timeout", "failed"))
    REASON = (
        "reason",
        (
            "identity_mismatch",
            "profile_mismatch",
            "key_mismatch",
            "context_too_long",
            "no_memory",
            "busy",
            "draining",
            "bad_request",
            "other",
        ),
    )
    STAGE = ("stage", ("tokenize", "prefill", "encode", "store"))
    POLICY = ("policy", ("text", "fixed", "cachegen", "kvtide", "other"))
    BACKEND = ("backend", ("cpu", "cuda"))
    METHOD = ("method", ("GET", "POST", "DELETE", "other"))
    STATUS = ("status", ("2xx", "3xx", "4xx", "5xx"))

    def __init__(self, label: str, allowed: tuple[str, ...]) -> None:
        self.label = label
        self.allowed = allowed


def level_label(level: str) -> str:
    """Return the value of the ``level`` label for a level's name; unknown ones are ``other``."""
    return level if level in Label.LEVEL.allowed else "other"


class MetricKind(enum.Enum):
    """The three Prometheus instruments that the product uses."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: name, meaning and shape."""

    name: str
    """Full name in the exposition format, with unit and, for counters, ``_total``."""
    kind: MetricKind
    help: str
    """One line for people, shown by the metrics page."""
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in the unit of the name; empty for the others."""
    has_slo_bucket: bool = False
    """Whether the deadline is added as a bucket, so that attainment can be read off exactly."""


TTFT_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0)
"""Time to first token: from an interactive half second to a hopeless minute. Unit: seconds."""
WORK_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Work on one chunk: 1 ms on a GPU to 10 s on a slow CPU. Unit: seconds."""
INGEST_BUCKETS_S = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
"""Ingest of a whole context. Unit: seconds."""

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# --- worker ---
WORKER_SESSIONS = MetricSpec(
    "kvtide_worker_sessions_total", _C, "Sessions that ended, by outcome.", (Label.OUTCOME,)
)
WORKER_REFUSALS = MetricSpec(
    "kvtide_worker_refusals_total", _C, "Sessions refused at open, by reason.", (Label.REASON,)
)
WORKER_ACTIVE_SESSIONS = MetricSpec(
    "kvtide_worker_active_sessions", _G, "Sessions that are open now."
)
WORKER_MEMORY_RESERVED_BYTES = MetricSpec(
    "kvtide_worker_memory_reserved_bytes",
    _G,
    "Memory granted to open sessions: KV caches, windows and chunks being received.",
)
WORKER_MEMORY_BUDGET_BYTES = MetricSpec(
    "kvtide_worker_memory_budget_bytes", _G, "Memory that sessions may be granted in total."
)
WORKER_CACHE_BYTES = MetricSpec(
    "kvtide_worker_cache_bytes", _G, "KV cache memory held by open sessions."
)
WORKER_TTFT_SECONDS = MetricSpec(
    "kvtide_worker_ttft_seconds",
    _H,
    "Time from the session's acceptance to its first token.",
    buckets=TTFT_BUCKETS_S,
    has_slo_bucket=True,
)
WORKER_RECEIVED_BYTES = MetricSpec(
    "kvtide_worker_received_bytes_total",
    _C,
    "Chunk bytes received and verified, by level.",
    (Label.LEVEL,),
)
WORKER_CHUNKS = MetricSpec(
    "kvtide_worker_chunks_total", _C, "Chunks put into a KV cache, by level.", (Label.LEVEL,)
)
WORKER_CORRUPT_CHUNKS = MetricSpec(
    "kvtide_worker_corrupt_chunks_total",
    _C,
    "Chunks that failed verification or decoding and were asked for again, by level.",
    (Label.LEVEL,),
)
WORKER_DECODE_SECONDS = MetricSpec(
    "kvtide_worker_decode_seconds",
    _H,
    "Time to decode one chunk and write it into the KV cache.",
    (Label.LEVEL,),
    WORK_BUCKETS_S,
)
WORKER_PREFILL_SECONDS = MetricSpec(
    "kvtide_worker_prefill_seconds",
    _H,
    "Time to prefill one text chunk or one question.",
    buckets=WORK_BUCKETS_S,
)
WORKER_PREFILL_TOKENS = MetricSpec(
    "kvtide_worker_prefill_tokens_total", _C, "Tokens prefilled: text chunks and questions."
)
WORKER_GENERATED_TOKENS = MetricSpec(
    "kvtide_worker_generated_tokens_total", _C, "Answer tokens generated."
)
WORKER_QUEUE_DELAY_SECONDS = MetricSpec(
    "kvtide_worker_queue_delay_seconds", _G, "Work that waits ahead of a session opened now."
)
WORKER_EVALUATIONS = MetricSpec(
    "kvtide_worker_evaluations_total", _C, "Shadow evaluations, by outcome.", (Label.OUTCOME,)
)

# --- agent ---
EDGE_REQUESTS = MetricSpec(
    "kvtide_edge_requests_total", _C, "Chat requests that ended, by outcome.", (Label.OUTCOME,)
)
EDGE_HTTP_RESPONSES = MetricSpec(
    "kvtide_edge_http_responses_total",
    _C,
    "HTTP responses, by method and status class.",
    (Label.METHOD, Label.STATUS),
)
EDGE_ACTIVE_REQUESTS = MetricSpec("kvtide_edge_active_requests", _G, "Chat requests that run now.")
EDGE_TTFT_SECONDS = MetricSpec(
    "kvtide_edge_ttft_seconds",
    _H,
    "Time from a request's arrival at the agent to its first token, by policy.",
    (Label.POLICY,),
    TTFT_BUCKETS_S,
    has_slo_bucket=True,
)
EDGE_SLO_VIOLATIONS = MetricSpec(
    "kvtide_edge_slo_violations_total",
    _C,
    "Requests whose first token came after the deadline, by policy.",
    (Label.POLICY,),
)
EDGE_SENT_BYTES = MetricSpec(
    "kvtide_edge_sent_bytes_total", _C, "Chunk bytes sent, by level.", (Label.LEVEL,)
)
EDGE_RESENT_BYTES = MetricSpec(
    "kvtide_edge_resent_bytes_total", _C, "Segment bytes sent again after a loss or a reconnect."
)
EDGE_CHUNKS = MetricSpec(
    "kvtide_edge_chunks_total", _C, "Chunks decided on, by level.", (Label.LEVEL,)
)
EDGE_ABANDONED_CHUNKS = MetricSpec(
    "kvtide_edge_abandoned_chunks_total",
    _C,
    "Chunks abandoned mid-flight for another level, by the level given up.",
    (Label.LEVEL,),
)
EDGE_DELIVERY_BYTES_PER_SECOND = MetricSpec(
    "kvtide_edge_delivery_bytes_per_second", _G, "Latest estimate of the uplink's rate."
)
EDGE_WORKER_LOSSES = MetricSpec(
    "kvtide_edge_worker_losses_total", _C, "Workers that went silent in the middle of a session."
)
EDGE_INGESTS = MetricSpec(
    "kvtide_edge_ingests_total", _C, "Ingests that ended, by outcome.", (Label.OUTCOME,)
)
EDGE_INGEST_SECONDS = MetricSpec(
    "kvtide_edge_ingest_seconds",
    _H,
    "Time of each stage of an ingest.",
    (Label.STAGE,),
    INGEST_BUCKETS_S,
)
EDGE_INGESTED_TOKENS = MetricSpec(
    "kvtide_edge_ingested_tokens_total", _C, "Context tokens ingested and stored."
)
EDGE_ENCODE_SECONDS = MetricSpec(
    "kvtide_edge_encode_seconds",
    _H,
    "Time to encode one chunk at one level.",
    (Label.LEVEL,),
    WORK_BUCKETS_S,
)
EDGE_STORE_BYTES = MetricSpec("kvtide_edge_store_bytes", _G, "Bytes of stored chunk files.")
EDGE_STORE_QUOTA_BYTES = MetricSpec(
    "kvtide_edge_store_quota_bytes", _G, "Bytes of chunk files that the store may keep."
)
EDGE_STORE_CONTEXTS = MetricSpec("kvtide_edge_store_contexts", _G, "Contexts stored.")
EDGE_STORE_EVICTIONS = MetricSpec(
    "kvtide_edge_store_evictions_total", _C, "Contexts evicted to make room."
)
EDGE_CORRUPT_CHUNKS = MetricSpec(
    "kvtide_edge_corrupt_chunks_total",
    _C,
    "Stored chunk files found missing, short or altered, by level.",
    (Label.LEVEL,),
)


def _of_room(room: str) -> tuple[MetricSpec, ...]:
    specs = (value for value in globals().values() if isinstance(value, MetricSpec))
    return tuple(spec for spec in specs if spec.name.startswith(f"kvtide_{room}_"))


WORKER_METRICS: tuple[MetricSpec, ...] = _of_room("worker")
"""All metrics of the worker."""
EDGE_METRICS: tuple[MetricSpec, ...] = _of_room("edge")
"""All metrics of the agent."""
