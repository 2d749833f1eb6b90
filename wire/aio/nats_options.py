"""How to reach a NATS server: addresses, credentials, TLS.

Owns what the two programs' settings are turned into. Invariant: no secret shows in a ``repr`` or an
error. Must not know: the client library.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from wire.aio.errors import ConnectError

_SCHEMES = ("nats", "tls", "ws", "wss")


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """One client's way to its broker."""

    url: str = field(repr=False)
    """One URL or several, separated by commas: ``nats://host:4222``; ``tls://`` insists on TLS.
    ``nats://user:password@host`` and ``nats://token@host`` log in."""
    name: str = "kvtide"
    """Shown in the server's monitoring."""
    inbox: str = ""
    """Subject prefix for answers to this client; the user's permissions name it. Empty: a random one."""
    token: str = field(default="", repr=False)
    creds_file: Path | None = None
    """JWT and nkey seed, as ``nsc`` writes them."""
    nkey_file: Path | None = None
    """Seed of an nkey user."""
    ca_file: Path | None = None
    """PEM of the authority that signed the server's certificate; insists on TLS."""
    cert_file: Path | None = None
    """PEM of this client's certificate, where the server verifies clients."""
    key_file: Path | None = None
    connect_timeout_s: float = 5.0
    """Time for the first connection; later ones are tried for ever."""

    @property
    def servers(self) -> list[str]:
        """The URLs, without user names and passwords."""
        return [_without_login(part.strip()) for part in self.url.split(",") if part.strip()]

    @property
    def login(self) -> tuple[str, str]:
        """User name and password from the first URL that has them; a token has no password.

        They hold for every node of a cluster, also those that only the cluster names.
        """
        for part in self.url.split(","):
            parts = urlsplit(part.strip())
            if parts.username:
                return unquote(parts.username), unquote(parts.password or "")
        return "", ""

    @property
    def wants_tls(self) -> bool:
        """Whether a connection without TLS must not be used."""
        is_secure = any(urlsplit(server).scheme in ("tls", "wss") for server in self.servers)
        return is_secure or any((self.ca_file, self.cert_file, self.key_file))

    @property
    def is_websocket(self) -> bool:
        """Whether the servers are reached over WebSocket."""
        return any(urlsplit(server).scheme in ("ws", "wss") for server in self.servers)

    @property
    def address(self) -> str:
        """The URLs as text, for messages."""
        return ",".join(self.servers)

    def check(self) -> None:
        """Look at what can be judged without a network.

        Raises:
            ConnectError: a URL or a file cannot be used.
        """
        if not self.servers:
            raise ConnectError("no broker URL is set")
        for server in self.servers:
            parts = urlsplit(server)
            if parts.scheme not in _SCHEMES or not parts.hostname:
                raise ConnectError(f"broker URL {server!r} must be like nats://host:4222")
        for path in (
            self.creds_file, self.nkey_file, self.ca_file, self.cert_file, self.key_file
        ):  # fmt: skip
            if path is not None and not path.is_file():
                raise ConnectError(f"file {path} for the broker's connection does not exist")

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS settings that verify the server's certificate and name; None without TLS.

        Raises:
            ConnectError: a PEM file cannot be read.
        """
        if not self.wants_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(f"TLS files for the broker cannot be used: {error}") from error
        return context


def _without_login(url: str) -> str:
    head, sep, rest = url.partition("://")
    return head + sep + rest.rpartition("@")[2]
