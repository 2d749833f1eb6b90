"""Errors of the wire protocol.

Owns the room's error tree. A local error is our own misuse, a remote one is the peer's bytes; an
illegal input leaves a session as it was. Must not know: NATS (see ``wire.aio``).
"""

from __future__ import annotations


class WireError(Exception):
    """Root of the room."""


class LocalProtocolError(WireError):
    """This side asked a session for something that its state does not allow."""


class RemoteProtocolError(WireError):
    """The peer sent bytes that are not the protocol, or that its state does not allow."""


class FrameError(RemoteProtocolError):
    """A message is not a frame of ours, or was damaged on its way."""


class MessageError(RemoteProtocolError):
    """The body of a frame has a missing, unknown or impossible field."""

    def __init__(self, message: str, *, where: str, field: str) -> None:
        super().__init__(f"{where}: {field}: {message}")
        self.where = where
        """Name of the message."""
        self.field = field
        """Name of the field."""


class PayloadTooLarge(LocalProtocolError):
    """A frame would be larger than the server takes."""

    def __init__(self, what: str, *, size_bytes: int, max_payload: int) -> None:
        super().__init__(f"{what} is {size_bytes} bytes, the server takes {max_payload}")
        self.size_bytes = size_bytes
        self.max_payload = max_payload
