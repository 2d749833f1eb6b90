"""The TCP connection below the NATS client, tuned each time it is made.

Owns the socket options, and the rule that nothing secret goes out in the clear when TLS is asked for.
Must not know: subjects, sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

NOTSENT_LOWAT_BYTES = 16 * 1024
"""Unsent bytes the kernel keeps: what waits in our own hands can still be given up.
Source: design note on the transport, measured with a 20 Mbit/s link."""
_TCP_NOTSENT_LOWAT = 25
"""Linux' number; the ``socket`` module names it only from Python 3.12 on."""
CONGESTION_CONTROL = b"cubic"
"""The kernel's BBR lost thousands of packets on a short queue; the pace is set by our window anyway."""


class TlsMissing(ConnectionError):
    """The server does not offer the TLS that was asked for."""


class TunedTcpTransport(TcpTransport):
    """The client library's TCP transport with our socket options."""

    def __init__(self, *, must_use_tls: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # the library's own
        self._must_use_tls = must_use_tls
        self._is_tls = False
        self.drained = asyncio.Event()
        """Set whenever what was written has left the process."""

    def __bool__(self) -> bool:
        # The library makes its own transport in place of a false one, and ours is false by its
        # measure until it is connected.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect and set the options; called again for each reconnect."""
        self._is_tls = False
        await super().connect(uri, buffer_size, connect_timeout)
        writer = self._io_writer
        assert writer is not None
        tune(writer.get_extra_info("socket"))

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        """Go on with TLS."""
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self._is_tls = True

    def write(self, payload: bytes) -> None:
        """Write, but no credentials without the TLS that was asked for."""
        if self._must_use_tls and not self._is_tls:
            raise TlsMissing("the server does not offer TLS, and this client insists on it")
        super().write(payload)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close; harmless when it never was open."""
        super().close()  # type: ignore[no-untyped-call]

    async def drain(self) -> None:
        """Wait until what was written has left the process."""
        await super().drain()  # type: ignore[no-untyped-call]
        self.drained.set()


def tune(sock: Any) -> None:
    """Set the options that this platform has; ``sock`` is a socket or uvloop's stand-in for one."""
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    congestion = getattr(socket, "TCP_CONGESTION", None)
    if congestion is not None:
        # A kernel without cubic, or a container that may not choose, keeps its own.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, congestion, CONGESTION_CONTROL)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
