"""A broker in memory, with faults: the same promises as NATS, and none more.

Owns the fake that ships with the product. Invariants: like a NATS connection, each transport keeps the
order of its messages, loses what is under way when a connection goes down, and tells nobody; the same
seed and faults give the same run. Works on any event loop, also in virtual time. Must not know:
sessions, frames.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wire.aio.errors import (
    MessageTooLarge,
    NoResponders,
    NotConnected,
    PermissionDenied,
    RequestTimeout,
    SendError,
    TransportClosed,
    TransportError,
)
from wire.aio.faults import Fault, FaultKind, Noise
from wire.aio.transport import ConnectionChange, Message, OnChange, OnMessage

DEFAULT_MAX_PAYLOAD = 1024 * 1024
"""As a NATS server's."""


@dataclass(slots=True)
class _Route:
    pattern: tuple[str, ...]
    on_message: OnMessage
    queue: str
    transport: MemoryTransport


@dataclass(frozen=True, slots=True)
class _Parcel:
    due_s: float
    message: Message


class MemoryBroker:
    """Connects transports within one process and one event loop."""

    def __init__(
        self,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        faults: Iterable[Fault] = (),
        noise: Noise | None = None,
        max_payload: int = DEFAULT_MAX_PAYLOAD,
    ) -> None:
        """Make a broker.

        Args:
            seed: of everything that is random.
            latency_s: from a publish to its delivery.
            bytes_per_s: rate at which each connection takes messages; None is without limit.
            faults: what goes wrong, by number of operation.
            noise: what goes wrong at random.
            max_payload: largest message.
        """
        self.num_operations = 0
        """Publishes, requests and subscribes so far."""
        self.num_delivered = 0
        self.num_lost = 0
        """Messages that were sent and reached nobody who wanted them, by a fault."""
        self.noise = noise or Noise()
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.max_payload = max_payload
        self.is_running = True
        self._faults = list(faults)
        self._random = random.Random(seed)
        self._routes: list[_Route] = []
        self._transports: list[MemoryTransport] = []

    def connect(
        self, *, name: str = "", inbox: str = "", denied: Iterable[str] = ()
    ) -> MemoryTransport:
        """Open a connection.

        Args:
            name: for messages.
            inbox: subject prefix for answers; empty makes one.
            denied: subject patterns on which this client may neither publish nor subscribe.
        """
        number = len(self._transports)
        transport = MemoryTransport(
            self,
            name=name or f"client-{number}",
            inbox=inbox or f"_INBOX.{number}",
            denied=[tuple(pattern.split(".")) for pattern in denied],
        )
        self._transports.append(transport)
        return transport

    def stop(self) -> None:
        """Go down: every connection is down, what was under way is lost."""
        self.is_running = False
        for transport in self._transports:
            transport.disconnect()

    def start(self) -> None:
        """Come back; so do the connections."""
        self.is_running = True
        for transport in self._transports:
            transport.reconnect()

    # For the transports.

    def _next_fault(self) -> Fault | None:
        self.num_operations += 1
        for fault in self._faults:
            if fault.hits(self.num_operations):
                return fault
        return self.noise.draw(self._random, self.num_operations)

    def _restart(self, delay_s: float) -> None:
        self.stop()
        asyncio.get_running_loop().call_later(delay_s, self.start)

    def _corrupted(self, data: bytes) -> bytes:
        if not data:
            return data
        damaged = bytearray(data)
        damaged[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def _has_listener(self, subject: str) -> bool:
        parts = tuple(subject.split("."))
        return any(
            route.transport.is_connected and _matches(route.pattern, parts)
            for route in self._routes
        )

    def _deliver(self, message: Message) -> None:
        parts = tuple(message.subject.split("."))
        groups: dict[str, list[_Route]] = {}
        chosen: list[_Route] = []
        for route in self._routes:
            if _matches(route.pattern, parts):
                if route.queue:
                    if route.transport.is_connected:
                        groups.setdefault(route.queue, []).append(route)
                else:
                    chosen.append(route)
        chosen += [self._random.choice(members) for members in groups.values()]
        for route in chosen:
            if route.transport.is_connected:
                self.num_delivered += 1
                route.transport._take(route, message)
            else:
                self.num_lost += 1


class _MemorySubscription:
    def __init__(self, broker: MemoryBroker, route: _Route) -> None:
        self._broker = broker
        self._route = route

    async def unsubscribe(self) -> None:
        if self._route in self._broker._routes:
            self._broker._routes.remove(self._route)


class MemoryTransport:
    """A ``Transport`` over a ``MemoryBroker``; make it with ``MemoryBroker.connect``."""

    def __init__(
        self, broker: MemoryBroker, *, name: str, inbox: str, denied: list[tuple[str, ...]]
    ) -> None:
        self.name = name
        self._broker = broker
        self._inbox = inbox
        self._denied = denied
        self._is_up = broker.is_running
        self._is_closed = False
        self._is_frozen = False
        self._failure: TransportError | None = None
        self._watchers: dict[int, OnChange] = {}
        self._num_watchers = 0
        self._num_requests = 0
        self._outgoing: deque[_Parcel] = deque()
        self._late: list[asyncio.TimerHandle] = []
        self._held: list[tuple[_Route, Message]] = []
        self._free_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    def is_connected(self) -> bool:
        return self._is_up and not self._is_closed and self._failure is None

    @property
    def failure(self) -> TransportError | None:
        return self._failure

    @property
    def inbox(self) -> str:
        return self._inbox

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self._operate("publish to", subject, Message(subject, data, reply))
        # A real client gives way here too, so a shell must expect anything to happen meanwhile.
        await asyncio.sleep(0)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._num_requests += 1
        reply = f"{self._inbox}.request.{self._num_requests}"

        def take(message: Message) -> None:
            if not answer.done():
                answer.set_result(message.data)

        route = _Route(tuple(reply.split(".")), take, "", self)
        self._broker._routes.append(route)
        try:
            self._operate("publish to", subject, Message(subject, data, reply))
            if not self._broker._has_listener(subject):
                raise NoResponders(subject)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeout(subject, timeout_s) from None
        finally:
            # A transport that was closed meanwhile has taken its routes with it.
            if route in self._broker._routes:
                self._broker._routes.remove(route)

    async def subscribe(
        self, subject: str, on_message: OnMessage, *, queue: str = ""
    ) -> _MemorySubscription:
        self._operate("subscribe to", subject, None)
        route = _Route(tuple(subject.split(".")), on_message, queue, self)
        self._broker._routes.append(route)
        await asyncio.sleep(0)
        return _MemorySubscription(self._broker, route)

    def watch(self, on_change: OnChange) -> Callable[[], None]:
        self._num_watchers += 1
        number = self._num_watchers
        self._watchers[number] = on_change
        return lambda: self._watchers.pop(number, None) and None

    async def ping(self, *, timeout_s: float) -> float:
        self._check(0)
        round_trip_s = 2 * self._broker.latency_s
        if self._is_frozen or round_trip_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise RequestTimeout("ping", timeout_s)
        await asyncio.sleep(round_trip_s)
        self._check(0)
        return round_trip_s

    async def close(self) -> None:
        self._is_closed = True
        self._lose_everything()
        self._broker._routes[:] = [
            route for route in self._broker._routes if route.transport is not self
        ]

    # What goes wrong.

    def disconnect(self) -> None:
        """Go down; what was under way, both ways, is lost."""
        self._lose_everything()
        if self.is_connected:
            self._is_up = False
            self._tell(ConnectionChange.DOWN)

    def reconnect(self) -> None:
        """Come back, if the broker runs."""
        if not self._is_up and self._broker.is_running and not self._is_closed:
            self._is_up = True
            self._tell(ConnectionChange.UP)

    def freeze(self) -> None:
        """Take nothing in until ``thaw``, as a process that was stopped; the broker keeps it."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Take in what came meanwhile, and go on."""
        self._is_frozen = False
        held, self._held = self._held, []
        for route, message in held:
            self._take(route, message)

    # Inside.

    def _check(self, size_bytes: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise TransportClosed("the transport is closed")
        if not self._is_up:
            raise NotConnected(f"the connection of {self.name} is down")
        if size_bytes > self.max_payload:
            raise MessageTooLarge(size_bytes=size_bytes, max_payload=self.max_payload)

    def _operate(self, operation: str, subject: str, message: Message | None) -> None:
        self._check(0 if message is None else len(message.data))
        if any(_matches(pattern, tuple(subject.split("."))) for pattern in self._denied):
            self._failure = PermissionDenied(operation, subject)
            self._tell(ConnectionChange.FAILED)
            # As over NATS: a publish learns of it later, a subscribe at once.
            if message is None:
                raise self._failure
            return
        fault = self._broker._next_fault()
        kind = None if fault is None else fault.kind
        if fault is not None and kind in (FaultKind.DISCONNECT, FaultKind.RESTART):
            if kind is FaultKind.RESTART:
                self._broker._restart(fault.delay_s)
            else:
                self.disconnect()
                asyncio.get_running_loop().call_later(fault.delay_s, self.reconnect)
            raise NotConnected(f"the connection of {self.name} went down")
        if kind is FaultKind.FAIL:
            raise SendError(f"cannot {operation} {subject!r}: injected fault")
        if message is None:
            return
        if kind is FaultKind.DROP:
            self._broker.num_lost += 1
            return
        if kind is FaultKind.CORRUPT:
            message = Message(message.subject, self._broker._corrupted(message.data), message.reply)
        if fault is not None and kind is FaultKind.REORDER:
            loop = asyncio.get_running_loop()
            self._late.append(
                loop.call_later(
                    self._broker.latency_s + fault.delay_s, self._broker._deliver, message
                )
            )
            return
        self._send(message, fault.delay_s if fault and kind is FaultKind.DELAY else 0.0)
        if kind is FaultKind.DUPLICATE:
            self._send(message, 0.0)

    def _send(self, message: Message, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        rate = self._broker.bytes_per_s
        duration_s = 0.0 if rate is None else len(message.data) / rate
        self._free_at_s = max(self._free_at_s, loop.time()) + duration_s + delay_s
        self._outgoing.append(_Parcel(self._free_at_s + self._broker.latency_s, message))
        self._arm()

    def _arm(self) -> None:
        # One timer for the queue: timers of the same moment have no order among themselves.
        if self._timer is None and self._outgoing:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._outgoing[0].due_s, self._deliver_due)

    def _deliver_due(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._outgoing and self._outgoing[0].due_s <= now_s:
            self._broker._deliver(self._outgoing.popleft().message)
        self._arm()

    def _take(self, route: _Route, message: Message) -> None:
        if self._is_frozen:
            self._held.append((route, message))
        elif route in self._broker._routes:
            route.on_message(message)

    def _lose_everything(self) -> None:
        self._broker.num_lost += len(self._outgoing) + len(self._held)
        self._outgoing.clear()
        self._held.clear()
        for handle in self._late:
            handle.cancel()
        self._late.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free_at_s = 0.0

    def _tell(self, change: ConnectionChange) -> None:
        for on_change in list(self._watchers.values()):
            on_change(change)


def _matches(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether a subject's parts fit a pattern with ``*`` and ``>``."""
    for index, part in enumerate(pattern):
        if part == ">":
            return len(parts) > index
        if index >= len(parts) or part not in ("*", parts[index]):
            return False
    return len(pattern) == len(parts)
