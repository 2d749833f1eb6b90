"""The agent's two connections to the broker, and which session a frame belongs to.

One connection carries segments, the other control messages and everything from the worker, so that
control never waits behind data. Invariants: sessions see the broker as up only while both are; frames
reach the session that they name and no other. Must not know: what frames say, HTTP, the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from edge_agent.config import EdgeConfig
from edge_agent.errors import NoWorker
from edge_agent.transfer import Mailbox
from telemetry import Event, get_logger
from wire import Lane, agent_inbox
from wire.aio import (
    ConnectionChange,
    Message,
    NatsTransport,
    NotConnected,
    Transport,
    TransportError,
)

RECONNECT_S = 1.0
"""Pause between tries to reach the broker for the first time, or after it failed for good."""

_log = get_logger("edge_agent")


@dataclass(frozen=True, slots=True)
class Connections:
    """Both connections to the broker."""

    data: Transport
    control: Transport


Connect = Callable[[], Awaitable[Connections]]


class Broker:
    """Keeps the connections up and sorts incoming frames by session."""

    def __init__(self, connect: Connect, *, address: str) -> None:
        """Prepare; ``open`` starts to connect.

        Args:
            connect: makes both connections; called again when they fail.
            address: where, for messages.
        """
        self._connect = connect
        self._address = address
        self._connections: Connections | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._failure = ""
        self._has_failed = asyncio.Event()

    @classmethod
    def of(cls, config: EdgeConfig) -> Broker:
        """Build the broker of an agent's settings."""
        token = config.broker_token() or ""
        # Within the tenant's own subjects, so that the broker's permissions can fence it.
        agent_id = config.agent_id or f"e-{secrets.token_hex(4)}"

        async def connect() -> Connections:
            async with contextlib.AsyncExitStack() as stack:
                opened = []
                for lane in Lane:
                    # Only the control connection is answered; each has its own prefix all the same.
                    suffix = "" if lane is Lane.CONTROL else "-data"
                    inbox = agent_inbox(config.tenant, agent_id + suffix)
                    transport = await NatsTransport.connect(
                        config.nats_url,
                        name=f"kvtide-edge {lane.value}",
                        inbox=inbox,
                        token=token,
                        creds_file=config.nats_creds_file,
                        ca_file=config.nats_ca_file,
                    )
                    stack.push_async_callback(transport.close)
                    opened.append(transport)
                stack.pop_all()
                data, control = opened
                return Connections(data=data, control=control)

        return cls(connect, address=config.nats_url.rpartition("@")[2])

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Broker]:
        """Connect in the background for as long as the block runs."""
        connecting = asyncio.create_task(self._stay_connected())
        try:
            yield self
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)

    @property
    def is_connected(self) -> bool:
        """Whether both connections can send now."""
        pair = self._connections
        return pair is not None and pair.data.is_connected and pair.control.is_connected

    @property
    def max_payload(self) -> int:
        """Largest frame that both connections take. Unit: bytes."""
        pair = self._checked()
        return min(pair.data.max_payload, pair.control.max_payload)

    @property
    def inbox(self) -> str:
        """Subject prefix on which workers answer."""
        return self._checked().control.inbox

    @contextlib.contextmanager
    def mailbox(self, session: bytes) -> Iterator[Mailbox]:
        """Receive a session's frames for as long as the block runs."""
        box = self._mailboxes[session.hex()] = Mailbox()
        try:
            yield box
        finally:
            del self._mailboxes[session.hex()]

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Ask on the control connection; errors as ``Transport.request``."""
        return await self._checked().control.request(subject, data, timeout_s=timeout_s)

    async def publish(self, lane: Lane, subject: str, data: bytes) -> None:
        """Send a frame; one that is lost with the connection is asked for again by its session.

        Raises:
            TransportError: the connection failed for good.
        """
        pair = self._connections
        if pair is not None:
            transport = pair.data if lane is Lane.DATA else pair.control
            with contextlib.suppress(NotConnected):
                await transport.publish(subject, data)

    @property
    def failure(self) -> str:
        """Why the broker is out of reach, or denied something; empty while all is well."""
        pair = self._connections
        failed = None if pair is None else pair.data.failure or pair.control.failure
        return str(failed) if failed is not None else self._failure

    def _checked(self) -> Connections:
        if self._connections is None or not self.is_connected:
            why = f": {self.failure}" if self.failure else ""
            raise NoWorker(f"the broker at {self._address} cannot be reached{why}")
        return self._connections

    async def _stay_connected(self) -> None:
        while True:
            try:
                pair = await self._connect()
            except TransportError as error:
                self._note_failure(str(error))
                await asyncio.sleep(RECONNECT_S)
                continue
            try:
                await self._use(pair)
            finally:
                self._connections = None
                await pair.data.close()
                await pair.control.close()
            await asyncio.sleep(RECONNECT_S)

    async def _use(self, pair: Connections) -> None:
        """Serve sessions until a connection fails for good."""
        self._has_failed.clear()
        for transport in (pair.data, pair.control):
            transport.watch(self._on_change)
        try:
            await pair.control.subscribe(f"{pair.control.inbox}.*", self._on_message)
        except TransportError as error:
            self._note_failure(str(error))
            return
        self._connections, self._failure = pair, ""
        _log.info(Event.BROKER_CONNECTED, url=self._address)
        self._tell()
        await self._has_failed.wait()
        failure = pair.data.failure or pair.control.failure
        self._note_failure(str(failure))

    def _note_failure(self, sentence: str) -> None:
        if self._failure != sentence:
            _log.warning(Event.BROKER_ERROR, error=sentence)
        self._failure = sentence

    def _on_message(self, message: Message) -> None:
        mailbox = self._mailboxes.get(message.subject.rpartition(".")[2])
        if mailbox is not None:
            mailbox.deliver(message.data)

    def _on_change(self, change: ConnectionChange) -> None:
        if change is ConnectionChange.UP:
            _log.info(Event.BROKER_RECONNECTED)
        else:
            _log.warning(Event.BROKER_DISCONNECTED, change=change.value)
        if change is ConnectionChange.FAILED:
            self._has_failed.set()
        self._tell()

    def _tell(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.connection_changed(is_up=self.is_connected)
