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
from wire.aio.faults import Fault, FaultKind, Noise
from wire.aio.memory import MemoryBroker, MemoryTransport
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
from wire.aio.virtual_time import NothingToWaitFor, VirtualTimeLoop, run_in_virtual_time

__all__ = [
    "AuthorizationFailed",
    "ConnectError",
    "ConnectionChange",
    "Fault",
    "FaultKind",
    "MemoryBroker",
    "MemoryTransport",
    "Message",
    "MessageTooLarge",
    "NatsOptions",
    "NatsServer",
    "NatsTransport",
    "NoResponders",
    "Noise",
    "NotConnected",
    "NothingToWaitFor",
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
    "VirtualTimeLoop",
    "find_server_binary",
    "run_in_virtual_time",
]
