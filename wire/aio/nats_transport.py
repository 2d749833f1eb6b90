"""One connection to a NATS server, as a ``Transport``.

Owns the mapping from the client library to our seam. Invariants: none of its types or errors gets out;
nothing is buffered while the connection is down; a denied permission or login is a failure for good,
with a sentence, though the library only mentions it in a callback. Must not know: sessions, frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from wire.aio._tcp import TlsMissing, TunedTcpTransport
from wire.aio.errors import (
    AuthorizationFailed,
    ConnectError,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    PermissionDenied,
    RequestTimeout,
    SendError,
    TransportClosed,
    TransportError,
)
from wire.aio.nats_options import NatsOptions
from wire.aio.transport import ConnectionChange, Message, OnChange, OnMessage

MAX_UNSENT_BYTES = 1024 * 1024
"""``publish`` waits while the client holds more than this; all sessions of a program share it."""
MAX_UNREAD_BYTES = 64 * 1024 * 1024
"""Per subscription. Grants keep far below it; the library drops messages above."""
PING_INTERVAL_S = 3.0
MAX_PINGS_OUT = 2
"""A connection whose server is silent for 6 to 9 s is made anew: after a long outage the kernel's next
try on the old one may be half a minute away."""
DIAL_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0
GIVE_UP_RETRY_S = 0.05
SUBSCRIBE_TIMEOUT_S = 5.0
_ROOM_POLL_S = 0.005
RETRY_MIN_S = 0.05
RETRY_MAX_S = 2.0
"""Reconnects back off between these, with jitter, so that a fleet does not come back at once."""

_PERMISSION = re.compile(
    r"permissions violation for (publish|subscription) to \"?([^\s\"']+)", re.IGNORECASE
)
_LOGIN = re.compile(r"authorization violation|account authentication expired|user authentication expired", re.IGNORECASE)  # fmt: skip


class _LiveSubscription:
    """A subscription of the client library behind our seam."""

    def __init__(self, inner: NatsSubscription, siblings: set[_LiveSubscription]) -> None:
        self._inner = inner
        self._siblings = siblings
        self.is_over = False
        siblings.add(self)

    async def unsubscribe(self) -> None:
        if not self.is_over:
            self.drop()
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._inner.unsubscribe()

    def drop(self) -> None:
        """Deliver nothing more, whatever the broker still sends."""
        self.is_over = True
        self._siblings.discard(self)
        # The library ends its task only in a close that gets as far as that.
        self._inner._stop_processing()


class NatsTransport:
    """A ``Transport`` over one NATS connection; make it with ``connect``."""

    def __init__(self, options: NatsOptions) -> None:
        self._options = options
        self._client = Client()
        self._watchers: dict[int, OnChange] = {}
        self._num_watchers = 0
        self._failure: TransportError | None = None
        self._last_error = ""
        self._is_closing = False
        self._is_up = False
        self._num_retries = 0
        self._failed = asyncio.Event()
        self._subscriptions: set[_LiveSubscription] = set()
        self._stream = TunedTcpTransport(must_use_tls=options.wants_tls)
        self._inbox = options.inbox or f"_INBOX.{secrets.token_hex(8)}"
        self.num_reconnects = 0
        """Times that the connection came back."""
        self.num_dropped = 0
        """Messages that the client library dropped because nobody took them in time."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str = "kvtide",
        inbox: str = "",
        token: str = "",
        creds_file: Path | None = None,
        nkey_file: Path | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        timeout_s: float = 5.0,
    ) -> NatsTransport:
        """Connect to a broker; later the connection comes back by itself, whatever happens.

        Args:
            url: ``nats://host:port``, or several separated by commas; ``tls://`` insists on TLS.
            name: shown in the server's monitoring.
            inbox: subject prefix for answers to this client; empty takes a random ``_INBOX`` one.
            token: shared secret.
            creds_file: JWT and nkey seed, as ``nsc`` writes them.
            nkey_file: seed of an nkey user.
            ca_file: authority of the server's certificate; insists on TLS.
            cert_file: certificate of this client.
            key_file: key of that certificate.
            timeout_s: time for the first connection.

        Raises:
            AuthorizationFailed: the broker does not take the credentials.
            ConnectError: no broker answers, or its TLS is not what was asked for.
        """
        transport = cls(
            NatsOptions(
                url=url,
                name=name,
                inbox=inbox,
                token=token,
                creds_file=creds_file,
                nkey_file=nkey_file,
                ca_file=ca_file,
                cert_file=cert_file,
                key_file=key_file,
                connect_timeout_s=timeout_s,
            )
        )
        await transport._connect()
        return transport

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    @property
    def is_connected(self) -> bool:
        return self._is_up and self._failure is None

    @property
    def failure(self) -> TransportError | None:
        return self._failure

    @property
    def inbox(self) -> str:
        return self._inbox

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self._check(len(data))
        while self._client.pending_data_size > MAX_UNSENT_BYTES:
            await self._wait_for_room()
            self._check(len(data))
        with self._mapped(subject):
            await self._client.publish(subject, data, reply)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self._check(len(data))
        with self._mapped(subject, timeout_s=timeout_s):
            # Whole round trips are ours to time: the library's own limit would not count the sending.
            async with asyncio.timeout(timeout_s):
                answer = await self._client.request(subject, data, timeout=2 * timeout_s)
        return answer.data

    async def subscribe(
        self, subject: str, on_message: OnMessage, *, queue: str = ""
    ) -> _LiveSubscription:
        live: _LiveSubscription | None = None

        async def deliver(message: Msg) -> None:
            if live is not None and live.is_over:
                return
            try:
                on_message(Message(message.subject, message.data, message.reply))
            except Exception as error:
                # The library would only mention it; a shell that cannot take a message is a bug.
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"the receiver of {subject} failed", "exception": error}
                )

        self._check(0)
        with self._mapped(subject, timeout_s=SUBSCRIBE_TIMEOUT_S):
            inner = await self._client.subscribe(
                subject, queue=queue, cb=deliver, pending_bytes_limit=MAX_UNREAD_BYTES
            )
            live = _LiveSubscription(inner, self._subscriptions)
            # A round trip: afterwards the broker knows it, or has denied it.
            await self._round_trip(SUBSCRIBE_TIMEOUT_S)
        self._check(0)
        return live

    def watch(self, on_change: OnChange) -> Callable[[], None]:
        self._num_watchers += 1
        number = self._num_watchers
        self._watchers[number] = on_change
        return lambda: self._watchers.pop(number, None) and None

    async def ping(self, *, timeout_s: float) -> float:
        self._check(0)
        start_s = time.perf_counter()
        with self._mapped("ping", timeout_s=timeout_s):
            await self._round_trip(timeout_s)
        return time.perf_counter() - start_s

    async def close(self) -> None:
        self._is_closing = True
        self._is_up = False
        # The library waits for a server that may never answer, and for its own back-off.
        with contextlib.suppress(TimeoutError, OSError, nats.errors.Error):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()
        for subscription in list(self._subscriptions):
            subscription.drop()
        self._stream.close()
        self._stream.drained.set()
        self._failed.set()

    # Inside.

    async def _connect(self) -> None:
        options = self._options
        options.check()
        if not options.is_websocket:
            self._client._transport = self._stream
        arguments: dict[str, Any] = {}
        context = options.ssl_context()
        if context is not None:
            arguments["tls"] = context
        user, password = options.login
        if options.token or (user and not password):
            arguments["token"] = options.token or user
        elif user:
            arguments["user"], arguments["password"] = user, password
        if options.creds_file is not None:
            arguments["user_credentials"] = options.creds_file
        if options.nkey_file is not None:
            arguments["nkeys_seed"] = str(options.nkey_file)
        connecting = asyncio.create_task(self._dial(arguments))
        failing = asyncio.create_task(self._failed.wait())
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                await asyncio.wait({connecting, failing}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            connecting.result()
        except TimeoutError:
            await self._give_up(connecting)
            reason = f": {self._last_error}" if self._last_error else ""
            raise ConnectError(
                f"no broker answers at {options.address} within {options.connect_timeout_s:g} s{reason}"
            ) from None
        except BaseException:
            await self._give_up(connecting)
            raise
        finally:
            failing.cancel()
        self._is_up = True

    async def _give_up(self, connecting: asyncio.Task[None]) -> None:
        # The library swallows a cancellation that comes while it looks an address up, and dials on.
        while not connecting.done():
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=GIVE_UP_RETRY_S)
        await asyncio.gather(connecting, return_exceptions=True)
        await self.close()

    async def _dial(self, arguments: dict[str, Any]) -> None:
        try:
            await self._client.connect(
                servers=self._options.servers,
                name=self._options.name,
                inbox_prefix=self._inbox,
                error_cb=self._on_error,
                disconnected_cb=self._on_down,
                reconnected_cb=self._on_up,
                closed_cb=self._on_closed,
                connect_timeout=DIAL_TIMEOUT_S,  # type: ignore[arg-type] # seconds; a float does
                reconnect_time_wait=RETRY_MIN_S,  # type: ignore[arg-type]
                reconnect_to_server_handler=self._next_server,
                max_reconnect_attempts=-1,
                ping_interval=PING_INTERVAL_S,  # type: ignore[arg-type]
                max_outstanding_pings=MAX_PINGS_OUT,
                # 0: the library never blocks a publish, and refuses it while the connection is down.
                # With a limit it would block without heeding cancellation, and lose what it holds.
                pending_size=0,
                **arguments,
            )
        except ModuleNotFoundError as error:
            raise ConnectError(
                f"nkey and creds logins need the Python package {error.name!r}"
            ) from error
        except (OSError, nats.errors.Error, ValueError) as error:
            raise ConnectError(f"cannot connect to {self._options.address}: {error}") from error

    def _next_server(
        self, servers: list[Server], _info: dict[str, Any]
    ) -> tuple[Server | None, float]:
        self._num_retries += 1
        exponent = min(self._num_retries - 1, 8)
        delay_s = min(RETRY_MIN_S * 2**exponent, RETRY_MAX_S) * random.uniform(0.5, 1.0)
        return servers[(self._num_retries - 1) % len(servers)], delay_s

    async def _wait_for_room(self) -> None:
        if self._options.is_websocket:
            # The library's own stream does not say when it is empty.
            await asyncio.sleep(_ROOM_POLL_S)
            return
        self._stream.drained.clear()
        await self._stream.drained.wait()

    async def _round_trip(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            # The library writes its PING at once, past everything that still waits to be written.
            while self._client.pending_data_size > 0:
                await self._wait_for_room()
                self._check(0)
            await self._client.flush(timeout=timeout_s)  # type: ignore[arg-type] # seconds

    def _check(self, size_bytes: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise TransportClosed("the transport is closed")
        if not self._is_up:
            raise NotConnected(f"the connection to {self._options.address} is down")
        if size_bytes > self.max_payload:
            raise MessageTooLarge(size_bytes=size_bytes, max_payload=self.max_payload)

    @contextlib.contextmanager
    def _mapped(self, subject: str, *, timeout_s: float = 0.0) -> Iterator[None]:
        """Turn the library's errors into ours."""
        try:
            yield
        except nats.errors.NoRespondersError:
            raise NoResponders(subject) from None
        except TimeoutError:
            # The library's own timeout is a TimeoutError too. A failure says more than a timeout.
            if self._failure is not None:
                raise self._failure from None
            raise RequestTimeout(subject, timeout_s) from None
        except (
            nats.errors.OutboundBufferLimitError,
            nats.errors.ConnectionClosedError,
            nats.errors.ConnectionReconnectingError,
            OSError,
        ) as error:
            if self._failure is not None:
                raise self._failure from None
            raise NotConnected(f"the connection is down: {error}") from None
        except nats.errors.Error as error:
            raise SendError(f"cannot use subject {subject!r}: {error}") from None

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        denied = _PERMISSION.search(self._last_error)
        if denied is not None:
            operation = "publish to" if denied[1].lower() == "publish" else "subscribe to"
            self._fail(PermissionDenied(operation, denied[2]))
        elif _LOGIN.search(self._last_error) or isinstance(error, nats.errors.AuthorizationError):
            self._fail(
                AuthorizationFailed(f"the broker at {self._options.address} refuses the login")
            )
        elif isinstance(error, TlsMissing):
            self._fail(ConnectError(f"{self._options.address}: {error}"))
        elif isinstance(error, nats.errors.SlowConsumerError):
            self.num_dropped += 1

    async def _on_down(self) -> None:
        self._is_up = False
        self._stream.drained.set()
        self._tell(ConnectionChange.DOWN)

    async def _on_up(self) -> None:
        self._num_retries = 0
        self.num_reconnects += 1
        self._is_up = True
        self._tell(ConnectionChange.UP)

    async def _on_closed(self) -> None:
        self._is_up = False
        if not self._is_closing:
            self._fail(ConnectError(f"the broker closed the connection: {self._last_error}"))

    def _fail(self, failure: TransportError) -> None:
        if self._failure is None:
            self._failure = failure
            self._failed.set()
            self._stream.drained.set()
            self._tell(ConnectionChange.FAILED)

    def _tell(self, change: ConnectionChange) -> None:
        if not self._is_closing:
            for on_change in list(self._watchers.values()):
                on_change(change)
