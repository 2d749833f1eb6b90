"""Memory of all open sessions: granted before it is used, so that no agent can overfill the worker.

Pure arithmetic. Invariant: the sum of all grants never exceeds the total, and what a session may
make the worker hold is part of its grant: its KV cache, its window, the chunks that are being put
together or decoded, and the bitstreams that are kept to be refined.
"""

from __future__ import annotations

from dataclasses import dataclass

from cloud_worker.errors import NoMemory


@dataclass(frozen=True, slots=True)
class SessionNeed:
    """What one session may make the worker hold. Unit: bytes."""

    cache_bytes: int
    """KV cache of context, question and answer, preallocated."""
    window_bytes: int
    """Frames that may be in flight or unread."""
    chunk_bytes: int
    """Bitstreams being received or waiting for the decoder, and the decoder's output."""

    base_bytes: int = 0
    """Decoded bitstreams that are kept so that they can be refined."""

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.window_bytes + self.chunk_bytes + self.base_bytes


class MemoryBudget:
    """Grants memory to sessions by id."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._grants: dict[str, SessionNeed] = {}

    @property
    def reserved_bytes(self) -> int:
        """Sum of all grants."""
        return sum(need.total_bytes for need in self._grants.values())

    @property
    def cache_bytes(self) -> int:
        """The part of the grants that is KV cache."""
        return sum(need.cache_bytes for need in self._grants.values())

    def reserve(self, session_id: str, need: SessionNeed) -> None:
        """Grant memory to a session.

        Raises:
            NoMemory: it does not fit now, or never will.
            ValueError: the session holds a grant already.
        """
        if session_id in self._grants:
            raise ValueError(f"session {session_id} holds memory already")
        free_bytes = self.total_bytes - self.reserved_bytes
        if need.total_bytes > free_bytes:
            raise NoMemory(
                needed_bytes=need.total_bytes, free_bytes=free_bytes, total_bytes=self.total_bytes
            )
        self._grants[session_id] = need

    def release(self, session_id: str) -> None:
        """Take a session's grant back; releasing twice does nothing."""
        self._grants.pop(session_id, None)
