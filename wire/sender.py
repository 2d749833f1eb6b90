"""The agent's end of a session.

Owns windows, credits, epochs, acknowledgements and resending, clock-free. Invariants: no more than the
window is in flight, no more first-time bytes are sent than the worker gave credit for, and a segment
is sent again only when the worker has said that it lacks it. Must not know: NATS, planner, codec.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence

from wire.delivery import DeliveryMeter
from wire.errors import FrameError, LocalProtocolError, PayloadTooLarge, RemoteProtocolError
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
    MAX_STRING,
    Abort,
    Accept,
    AgentMessage,
    Ask,
    Cancel,
    ChunkBad,
    ChunkDescriptor,
    ChunkReady,
    Credit,
    FailCode,
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
from wire.subjects import check_name
from wire.transfer import (
    ACK,
    BITMAP_BITS,
    InFlight,
    OutgoingChunk,
    SendTransfer,
    bitstream_digest,
)

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


LOSS_SEGMENTS = 3
"""Segments sent later and acknowledged before one counts as probably lost, so that the worker is asked at
once. Source: RFC 9002, section 6.1.1, kPacketThreshold."""
MAX_QUERIES = 16
"""Unanswered queries that are remembered."""
LINGER_S = 5.0
"""How long a session that ended early goes on until the worker knows."""


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
        self._queries: dict[int, int] = {}
        """Unanswered have-queries by number, and the order of sending that each answers for."""
        self._num_queries = 0
        self._is_query_wanted = False
        self._query_due_s: float | None = None
        """When to ask again; None while there is nothing to ask."""
        self._query_wait_s = QUERY_MIN_S
        self._over_since_s: float | None = None
        self._is_abandoned = False
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

    def is_closed(self, *, now: float) -> bool:
        """Whether the shell may drop the session: over, and the worker knows or does not answer."""
        if not self.is_over:
            return False
        since = self._over_since_s if self._over_since_s is not None else now
        return self._lane.is_idle or self._is_abandoned or now >= since + LINGER_S

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

    @property
    def credit_bytes(self) -> int:
        """First-time bytes that the worker would still take."""
        return self._credit_limit - self._first_time_bytes

    def oldest_age_s(self, *, now: float) -> float:
        """Age of the oldest unacknowledged segment; 0 when none is in flight."""
        return now - min((entry.mark.sent_at_s for entry in self._in_flight()), default=now)

    def progress(self, chunk: int, part: int = 0) -> tuple[int, int] | None:
        """Bytes acknowledged and bytes sent of the live transfer of a chunk; None if there is none."""
        transfer = self._live(chunk, part)
        if transfer is None:
            return None
        return transfer.acked_bytes, transfer.sent_bytes

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
        transfer.give_up()
        if not transfer.in_flight:
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
        """Want nothing more; harmless when it is over.

        Publish what ``frames_to_send`` gives. A shell that goes on until ``is_closed`` makes sure that
        the worker learns of it; one that does not leaves that to the worker's timeout if it is lost.
        """
        if self.is_over:
            return
        is_known = self.state is not SenderState.OPENING
        self._move(Cancel, is_local=True)
        if is_known:
            self._lane.send(pack_message(Cancel(reason[:MAX_STRING])))
        self._end(now)

    def receive(self, data: bytes, *, now: float) -> None:
        """Take in one message from the worker.

        A sound frame that says what the worker must not say ends the session, with a ``Failed`` event:
        no resending would mend it.

        Raises:
            FrameError: it is no frame, or not one of this session; the session is as it was.
        """
        frame = parse(data)
        if frame.session != self.session:
            raise FrameError(f"frame of another session, {frame.session.hex()}")
        back = self._peer.on_heard(now=now)
        if back is not None:
            self._events.append(back)
            self._catch_up(now)
        try:
            self._dispatch(frame, now)
        except RemoteProtocolError as error:
            self._fail_protocol(error, now)

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
            # Data behind an earlier query may have been delivered by the old connection, and before it
            # lost: only a new query can tell.
            self._queries.clear()
            self._catch_up(now)

    def next_timer(self) -> float | None:
        """When ``handle_timer`` and ``frames_to_send`` have something to do without any input."""
        if self.state in (SenderState.OPENING, SenderState.REFUSED):
            return None
        times = [self._lane.next_timer() if self._peer.is_connected else None]
        if not self.is_over:
            times += [self._peer.next_timer(), self._query_time()]
        elif self._over_since_s is not None and not self._lane.is_idle:
            times.append(self._over_since_s + LINGER_S)
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, *, now: float) -> None:
        """Look at the silence of the peer and of the acknowledgements."""
        if self.is_over or self.state is SenderState.OPENING:
            return
        verdict = self._peer.check(now=now)
        if verdict is not None:
            self._events.append(verdict)
        if isinstance(verdict, PeerLost):
            self._is_abandoned = True
            self._move(Failed, is_local=True)
            self._end(now)
            return
        query_time = self._query_time()
        if query_time is not None and now >= query_time:
            is_again = self._query_due_s is not None
            wait_s = min(2 * self._query_wait_s, QUERY_MAX_S) if is_again else 0.0
            self._want_query(now, wait_s=max(wait_s, self._least_query_wait_s))

    # Inside.

    def _dispatch(self, frame: Frame, now: float) -> None:
        match frame.type:
            case FrameType.ACCEPT | FrameType.REFUSE if self.state is not SenderState.OPENING:
                pass  # a second answer to a second asking
            case FrameType.ACCEPT:
                self._on_accept(frame, now)
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
                    self._on_message(payload, now)
            case _:
                raise RemoteProtocolError(f"a worker does not send {frame.type.name}")

    def _on_accept(self, frame: Frame, now: float) -> None:
        accept, _ = parse_body(frame.payload, Accept)
        if min(accept.window_bytes, accept.segment_bytes) < 1:
            raise RemoteProtocolError("the worker accepts and grants nothing")
        if any(have.chunk >= len(self._open.chunks) for have in accept.have):
            raise RemoteProtocolError("the worker has a chunk that does not exist")
        try:
            check_name(accept.worker, what="worker")
        except LocalProtocolError as error:
            raise RemoteProtocolError(str(error)) from None
        self._move(Accept, is_local=False)
        self.accept = accept
        self._credit_limit = accept.window_bytes
        # The worker keeps a session for a short time only before it hears of it again.
        self._peer.speak_up(now=now)
        self._events.append(accept)

    def _fail_protocol(self, error: RemoteProtocolError, now: float) -> None:
        if self.is_over:
            return
        is_known = self.state is not SenderState.OPENING
        self._move(Failed, is_local=True)
        if is_known:
            self._lane.send(pack_message(Cancel(f"protocol: {error}"[:MAX_STRING])))
        self._end(now)
        self._events.append(Failed(FailCode.PROTOCOL, str(error)))

    def _catch_up(self, now: float) -> None:
        """Find out what was lost, and say again what may have been."""
        self._lane.resend_all()
        self._query_due_s = None
        if any(True for _ in self._in_flight()):
            self._want_query(now, wait_s=self._least_query_wait_s)

    def _end(self, now: float) -> None:
        self._over_since_s = now
        self._transfers.clear()

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
        return None if transfer is None or transfer.is_given_up else transfer

    def _in_flight(self) -> Iterator[InFlight]:
        for transfer in self._transfers.values():
            yield from transfer.in_flight.values()

    def _segments(self, now: float) -> Iterator[Frame]:
        """Segments that window and credit let go, and the have-query where one is wanted."""
        if self._is_query_wanted:
            self._is_query_wanted = False
            self._num_queries += 1
            self._queries[self._num_queries] = self._order
            if len(self._queries) > MAX_QUERIES:
                del self._queries[next(iter(self._queries))]
            yield Frame(type=FrameType.HAVE_QUERY, session=self.session, sequence=self._num_queries)
        for transfer in list(self._transfers.values()):
            while (sequence := transfer.next_to_send) is not None:
                payload = transfer.segment(sequence)
                is_repeat = bool(transfer.lost)
                new_bytes = 0 if is_repeat or sequence == 0 else len(payload)
                # The window moves with every segment: it takes the segment size into account.
                in_flight, window = self.meter.in_flight_bytes, self.window_bytes
                if in_flight and in_flight + len(payload) > window:
                    return
                if self._first_time_bytes + new_bytes > self._credit_limit:
                    self.meter.on_nothing_to_send()
                    return
                mark = self.meter.on_sent(
                    len(payload),
                    window_full=in_flight + 2 * len(payload) > window,
                    is_repeat=is_repeat,
                    now=now,
                )
                transfer.on_sent(sequence, InFlight(sequence, mark, self._order))
                self._order += 1
                self._first_time_bytes += new_bytes
                self.num_bytes_sent += len(payload)
                self.num_bytes_resent += len(payload) if is_repeat else 0
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
        if self.is_over:
            return
        self._grant(limit)
        transfer = self._transfers.get((frame.chunk, frame.part, frame.epoch))
        if transfer is None:
            return
        if cumulative > transfer.count or frame.sequence >= transfer.count:
            raise RemoteProtocolError(f"ack of segment {frame.sequence} of {transfer.count}")
        arrived = [
            entry
            for sequence, entry in transfer.in_flight.items()
            if sequence < cumulative
            or sequence == frame.sequence
            or (sequence - cumulative < BITMAP_BITS and bitmap >> (sequence - cumulative) & 1)
        ]
        transfer.on_arrived(cumulative, bitmap, frame.sequence)
        arrived.sort(key=_order_of)
        sample = self.meter.on_acked([entry.mark for entry in arrived], now=now)
        if sample is not None:
            self._events.append(Delivered(sample))
        self._retire(transfer, now)
        if arrived:
            self._look_for_gap(arrived[-1].order, now)

    def _look_for_gap(self, newest_order: int, now: float) -> None:
        """Ask at once when something that was sent well before has not arrived: order is kept."""
        oldest = min(map(_order_of, self._in_flight()), default=newest_order)
        is_asked = any(order > oldest for order in self._queries.values())
        if newest_order - oldest > LOSS_SEGMENTS and not is_asked and not self._is_query_wanted:
            self._want_query(now, wait_s=self._least_query_wait_s)

    def _retire(self, transfer: SendTransfer, now: float) -> None:
        if transfer.key not in self._transfers:
            return
        if transfer.is_given_up:
            if not transfer.in_flight:
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
        order = self._queries.get(frame.sequence)
        if order is None or self.is_over:
            return
        for number in [number for number in self._queries if number <= frame.sequence]:
            del self._queries[number]
        if not self._queries and not self._is_query_wanted:
            self._query_due_s = None
        for transfer in list(self._transfers.values()):
            there = have.get(transfer.key)
            # The query travelled behind these: what is not there now never will be.
            asked = [entry for entry in transfer.in_flight.values() if entry.order < order]
            arrived = [entry for entry in asked if there is not None and there.has(entry.sequence)]
            arrived.sort(key=_order_of)
            self.meter.on_found([entry.mark for entry in arrived], now=now)
            for entry in arrived:
                transfer.on_found(entry.sequence)
            for entry in sorted(asked, key=_order_of):
                if entry.sequence in transfer.in_flight:
                    self.meter.on_lost(entry.mark)
                    transfer.on_lost(entry.sequence)
            self._retire(transfer, now)

    def _on_message(self, payload: bytes, now: float) -> None:
        message, _ = parse_message(payload)
        if isinstance(message, AgentMessage):
            raise RemoteProtocolError(f"a worker does not say {type(message).__name__}")
        if self.is_over:
            return
        if isinstance(message, ChunkReady | ChunkBad) and message.chunk >= len(self._open.chunks):
            raise RemoteProtocolError(f"chunk {message.chunk} does not exist")
        self._move(type(message), is_local=False)
        if isinstance(message, Credit):
            self._grant(message.limit_bytes)
        if not SENDER_TRANSITIONS[self.state]:
            self._end(now)
        self._events.append(message)

    def _grant(self, limit_bytes: int) -> None:
        # Acks may be reordered: credit never shrinks.
        self._credit_limit = max(self._credit_limit, limit_bytes)

    @property
    def _least_query_wait_s(self) -> float:
        return max(QUERY_MIN_S, QUERY_ACKS * self.meter.ack_p50_s)

    def _query_time(self) -> float | None:
        if not self._peer.is_connected:
            return None
        if self._query_due_s is not None:
            return self._query_due_s
        oldest_s = min((entry.mark.sent_at_s for entry in self._in_flight()), default=None)
        return None if oldest_s is None else oldest_s + self._least_query_wait_s

    def _want_query(self, now: float, *, wait_s: float) -> None:
        self._is_query_wanted = True
        self._query_wait_s = wait_s
        self._query_due_s = now + wait_s


def _order_of(entry: InFlight) -> int:
    return entry.order
