"""Moving frames: the transport's seam, NATS behind it, and a fake with faults beside it."""

from __future__ import annotations

from wire.aio.errors import (
    AuthorizationFailed,
    ConnectError,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    PermissionDenied,
    RequestTimeout,
    SendError,
    ServerStartError,
    TransportClosed,
    TransportError,
)
from wire.aio.nats_options import NatsOptions
from wire.aio.nats_transport import NatsTransport
from wire.aio.server import NatsServer, find_server_binary
from wire.aio.transport import (
    ConnectionChange,
    Message,
    OnChange,
    OnMessage,
    Subscription,
    Transport,
)

__all__ = [
    "AuthorizationFailed",
    "ConnectError",
    "ConnectionChange",
    "Message",
    "MessageTooLarge",
    "NatsOptions",
    "NatsServer",
    "NatsTransport",
    "NoResponders",
    "NotConnected",
    "OnChange",
    "OnMessage",
    "PermissionDenied",
    "RequestTimeout",
    "SendError",
    "ServerStartError",
    "Subscription",
    "Transport",
    "TransportClosed",
    "TransportError",
    "find_server_binary",
]
