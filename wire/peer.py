"""Heartbeats and silence, the same at both ends.

Owns when to speak and when the other end counts as silent or lost. Invariant: while the transport is
down, nothing counts against the peer. Must not know: what is spoken.
"""

from __future__ import annotations

from wire.events import PeerBack, PeerLost, PeerSilent

HEARTBEAT_S = 1.0
SILENT_AFTER_S = 3.0
"""Three heartbeats: then the agent looks for another worker."""
LOST_AFTER_S = 60.0
"""Above the longest outage that a session lives through, 30 s, and a reconnect."""
FIRST_FRAME_S = 5.0
"""A peer that never said a word does not know of the session: its answer was lost."""


class PeerClock:
    """Says when a heartbeat is due and whether the peer is alive."""

    def __init__(
        self, *, now: float, lost_after_s: float, first_frame_s: float = FIRST_FRAME_S
    ) -> None:
        self.is_connected = True
        self._lost_after_s = lost_after_s
        self._first_frame_s = min(first_frame_s, lost_after_s)
        self._has_heard = False
        self._last_heard_s = now
        self._heartbeat_at_s = now + HEARTBEAT_S
        self._is_silent = False

    def on_heard(self, *, now: float) -> PeerBack | None:
        """Take in that a frame of the peer arrived."""
        self._last_heard_s = now
        self._has_heard = True
        was_silent, self._is_silent = self._is_silent, False
        return PeerBack() if was_silent else None

    def on_spoke(self, *, now: float) -> None:
        """Take in that this end sent something."""
        self._heartbeat_at_s = now + HEARTBEAT_S

    def speak_up(self, *, now: float) -> None:
        """Make the next heartbeat due now."""
        self._heartbeat_at_s = now

    def on_connection(self, *, is_up: bool, now: float) -> None:
        """Take in that the transport went down or came back."""
        self.is_connected = is_up
        if is_up:
            self._last_heard_s = now
            self._heartbeat_at_s = now

    def is_heartbeat_due(self, *, now: float) -> bool:
        """Whether this end has been quiet for too long."""
        return self.is_connected and now >= self._heartbeat_at_s

    def check(self, *, now: float) -> PeerSilent | PeerLost | None:
        """Return what the peer's silence has come to, once per change."""
        if not self.is_connected:
            return None
        # The same sums as in next_timer: a difference may round to less than the timer was set to.
        if now >= self._last_heard_s + self._limit_s:
            return PeerLost(silent_s=now - self._last_heard_s)
        if now >= self._last_heard_s + SILENT_AFTER_S and not self._is_silent:
            self._is_silent = True
            return PeerSilent(since_s=self._last_heard_s)
        return None

    def next_timer(self) -> float | None:
        """When to look again."""
        if not self.is_connected:
            return None
        silence_s = self._limit_s if self._is_silent else min(SILENT_AFTER_S, self._limit_s)
        return min(self._heartbeat_at_s, self._last_heard_s + silence_s)

    @property
    def _limit_s(self) -> float:
        return self._lost_after_s if self._has_heard else self._first_frame_s
