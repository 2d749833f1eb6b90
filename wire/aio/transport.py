"""The seam between sessions and brokers: what a shell may ask of any transport.

Owns the ``Transport`` Protocol. A transport is one connection; an agent and a worker hold two each, one
for data and one for control, so that control never waits behind data. Invariants of every
implementation: a message is delivered at most once and may be lost, in particular while the connection
changes (sessions make up for it); messages of one connection to one subject keep their order;
``publish`` holds back instead of buffering without bound; every call can be cancelled.
Must not know: sessions, frames.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from wire.aio.errors import TransportError


class ConnectionChange(enum.Enum):
    """What became of the connection."""

    DOWN = "down"
    """Nothing can be sent; what was under way may be lost."""
    UP = "up"
    """It is back: tell each session, so that it asks what was lost."""
    FAILED = "failed"
    """It is lost for good; ``Transport.failure`` has the reason."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message from the broker."""

    subject: str
    data: bytes
    reply: str = ""
    """Subject for the answer; empty when none is wanted."""


OnMessage = Callable[[Message], None]
"""Called on the event loop's thread for each message, in order; must not block."""
OnChange = Callable[[ConnectionChange], None]
"""Called on the event loop's thread."""


class Subscription(Protocol):
    """Interest in a subject."""

    async def unsubscribe(self) -> None:
        """End it; no message comes after this returns. Harmless when the connection is gone."""


class Transport(Protocol):
    """One connection to a broker."""

    @property
    def max_payload(self) -> int:
        """Largest message. Unit: bytes."""

    @property
    def is_connected(self) -> bool:
        """Whether a message can be sent now."""

    @property
    def failure(self) -> TransportError | None:
        """Why the transport is of no use any more; None while it is."""

    @property
    def inbox(self) -> str:
        """Subject prefix on which this client may listen: the ``inbox`` of an ``Open``."""

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Hand a message over; returns when there is room for the next one.

        Raises:
            NotConnected: the connection is down; the message was not sent, a session makes up for it.
            MessageTooLarge: above ``max_payload``.
            TransportError: the transport failed for good, or was closed.
        """

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Publish, and wait for the first answer.

        Raises:
            NoResponders: nobody listens there, which the broker says at once.
            RequestTimeout: no answer in time.
            TransportError: as ``publish``.
        """

    async def subscribe(
        self, subject: str, on_message: OnMessage, *, queue: str = ""
    ) -> Subscription:
        """Receive what is published on a subject; the broker knows of it when this returns.

        Holds over reconnects.

        Args:
            subject: may hold ``*`` for one part, and end in ``.>`` for all that follow.
            on_message: called for each message.
            queue: each message goes to one member of the queue group only.

        Raises:
            TransportError: the broker did not take it.
        """

    def watch(self, on_change: OnChange) -> Callable[[], None]:
        """Hear of every change of the connection; the returned function ends it."""

    async def ping(self, *, timeout_s: float) -> float:
        """Go to the broker and back; return the time it took. Unit: seconds.

        Tells a dead peer from a dead link: when a session reports ``PeerSilent`` and this fails, it is
        the link.

        Raises:
            RequestTimeout: the broker does not answer.
            TransportError: as ``publish``.
        """

    async def close(self) -> None:
        """Send what is pending, if that is quick, and end everything."""
