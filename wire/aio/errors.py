"""Errors of the transport, the same for every implementation.

Owns the tree below ``TransportError``. Invariant: no error type of a broker's client library leaves
``wire.aio``. Must not know: which broker.
"""

from __future__ import annotations

from wire.errors import WireError


class TransportError(WireError):
    """Root of the transport's errors."""


class ConnectError(TransportError):
    """The broker cannot be reached, or does not speak as it should."""


class AuthorizationFailed(ConnectError):
    """The broker does not let this client in."""


class PermissionDenied(TransportError):
    """The broker lets this client in, but not on this subject; no retry helps."""

    def __init__(self, operation: str, subject: str) -> None:
        super().__init__(
            f"the broker denies this client {operation} {subject!r}: "
            "check tenant, inbox and the user's permissions"
        )
        self.operation = operation
        """``publish to`` or ``subscribe to``."""
        self.subject = subject
        """As the client library tells it: in lower case."""


class SendError(TransportError):
    """A message could not be handed over."""


class NotConnected(SendError):
    """The connection is down; the message was not sent and will not be."""


class TransportClosed(SendError):
    """The transport was closed."""


class MessageTooLarge(SendError):
    """The broker would close the connection over this message."""

    def __init__(self, *, size_bytes: int, max_payload: int) -> None:
        super().__init__(f"a message of {size_bytes} bytes, the broker takes {max_payload}")
        self.size_bytes = size_bytes
        self.max_payload = max_payload


class NoResponders(TransportError):
    """Nobody listens on the subject of a request."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody listens on {subject!r}")
        self.subject = subject


class RequestTimeout(TransportError):
    """A request, or a look at the broker, was not answered in time."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what} was not answered within {timeout_s:g} s")
        self.timeout_s = timeout_s


class ServerStartError(TransportError):
    """The embedded server does not start; the sentence has its last words."""
