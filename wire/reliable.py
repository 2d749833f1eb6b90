"""Numbered control messages over a transport that may lose, repeat or reorder.

Owns one direction pair of a session's control lane. Invariant: every message is delivered once and in
order, or the peer is silent. Must not know: what a message says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import Frame, FrameType

RESEND_MIN_S = 0.5
RESEND_MAX_S = 8.0
MAX_AHEAD = 1024
"""Messages that may be on their way, and that are held when they come out of order."""
MAX_UNACKED = 65_536


@dataclass(slots=True)
class _Pending:
    payload: bytes
    due_s: float | None = None
    """When to send it again; None: not sent yet."""
    wait_s: float = RESEND_MIN_S


class ReliableLane:
    """Both directions of the control lane, at one end."""

    def __init__(self, session: bytes) -> None:
        self._session = session
        self._next_sequence = 0
        self._first_unacked = 0
        self._pending: deque[_Pending] = deque()
        self._expected = 0
        self._held: dict[int, bytes] = {}
        self._ack_due = False

    @property
    def is_idle(self) -> bool:
        """Whether the peer has everything."""
        return not self._pending

    def send(self, payload: bytes) -> None:
        """Queue a message."""
        if len(self._pending) >= MAX_UNACKED:
            raise LocalProtocolError(f"{MAX_UNACKED} control messages are unacknowledged")
        self._pending.append(_Pending(payload))
        self._next_sequence += 1

    def receive(self, frame: Frame) -> list[bytes]:
        """Take in a ``MESSAGE`` frame; return the messages that are now in order."""
        self._ack_due = True
        ahead = frame.sequence - self._expected
        if ahead < 0 or frame.sequence in self._held:
            return []
        if ahead >= MAX_AHEAD:
            raise RemoteProtocolError(f"control message is {ahead} ahead of the next one")
        self._held[frame.sequence] = frame.payload
        ready = []
        while self._expected in self._held:
            ready.append(self._held.pop(self._expected))
            self._expected += 1
        return ready

    def on_acked(self, expected: int) -> None:
        """Take in that the peer has every message below ``expected``."""
        if expected > self._next_sequence:
            raise RemoteProtocolError(
                f"peer acknowledges message {expected - 1}, {self._next_sequence} were sent"
            )
        while self._first_unacked < expected:
            self._pending.popleft()
            self._first_unacked += 1

    def frames_to_send(self, *, now: float) -> list[Frame]:
        """Messages that are new or due again, and the acknowledgement if one is owed."""
        frames = []
        for offset, item in zip(range(MAX_AHEAD), self._pending, strict=False):
            if item.due_s is not None and item.due_s > now:
                continue
            if item.due_s is not None:
                item.wait_s = min(2 * item.wait_s, RESEND_MAX_S)
            item.due_s = now + item.wait_s
            frames.append(
                Frame(
                    type=FrameType.MESSAGE,
                    session=self._session,
                    payload=item.payload,
                    sequence=self._first_unacked + offset,
                )
            )
        if self._ack_due:
            frames.append(self.heartbeat())
        return frames

    def heartbeat(self) -> Frame:
        """A frame that says what arrived, and that this end is alive."""
        self._ack_due = False
        return Frame(type=FrameType.HEARTBEAT, session=self._session, sequence=self._expected)

    def resend_all(self) -> None:
        """Make everything unacknowledged due at once, after a reconnect."""
        for item in self._pending:
            if item.due_s is not None:
                item.due_s, item.wait_s = None, RESEND_MIN_S

    def next_timer(self) -> float | None:
        """When a message is due again."""
        return min((item.due_s for item in self._pending if item.due_s is not None), default=None)
