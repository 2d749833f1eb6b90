"""The agent's end of a session.

Owns windows, credits, epochs, acknowledgements and resending, clock-free. Invariants: no more than the
window is in flight, no more first-time bytes are sent than the worker gave credit for, and a segment
is sent again only when the worker has said that it lacks it. Must not know: NATS, planner, codec.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wire.delivery import DeliveryMeter, SentMark
from wire.errors import LocalProtocolError, PayloadTooLarge, RemoteProtocolError
from wire.events import (
    ChunkSent,
    Delivered,
    Lane,
    Outgoing,
    PeerLost,
    SenderEvent,
)
from wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame, FrameType, pack, parse
from wire.have import parse_have
from wire.messages import (
    Abort,
    Accept,
    AgentMessage,
    Ask,
    Cancel,
    ChunkDescriptor,
    Credit,
    Failed,
    Open,
    Recompute,
    Refuse,
    pack_body,
    pack_message,
    parse_body,
    parse_message,
)
from wire.peer import PeerClock
from wire.reliable import ReliableLane
from wire.states import SENDER_TRANSITIONS, SenderState, advance
from wire.transfer import ACK, BITMAP_BITS, OutgoingChunk, SendTransfer, bitstream_digest

SLOW_SEGMENT_BYTES = 32 * 1024
SEGMENT_BYTES = 64 * 1024
FAST_SEGMENT_BYTES = 256 * 1024
SLOW_BELOW_BYTES_PER_S = 30e6 / 8
"""Source: docs/wire-protocol.md, "Segments": under about 30 Mbit/s, 64 KiB make acks too coarse."""
FAST_ABOVE_BYTES_PER_S = 400e6 / 8
QUERY_MIN_S = 0.5
QUERY_ACKS = 4.0
"""A have-query goes out after max(0.5 s, 4 x the median ack time) without an acknowledgement."""
QUERY_MAX_S = 8.0


@dataclass(slots=True)
class _Query:
    sequence: int
    order: int
    """Segments sent before this number are answered for."""
    due_s: float
    """When to ask again."""
    wait_s: float


class SenderSession:
    """One request, as the agent sees it."""

    def __init__(
        self,
        open_: Open,
        token_ids: Sequence[int],
        *,
        session: bytes,
        now: float,
        max_payload: int = MAX_PAYLOAD_BYTES,
        peer_timeout_s: float = 60.0,
    ) -> None:
        self.session = session
        self.state = SenderState.OPENING
        self.accept: Accept | None = None
        self.num_bytes_sent = 0
        """Payload bytes of segments handed out, repeats included."""
        self.num_bytes_resent = 0
        self.window_share_bytes: int | None = None
        """Upper bound of the window that the shell sets when requests share an uplink."""
        self.meter = DeliveryMeter()
        self._open = open_
        self._max_payload = max_payload
        self._lane = ReliableLane(session)
        self._peer = PeerClock(now=now, lost_after_s=peer_timeout_s)
        self._events: deque[SenderEvent] = deque()
        self._transfers: dict[tuple[int, int, int], SendTransfer] = {}
        self._epochs: dict[tuple[int, int], int] = {}
        self._credit_limit = 0
        self._first_time_bytes = 0
        self._order = 0
        self._query: _Query | None = None
        self._num_queries = 0
        self._last_ack_s = now
        self._open_frame = Frame(
            type=FrameType.OPEN, session=session, payload=pack_body(open_, token_ids)
        )
        size = HEADER_BYTES + len(self._open_frame.payload)
        if size > max_payload:
            raise PayloadTooLarge("the session's opening", size_bytes=size, max_payload=max_payload)

    # What the shell asks.

    @property
    def is_over(self) -> bool:
        """Whether nothing can happen any more but the last acknowledgements."""
        return not SENDER_TRANSITIONS[self.state]

    @property
    def wants_chunk(self) -> bool:
        """Whether the next chunk should be chosen now: less than a segment is left to send."""
        unsent = sum(transfer.unsent_bytes for transfer in self._transfers.values())
        return (
            self.state in (SenderState.SENDING, SenderState.ASKED, SenderState.ANSWERED)
            and self._peer.is_connected
            and unsent < self.segment_bytes
        )

    @property
    def segment_bytes(self) -> int:
        """Segment size for the next transfer, by the link's rate and what the worker takes."""
        rate = self.meter.rate_bytes_per_s
        size = SEGMENT_BYTES
        if rate is None or rate < SLOW_BELOW_BYTES_PER_S:
            size = SLOW_SEGMENT_BYTES
        elif rate > FAST_ABOVE_BYTES_PER_S:
            size = FAST_SEGMENT_BYTES
        limit = self.accept.segment_bytes if self.accept else size
        return max(1, min(size, limit, self._max_payload - HEADER_BYTES))

    @property
    def window_bytes(self) -> int:
        """Bytes that may be in flight now."""
        window = self.meter.window_bytes(segment_bytes=self.segment_bytes)
        share = self.window_share_bytes
        return window if share is None else min(window, max(share, self.segment_bytes))

    @property
    def bytes_in_flight(self) -> int:
        """Sent and not acknowledged."""
        return self.meter.in_flight_bytes

    def oldest_age_s(self, *, now: float) -> float:
        """Age of the oldest unacknowledged segment; 0 when none is in flight."""
        times = [mark.sent_at_s for mark, _, _ in self._marks()]
        return now - min(times) if times else 0.0

    def progress(self, chunk: int, part: int = 0) -> tuple[int, int] | None:
        """Bytes acknowledged and bytes sent of the live transfer of a chunk; None if there is none."""
        transfer = self._live(chunk, part)
        if transfer is None:
            return None
        size, total = transfer.descriptor.segment_bytes, transfer.descriptor.total_bytes
        acked = sum(min(size, total - (n - 1) * size) for n in transfer.acked if n > 0)
        return acked, transfer.sent_bytes

    # What the shell does.

    def open_frame(self) -> bytes:
        """The request to publish on the tenant's open subject; its reply goes to ``receive``."""
        return pack(self._open_frame, max_payload=self._max_payload)

    def offer(self, chunk: OutgoingChunk, *, now: float) -> int:
        """Queue a bitstream; return its epoch.

        Raises:
            LocalProtocolError: the session is not in a sending state, the chunk is already on its
                way, does not exist or is larger than what was declared or granted.
        """
        if self.state not in (SenderState.SENDING, SenderState.ASKED, SenderState.ANSWERED):
            raise LocalProtocolError(f"no chunk can be offered in state {self.state.value}")
        assert self.accept is not None
        if not 0 <= chunk.chunk < len(self._open.chunks) or not 0 <= chunk.part <= 255:
            raise LocalProtocolError(f"chunk {chunk.chunk} part {chunk.part} does not exist")
        if self._live(chunk.chunk, chunk.part) is not None:
            raise LocalProtocolError(f"chunk {chunk.chunk} is on its way; abort it first")
        size = len(chunk.payload)
        limit = min(self._open.max_chunk_bytes, self.accept.window_bytes)
        if not 0 < size <= limit:
            raise LocalProtocolError(
                f"chunk {chunk.chunk} at {chunk.level} has {size} bytes, not 1 to {limit}"
            )
        epoch = self._next_epoch(chunk.chunk, chunk.part)
        transfer = SendTransfer(
            chunk=chunk.chunk,
            part=chunk.part,
            epoch=epoch,
            descriptor=ChunkDescriptor(
                kind=chunk.kind,
                level=chunk.level,
                total_bytes=size,
                segment_bytes=self.segment_bytes,
                digest=chunk.digest or bitstream_digest(chunk.payload),
            ),
            payload=chunk.payload,
        )
        self._transfers[transfer.key] = transfer
        return epoch

    def abort(self, chunk: int, *, now: float, part: int = 0) -> None:
        """Give up the live transfer of a chunk, so that it can go at another level."""
        transfer = self._live(chunk, part)
        if transfer is None:
            raise LocalProtocolError(f"chunk {chunk} part {part} is not on its way")
        self._say(Abort(chunk, part, transfer.epoch, transfer.sent_bytes))
        # Its segments in flight stay known until they are acknowledged (the worker acknowledges stale
        # ones too): the link is still busy with them.
        transfer.next_segment = transfer.count
        transfer.payload = b""
        transfer.lost.clear()
        if not transfer.marks:
            del self._transfers[transfer.key]

    def recompute(self, chunk: int, *, now: float) -> int:
        """Tell the worker to prefill a chunk from its tokens; return the order's epoch."""
        if self._live(chunk, 0) is not None:
            raise LocalProtocolError(f"chunk {chunk} is on its way; abort it first")
        epoch = self._epochs.get((chunk, 0), -1) + 1
        self._say(Recompute(chunk, epoch))
        self._epochs[chunk, 0] = epoch
        return epoch

    def ask(self, ask: Ask, token_ids: Sequence[int], *, now: float) -> None:
        """Send the question; the worker answers when every chunk is ready."""
        self._say(ask, token_ids)

    def cancel(self, reason: str, *, now: float) -> None:
        """Want nothing more. Publish what ``frames_to_send`` gives, once, then drop the session."""
        if not self.is_over:
            if self.state is SenderState.OPENING:
                self._move(Cancel, is_local=True)
            else:
                self._say(Cancel(reason))
            self._transfers.clear()

    def receive(self, data: bytes, *, now: float) -> None:
        """Take in one message from the worker.

        Raises:
            RemoteProtocolError: it is not a frame of this session, or not allowed now; the session is
                as it was.
        """
        frame = parse(data)
        if frame.session != self.session:
            raise RemoteProtocolError(f"frame of another session, {frame.session.hex()}")
        back = self._peer.on_heard(now=now)
        if back is not None:
            self._events.append(back)
        match frame.type:
            case FrameType.ACCEPT:
                accept, _ = parse_body(frame.payload, Accept)
                self._move(Accept, is_local=False)
                self.accept = accept
                self._credit_limit = accept.window_bytes
                self._events.append(accept)
            case FrameType.REFUSE:
                refuse, _ = parse_body(frame.payload, Refuse)
                self._move(Refuse, is_local=False)
                self._events.append(refuse)
            case FrameType.ACK:
                self._on_ack(frame, now)
            case FrameType.HAVE:
                self._on_have(frame, now)
            case FrameType.HEARTBEAT:
                self._lane.on_acked(frame.sequence)
            case FrameType.MESSAGE:
                for payload in self._lane.receive(frame):
                    self._on_message(payload)
            case _:
                raise RemoteProtocolError(f"a worker does not send {frame.type.name}")

    def next_event(self) -> SenderEvent | None:
        """The next thing that happened; None when there is nothing."""
        return self._events.popleft() if self._events else None

    def frames_to_send(self, *, now: float) -> list[Outgoing]:
        """What to publish now, in order."""
        if not self._peer.is_connected or self.state in (SenderState.OPENING, SenderState.REFUSED):
            return []
        frames = [(Lane.CONTROL, frame) for frame in self._lane.frames_to_send(now=now)]
        if not frames and self._peer.is_heartbeat_due(now=now) and not self.is_over:
            frames.append((Lane.CONTROL, self._lane.heartbeat()))
        if frames:
            self._peer.on_spoke(now=now)
        if not self.is_over:
            frames += [(Lane.DATA, frame) for frame in self._segments(now)]
        return [
            Outgoing(lane, pack(frame, max_payload=self._max_payload)) for lane, frame in frames
        ]

    def on_connection(self, *, is_up: bool, now: float) -> None:
        """Take in that the transport went down or came back; then the worker is asked what it has."""
        self._peer.on_connection(is_up=is_up, now=now)
        if is_up:
            self._lane.resend_all()
            self._last_ack_s = now
            self._query = None
            if self._marks_exist():
                self._plan_query(now)

    def next_timer(self) -> float | None:
        """When ``handle_timer`` and ``frames_to_send`` have something to do without any input."""
        if self.state in (SenderState.OPENING, SenderState.REFUSED):
            return None
        times = [self._lane.next_timer()]
        if not self.is_over:
            times += [self._peer.next_timer(), self._query_time()]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, *, now: float) -> None:
        """Look at the silence of the peer and of the acknowledgements."""
        if self.is_over or self.state is SenderState.OPENING:
            return
        verdict = self._peer.check(now=now)
        if verdict is not None:
            self._events.append(verdict)
        if isinstance(verdict, PeerLost):
            self._move(Failed, is_local=True)
            self._transfers.clear()
            return
        query_time = self._query_time()
        if query_time is not None and now >= query_time:
            self._plan_query(now)

    # Inside.

    def _move(self, trigger: type, *, is_local: bool) -> None:
        self.state = advance(SENDER_TRANSITIONS, self.state, trigger, is_local=is_local)

    def _say(self, message: AgentMessage, token_ids: Sequence[int] = ()) -> None:
        payload = pack_message(message, token_ids)
        if HEADER_BYTES + len(payload) > self._max_payload:
            raise PayloadTooLarge(
                type(message).__name__,
                size_bytes=HEADER_BYTES + len(payload),
                max_payload=self._max_payload,
            )
        self._move(type(message), is_local=True)
        self._lane.send(payload)

    def _next_epoch(self, chunk: int, part: int) -> int:
        epoch = self._epochs.get((chunk, part), -1) + 1
        self._epochs[chunk, part] = epoch
        return epoch

    def _live(self, chunk: int, part: int) -> SendTransfer | None:
        epoch = self._epochs.get((chunk, part), -1)
        transfer = self._transfers.get((chunk, part, epoch))
        return transfer if transfer is not None and transfer.payload else None

    def _marks(self) -> Iterable[tuple[SentMark, int, bool]]:
        for transfer in self._transfers.values():
            yield from transfer.marks.values()

    def _marks_exist(self) -> bool:
        return any(transfer.marks for transfer in self._transfers.values())

    def _segments(self, now: float) -> Iterable[Frame]:
        """Segments that window and credit let go, and the have-query where one is due."""
        if self._query is not None and self._query.order < 0:
            self._query.order = self._order
            yield Frame(
                type=FrameType.HAVE_QUERY, session=self.session, sequence=self._query.sequence
            )
        window = self.window_bytes
        for transfer in list(self._transfers.values()):
            while transfer.lost or transfer.next_segment < transfer.count:
                is_repeat = bool(transfer.lost)
                sequence = transfer.lost[0] if is_repeat else transfer.next_segment
                payload = transfer.segment(sequence)
                size = len(payload)
                in_flight = self.meter.in_flight_bytes
                new_bytes = 0 if is_repeat or sequence == 0 else size
                if in_flight and in_flight + size > window:
                    return
                if self._first_time_bytes + new_bytes > self._credit_limit:
                    return
                if is_repeat:
                    transfer.lost.popleft()
                    self.num_bytes_resent += size
                else:
                    transfer.next_segment += 1
                if transfer.started_at_s is None:
                    transfer.started_at_s = now
                mark = self.meter.on_sent(size, window_full=in_flight + 2 * size > window, now=now)
                transfer.marks[sequence] = (mark, self._order, is_repeat)
                self._order += 1
                self._first_time_bytes += new_bytes
                self.num_bytes_sent += size
                yield Frame(
                    type=FrameType.SEGMENT,
                    session=self.session,
                    payload=payload,
                    chunk=transfer.chunk,
                    part=transfer.part,
                    epoch=transfer.epoch,
                    sequence=sequence,
                )
        self.meter.on_nothing_to_send()

    def _on_ack(self, frame: Frame, now: float) -> None:
        try:
            cumulative, bitmap, limit, _ = ACK.unpack(frame.payload)
        except struct.error:
            raise RemoteProtocolError(f"ack of {len(frame.payload)} bytes") from None
        self._last_ack_s = now
        if self._query is not None and self._query.order >= 0 and self._query.order < self._order:
            # Progress: the query stays, its answer is still wanted, but not in a hurry.
            self._query.due_s = max(self._query.due_s, now + self._query_wait())
        self._grant(limit)
        transfer = self._transfers.get((frame.chunk, frame.part, frame.epoch))
        if transfer is None:
            return
        if cumulative > transfer.count or frame.sequence >= transfer.count:
            raise RemoteProtocolError(f"ack of segment {frame.sequence} of {transfer.count}")
        others = [n for n in transfer.marks if n < cumulative and n != frame.sequence]
        others += [
            cumulative + index
            for index in range(BITMAP_BITS)
            if bitmap >> index & 1 and cumulative + index != frame.sequence
        ]
        self._mark_acked(transfer, others, now, is_sample=False)
        self._mark_acked(transfer, [frame.sequence], now, is_sample=True)

    def _mark_acked(
        self, transfer: SendTransfer, sequences: Iterable[int], now: float, *, is_sample: bool
    ) -> None:
        for sequence in sequences:
            if sequence in transfer.acked or sequence >= transfer.next_segment:
                continue
            transfer.acked.add(sequence)
            if sequence in transfer.lost:
                transfer.lost.remove(sequence)
            entry = transfer.marks.pop(sequence, None)
            if entry is None:
                continue
            mark, _, was_repeat = entry
            sample = self.meter.on_acked(mark, now=now)
            # Karn: an acknowledgement of a repeated segment may belong to the first sending.
            if sample is not None and is_sample and not was_repeat:
                self._events.append(Delivered(sample))
        self._retire(transfer, now)

    def _retire(self, transfer: SendTransfer, now: float) -> None:
        if transfer.key not in self._transfers:
            return
        if not transfer.payload:
            if not transfer.marks:
                del self._transfers[transfer.key]
        elif transfer.is_acked:
            del self._transfers[transfer.key]
            self._events.append(
                ChunkSent(
                    chunk=transfer.chunk,
                    part=transfer.part,
                    epoch=transfer.epoch,
                    num_bytes=transfer.descriptor.total_bytes,
                    started_at_s=now if transfer.started_at_s is None else transfer.started_at_s,
                    finished_at_s=now,
                )
            )

    def _on_have(self, frame: Frame, now: float) -> None:
        have = parse_have(frame.payload)
        query = self._query
        if query is None or frame.sequence != query.sequence or query.order < 0:
            return
        self._query = None
        self._last_ack_s = now
        for transfer in list(self._transfers.values()):
            there = have.get(transfer.key)
            asked = [n for n, (_, order, _) in transfer.marks.items() if order < query.order]
            arrived = [n for n in asked if there is not None and there.has(n)]
            self._mark_acked(transfer, arrived, now, is_sample=False)
            for sequence in sorted(set(asked) - set(arrived)):
                mark, _, _ = transfer.marks.pop(sequence)
                self.meter.on_lost(mark)
                if transfer.payload:
                    transfer.lost.append(sequence)
            self._retire(transfer, now)

    def _on_message(self, payload: bytes) -> None:
        message, _ = parse_message(payload)
        if isinstance(message, AgentMessage):
            raise RemoteProtocolError(f"a worker does not say {type(message).__name__}")
        if self.is_over:
            return
        self._move(type(message), is_local=False)
        if isinstance(message, Credit):
            self._grant(message.limit_bytes)
        if isinstance(message, Failed):
            self._transfers.clear()
        self._events.append(message)

    def _grant(self, limit_bytes: int) -> None:
        # Acks may be reordered: credit never shrinks.
        self._credit_limit = max(self._credit_limit, limit_bytes)

    def _query_wait(self) -> float:
        return max(QUERY_MIN_S, QUERY_ACKS * self.meter.ack_p50_s)

    def _query_time(self) -> float | None:
        if not self._peer.is_connected:
            return None
        if self._query is not None:
            return self._query.due_s
        return self._last_sent_or_acked() + self._query_wait() if self._marks_exist() else None

    def _last_sent_or_acked(self) -> float:
        oldest = min(mark.sent_at_s for mark, _, _ in self._marks())
        return max(oldest, self._last_ack_s)

    def _plan_query(self, now: float) -> None:
        wait_s = self._query_wait()
        if self._query is not None:
            wait_s = min(2 * self._query.wait_s, QUERY_MAX_S)
        self._num_queries += 1
        self._query = _Query(self._num_queries, order=-1, due_s=now + wait_s, wait_s=wait_s)
