"""A TCP proxy that carries connections through a link model; needs no root.

Owns the sockets between the agent and nats-server. Invariant: all connections share one queue per
direction, in first-in-first-out order of small pieces; a piece enters when there is room, and those that
wait enter in turn, so no connection keeps another out. The pace comes from the model's own schedule, never
from how long a sleep took, so lateness of this process does not add up. Must not know: NATS, frames.
"""

from __future__ import annotations

import asyncio
import collections
import collections.abc
import contextlib
import enum
import math
import socket
from dataclasses import dataclass, field

from scenarios.link import Delivery, Link, LinkConfig

MIN_PIECE_BYTES = 1500
MAX_PIECE_BYTES = 32 * 1024
PIECE_S = 0.002
"""A piece takes about this long on the link: fine enough for pacing, coarse enough for Python."""
KERNEL_BUFFER_BYTES = 32 * 1024
"""Receive buffer asked of the kernel; what waits there is beyond the model's queue, so it is small."""
MAX_UNREAD_BYTES = 1024 * 1024
"""Delivered bytes that one connection's far end may leave unread before its near end must wait."""
RECORD_STEP_S = 0.1
"""Step at which carried bytes are recorded."""


class Direction(enum.Enum):
    """The two ways through the link."""

    UP = "up"
    DOWN = "down"


@dataclass(eq=False, slots=True)
class _Flow:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    outbox: collections.deque[bytes] = field(default_factory=collections.deque)
    outbox_bytes: int = 0
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    has_room: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one flow; empty at the end of its stream."""

    flow: _Flow
    data: bytes


@dataclass(eq=False, slots=True)
class _Waiting:
    """A piece that the queue had no room for yet."""

    piece: _Piece
    since_s: float
    is_in: asyncio.Future[None]


class _Channel:
    """One direction of the link, shared by all connections."""

    def __init__(self, config: LinkConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self.link: Link[_Piece] = Link(config, now=self._loop.time())
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None
        self.carried: dict[int, int] = {}
        """Bytes that left the queue, by step of `RECORD_STEP_S` since the last restart."""
        self._recorded_from_s = self._loop.time()
        self.is_drained = asyncio.Event()
        """Set while nothing is queued or on its way."""
        self.is_drained.set()

    def restart(self, offset_s: float | None) -> None:
        """Begin the trace and the record again."""
        now = self._loop.time()
        self.link.restart(now=now, offset_s=offset_s)
        self.carried.clear()
        self._recorded_from_s = now
        self._turn()

    def piece_bytes(self) -> int:
        """Return how much to read at once at the present rate."""
        now = self._loop.time()
        rate = self.link.config.trace.rate_at(max(0.0, self.link.trace_time_s(now)))
        return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, int(rate * PIECE_S)))

    async def put(self, piece: _Piece) -> None:
        """Put a piece into the queue; returns when it is in."""
        now = self._loop.time()
        size = max(1, len(piece.data))
        if not self._waiting and self.link.offer(piece, size, now=now):
            self._turn()
            return
        waiting = _Waiting(piece, now, self._loop.create_future())
        self._waiting.append(waiting)
        self._turn()
        try:
            await waiting.is_in
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)

    def _turn(self) -> None:
        """Let in what there is room for, deliver what has arrived, and set the timer for what is next."""
        now = self._loop.time()
        next_s: float | None = None
        while self._waiting:
            head = self._waiting[0]
            if head.is_in.done():  # its connection was closed
                self._waiting.popleft()
                continue
            size = max(1, len(head.piece.data))
            room_s = self.link.room_s(size, now=head.since_s)
            # It waited with its bytes ready, so it enters at the moment at which there was room.
            if room_s > now or not self.link.offer(head.piece, size, now=room_s):
                next_s = room_s
                break
            self._waiting.popleft()
            head.is_in.set_result(None)
        for delivery in self.link.deliveries(now=now):
            self._deliver(delivery)
        arrival_s = self.link.next_delivery_s()
        if arrival_s is None:
            self.is_drained.set()
        else:
            self.is_drained.clear()
        if arrival_s is not None and (next_s is None or arrival_s < next_s):
            next_s = arrival_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_s is not None and math.isfinite(next_s):
            self._timer = self._loop.call_at(next_s, self._turn)

    def _deliver(self, delivery: Delivery[_Piece]) -> None:
        flow, data = delivery.item.flow, delivery.item.data
        step = int((delivery.sent_s - self._recorded_from_s) / RECORD_STEP_S)
        if data and step >= 0:
            self.carried[step] = self.carried.get(step, 0) + len(data)
        flow.outbox.append(data)
        flow.outbox_bytes += len(data)
        flow.has_news.set()

    def close(self) -> None:
        """Forget the timer and let every waiting task go."""
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting:
            waiting.is_in.cancel()


class LinkProxy:
    """Listens on loopback and carries every connection to the target through the two channels."""

    def __init__(
        self, *, up: LinkConfig, down: LinkConfig, target_host: str, target_port: int
    ) -> None:
        self._configs = {Direction.UP: up, Direction.DOWN: down}
        self._target = (target_host, target_port)
        self._channels: dict[Direction, _Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        """Port that the kernel chose; 0 before `start`."""

    async def start(self) -> None:
        """Bind, listen and serve until `stop`."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER_BYTES)
        listener.setblocking(False)
        self._listener = listener
        self.port = int(listener.getsockname()[1])
        self._channels = {way: _Channel(config) for way, config in self._configs.items()}
        self._spawn(self._accept(listener))

    async def stop(self) -> None:
        """Close every connection and the listener."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            channel.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def restart_trace(self, offset_s: float | None = None) -> None:
        """Begin the trace again in both directions, now, at an offset or where the configuration says."""
        for channel in self._channels.values():
            channel.restart(offset_s)

    def change_uplink(self, up: LinkConfig) -> None:
        """Follow another trace on the way up, from its configured moment on."""
        self._configs[Direction.UP] = up
        self._channels[Direction.UP].link.config = up
        self._channels[Direction.UP].restart(None)

    def carried_bytes(self, way: Direction) -> list[int]:
        """Return the bytes that left the queue in each step of `RECORD_STEP_S` since the restart."""
        carried = self._channels[way].carried
        return [carried.get(step, 0) for step in range(max(carried, default=-1) + 1)]

    async def drained(self, *, timeout_s: float) -> bool:
        """Wait until nothing is queued or on its way; False when that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                for channel in self._channels.values():
                    await channel.is_drained.wait()
        except TimeoutError:
            return False
        return True

    def _spawn(self, work: collections.abc.Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            self._spawn(self._carry(near))

    async def _carry(self, near: socket.socket) -> None:
        """Carry one connection until both directions have ended or one of them broke."""
        loop = asyncio.get_running_loop()
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            for side in (near, far):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER_BYTES)
            await loop.sock_connect(far, self._target)
            up, down = _Flow(near, far), _Flow(far, near)
            async with asyncio.TaskGroup() as tasks:
                for flow, way in ((up, Direction.UP), (down, Direction.DOWN)):
                    tasks.create_task(_read(flow, self._channels[way]))
                    tasks.create_task(_write(flow))
        except (OSError, ExceptionGroup):
            pass  # either end may vanish at any time; closing both sockets tells the other one
        finally:
            near.close()
            far.close()


async def _read(flow: _Flow, channel: _Channel) -> None:
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(flow.source, channel.piece_bytes())
        await channel.put(_Piece(flow, data))
        if not data:
            return
        while flow.outbox_bytes > MAX_UNREAD_BYTES:
            flow.has_room.clear()
            await flow.has_room.wait()


async def _write(flow: _Flow) -> None:
    loop = asyncio.get_running_loop()
    while True:
        while not flow.outbox:
            flow.has_news.clear()
            await flow.has_news.wait()
        data = flow.outbox.popleft()
        if not data:
            flow.sink.shutdown(socket.SHUT_WR)
            return
        await loop.sock_sendall(flow.sink, data)
        flow.outbox_bytes -= len(data)
        flow.has_room.set()
