"""Both ends of a session and the two lanes between them, without any loop or clock."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.wire.shells import make_accept, make_open
from wire import (
    Accept,
    ChunkComplete,
    ChunkReady,
    FrameError,
    Lane,
    ReceiverSession,
    SenderSession,
    parse_open,
)
from wire.events import ReceiverEvent, SenderEvent

SESSION = bytes(range(16))
LATENCY_S = 0.02


@dataclass(slots=True)
class Parcel:
    """A frame under way."""

    to_worker: bool
    lane: Lane
    data: bytes


@dataclass
class Duet:
    """A sender, a receiver, and everything that is under way between them."""

    num_chunks: int = 3
    window_bytes: int = 1 << 20
    segment_bytes: int = 1000
    max_chunk_bytes: int = 1 << 20
    max_payload: int = 1 << 20
    peer_timeout_s: float = 60.0
    now: float = 100.0
    parcels: list[Parcel] = field(default_factory=list)
    sent: list[SenderEvent] = field(default_factory=list)
    received: list[ReceiverEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        open_, token_ids = make_open(self.num_chunks, max_chunk_bytes=self.max_chunk_bytes)
        self.sender = SenderSession(
            open_,
            token_ids,
            session=SESSION,
            now=self.now,
            max_payload=self.max_payload,
            peer_timeout_s=self.peer_timeout_s,
        )
        read, ids, session = parse_open(self.sender.open_frame())
        assert (read, ids, session) == (open_, token_ids, SESSION)
        self.receiver = ReceiverSession(
            read,
            make_accept(window_bytes=self.window_bytes, segment_bytes=self.segment_bytes),
            session=session,
            now=self.now,
            max_payload=self.max_payload,
            peer_timeout_s=self.peer_timeout_s,
        )

    def accept(self) -> None:
        """Let the worker's yes arrive."""
        self.sender.receive(self.receiver.accept_frame(), now=self.now)
        self.collect()
        assert isinstance(self.sent.pop(), Accept)

    def collect(self) -> list[Parcel]:
        """Take what both ends want to send and to tell; return the new parcels."""
        new = [
            Parcel(True, outgoing.lane, outgoing.data)
            for outgoing in self.sender.frames_to_send(now=self.now)
        ]
        new += [
            Parcel(False, outgoing.lane, outgoing.data)
            for outgoing in self.receiver.frames_to_send(now=self.now)
        ]
        self.parcels += new
        while (event := self.sender.next_event()) is not None:
            self.sent.append(event)
        while (told := self.receiver.next_event()) is not None:
            self.received.append(told)
        return new

    def deliver(self, parcel: Parcel) -> None:
        """Let a frame arrive; damaged ones are thrown away, as a shell does."""
        end = self.receiver if parcel.to_worker else self.sender
        with contextlib.suppress(FrameError):
            end.receive(parcel.data, now=self.now)
        self.collect()

    def tick(self, duration_s: float) -> None:
        """Let time go by."""
        self.now += duration_s
        for end in (self.sender, self.receiver):
            due = end.next_timer()
            if due is not None and due <= self.now:
                end.handle_timer(now=self.now)
        self.collect()

    def settle(
        self, is_done: Callable[[], bool], *, on_step: Callable[[], None], limit_s: float = 60.0
    ) -> None:
        """Let everything arrive in order, with time going by, until ``is_done``."""
        give_up = self.now + limit_s
        while not is_done():
            assert self.now < give_up, (self.sender.state, self.receiver.state, self.parcels)
            self.tick(LATENCY_S)
            due = deque(self.parcels)
            self.parcels.clear()
            while due:
                self.deliver(due.popleft())
            on_step()
            self.collect()

    def consume(self, event: ChunkComplete) -> None:
        """Do what a worker does with a whole bitstream: decode it and give the memory back."""
        self.receiver.consumed(event.chunk, epoch=event.epoch, part=event.part, now=self.now)
        ready = ChunkReady(event.chunk, event.part, event.epoch, event.level, 0.0, 0.0, 0.0)
        self.receiver.chunk_ready(ready, now=self.now)
