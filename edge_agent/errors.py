"""Every way in which the edge agent says no, each with its HTTP status and a stable code.

The message is one sentence that names the thing. ``http.py`` turns these into responses and
``cli.py`` into exit codes; nothing else decides on a status.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self


class AgentError(Exception):
    """Root of the edge agent's errors."""

    http_status: ClassVar[int] = 500
    """HTTP status that a client sees."""
    code: ClassVar[str] = "internal_error"
    """Stable machine-readable code, listed in docs/errors.md."""
    error_type: ClassVar[str] = "server_error"
    """OpenAI's coarse class: invalid_request_error or server_error."""
    retry_after_s: int = 0
    """Value of Retry-After where trying again may help, else 0. Unit: seconds."""


class ConfigError(AgentError):
    """A setting is unknown or has a bad value; the program exits with code 2."""

    code = "bad_config"


class PortInUse(AgentError):
    """The HTTP address is taken by another program; the program exits with code 3."""

    code = "port_in_use"


class BadRequest(AgentError):
    """The request's body or parameters are not what the API takes."""

    http_status = 400
    code = "bad_request"
    error_type = "invalid_request_error"


class UnknownContext(AgentError):
    """No stored context has this id."""

    http_status = 404
    code = "unknown_context"
    error_type = "invalid_request_error"

    def __init__(self, context_id: str) -> None:
        super().__init__(f"no context with id {context_id!r} is stored at this edge")
        self.context_id = context_id


class ContextConflict(AgentError):
    """A context with this id exists already with other content."""

    http_status = 409
    code = "context_exists"
    error_type = "invalid_request_error"

    def __init__(self, context_id: str) -> None:
        super().__init__(f"context {context_id!r} is stored already with another text or model")
        self.context_id = context_id


class TooLong(AgentError):
    """More tokens than the model's window."""

    http_status = 413
    code = "context_too_long"
    error_type = "invalid_request_error"

    @classmethod
    def of(cls, *, num_tokens: int, limit_tokens: int, what: str) -> Self:
        """Name the thing, its tokens and the limit."""
        return cls(
            f"{what} has {num_tokens} tokens, more than the {limit_tokens} that the model takes"
        )


class MessageTooLarge(AgentError):
    """Context or question do not fit in one message of the broker."""

    http_status = 413
    code = "message_too_large"
    error_type = "invalid_request_error"


class ModelMismatch(AgentError):
    """The worker or the stored context belongs to another model identity."""

    http_status = 409
    code = "model_mismatch"
    error_type = "invalid_request_error"


class NotReady(AgentError):
    """The engine is still loading, or failed to load."""

    http_status = 503
    code = "not_ready"
    retry_after_s = 5


class Draining(AgentError):
    """The agent is stopping and takes no new work."""

    http_status = 503
    code = "draining"
    retry_after_s = 5


class TooBusy(AgentError):
    """As many requests as allowed are running already."""

    http_status = 503
    code = "too_busy"
    retry_after_s = 1


class NoWorker(AgentError):
    """No cloud worker answered, or the broker is away."""

    http_status = 503
    code = "no_worker"
    retry_after_s = 2


class DeadlineRefused(AgentError):
    """The caller asked for its deadline or nothing, and the deadline cannot be met."""

    http_status = 503
    code = "deadline_refused"
    retry_after_s = 1

    def __init__(self, sentence: str, retry_after_s: float) -> None:
        super().__init__(sentence)
        self.retry_after_s = math.ceil(retry_after_s)


class WorkerRefused(AgentError):
    """A worker answered, and refused the session."""

    http_status = 503
    code = "worker_refused"
    retry_after_s = 2


class WorkerLost(AgentError):
    """The worker went silent or reported a failure in the middle of a session."""

    http_status = 502
    code = "worker_lost"
    retry_after_s = 1


class DeadlineExceeded(AgentError):
    """The request's time limit passed before the answer was complete."""

    http_status = 504
    code = "deadline_exceeded"


class StoreError(AgentError):
    """Root of the context store's errors."""

    code = "store_error"


class StoreFull(StoreError):
    """The quota or the disk has no room, and nothing that may be evicted is left."""

    http_status = 507
    code = "store_full"


class StoreIOError(StoreError):
    """The disk failed under the store."""

    code = "store_io_error"


class CorruptChunk(StoreError):
    """A chunk file is missing, short or altered; it is dropped and never served."""

    code = "corrupt_chunk"

    def __init__(self, *, key: bytes, level: str, reason: str) -> None:
        super().__init__(f"stored chunk {key.hex()} at level {level} is unusable: {reason}")
        self.key = key
        self.level = level


class StoreVersionError(StoreError):
    """The store on disk was written by another version of the schema."""

    code = "store_version"


class StoreLocked(StoreError):
    """Another agent has this store open."""

    code = "store_locked"
