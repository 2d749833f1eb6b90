"""The worker's end of a session.

Owns what arrived, what was promised in credit, and what is still owed to the agent, clock-free.
Invariants: bytes held never exceed the granted window, a bitstream is handed up once and only whole
and verified, and an older epoch never comes up after a newer one. Must not know: NATS, codec, engine.
"""

from __future__ import annotations

from collections import deque

from wire.errors import FrameError, LocalProtocolError, RemoteProtocolError
from wire.events import (
    Asked,
    ChunkComplete,
    Lane,
    Outgoing,
    PeerLost,
    ReceiverEvent,
)
from wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame, FrameType, pack, parse
from wire.have import HaveTransfer, pack_bits, pack_have
from wire.messages import (
    Abort,
    Accept,
    Answered,
    Ask,
    Cancel,
    ChunkBad,
    ChunkDescriptor,
    ChunkReady,
    Credit,
    Done,
    FailCode,
    Failed,
    Open,
    Recompute,
    Refuse,
    Token,
    WorkerMessage,
    pack_body,
    pack_message,
    parse_body,
    parse_message,
    parse_token_ids,
)
from wire.peer import PeerClock
from wire.reliable import ReliableLane
from wire.states import RECEIVER_TRANSITIONS, ReceiverState, advance
from wire.subjects import check_inbox, check_name
from wire.transfer import ACK, DIGEST_BYTES, ReceiveTransfer

MAX_PART = 15
MAX_COMPLETE_EPOCHS = 64
"""Epochs of one chunk that may arrive whole before an abort settles their credit."""


def parse_open(data: bytes) -> tuple[Open, tuple[int, ...], bytes]:
    """Read an opening frame: its body, the context's token ids and the session id.

    Raises:
        RemoteProtocolError: it is not one, or its chunks do not tile the tokens from 0 on.
    """
    frame = parse(data)
    if frame.type is not FrameType.OPEN:
        raise RemoteProtocolError(f"{frame.type.name} on the open subject")
    open_, blob = parse_body(frame.payload, Open)
    position = 0
    for chunk in open_.chunks:
        if chunk.token_start != position or chunk.token_stop <= position or len(chunk.key) != 32:
            raise RemoteProtocolError(f"chunk at token {chunk.token_start} follows {position}")
        position = chunk.token_stop
    # Unpacked only now, and to no more than the table says.
    token_ids = parse_token_ids(blob, max_tokens=position)
    if position != len(token_ids) or not open_.chunks:
        raise RemoteProtocolError(f"chunks end at token {position} of {len(token_ids)}")
    if len(open_.model_digest) != 32 or len(open_.profile_digest) != 32:
        raise RemoteProtocolError("model and profile digests have 32 bytes")
    # A deadline of 0 has passed already: a second worker is asked after the first one died.
    if open_.deadline_s < 0 or open_.max_chunk_bytes < 1:
        raise RemoteProtocolError("the deadline is below 0, or the largest chunk below 1")
    try:
        check_inbox(open_.inbox, tenant=check_name(open_.tenant, what="tenant"))
    except LocalProtocolError as error:
        raise RemoteProtocolError(str(error)) from None
    return open_, token_ids, frame.session


def refusal_frame(session: bytes, refuse: Refuse) -> bytes:
    """The reply to an opening that the worker does not take."""
    return pack(Frame(type=FrameType.REFUSE, session=session, payload=pack_body(refuse)))


class ReceiverSession:
    """One request, as the worker sees it."""

    def __init__(
        self,
        open_: Open,
        accept: Accept,
        *,
        session: bytes,
        now: float,
        max_payload: int = MAX_PAYLOAD_BYTES,
        peer_timeout_s: float = 60.0,
    ) -> None:
        self.session = session
        self.state = ReceiverState.RECEIVING
        self.num_bytes_received = 0
        """Payload bytes that were new."""
        self.num_bytes_repeated = 0
        """Payload bytes that were there already, or belonged to a given-up epoch."""
        self._open = open_
        self._accept = accept
        self._max_payload = max_payload
        self._started_s = now
        self._lane = ReliableLane(session)
        self._peer = PeerClock(now=now, lost_after_s=peer_timeout_s)
        self._events: deque[ReceiverEvent] = deque()
        self._outbox: list[Frame] = []
        self._transfers: dict[tuple[int, int], tuple[int, ReceiveTransfer]] = {}
        self._least_epoch: dict[tuple[int, int], int] = {}
        self._taken_bytes: dict[tuple[int, int, int], int] = {}
        """Whole bitstreams that the shell has and did not give back."""
        self._complete_epochs: dict[tuple[int, int], set[int]] = {}
        """Epochs whose credit comes back with ``consumed``, so not with an abort that comes late."""
        self._held_bytes = 0
        self._freed_bytes = 0
        self._is_abandoned = False

    @property
    def held_bytes(self) -> int:
        """Bytes of this session in memory: partial transfers and bitstreams not given back."""
        return self._held_bytes

    @property
    def is_over(self) -> bool:
        """Whether the session reached its end."""
        return not RECEIVER_TRANSITIONS[self.state]

    def is_closed(self, *, now: float) -> bool:
        """Whether the shell may drop the session: over, and the agent has all of it or is gone.

        What was said last, the answer most of all, is worth as long an outage as anything before it.
        """
        is_of_no_use = self._is_abandoned or self.state is ReceiverState.CANCELLED
        return self.is_over and (is_of_no_use or self._lane.is_idle)

    def accept_frame(self) -> bytes:
        """The reply to the opening."""
        frame = Frame(type=FrameType.ACCEPT, session=self.session, payload=pack_body(self._accept))
        return pack(frame, max_payload=self._max_payload)

    def receive(self, data: bytes, *, now: float) -> None:
        """Take in one message from the agent, from either connection.

        A sound frame that says what the agent must not say ends the session, with a ``Failed`` event:
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
            self._lane.resend_all()
        try:
            self._dispatch(frame, now)
        except RemoteProtocolError as error:
            self._fail_protocol(error, now)

    def next_event(self) -> ReceiverEvent | None:
        """The next thing that happened; None when there is nothing."""
        return self._events.popleft() if self._events else None

    def frames_to_send(self, *, now: float) -> list[Outgoing]:
        """What to publish on the agent's reply subject now, in order."""
        if not self._peer.is_connected:
            return []
        frames, self._outbox = self._outbox, []
        frames += self._lane.frames_to_send(now=now)
        is_closed = self.is_closed(now=now)
        if not frames and self._peer.is_heartbeat_due(now=now) and not is_closed:
            frames.append(self._lane.heartbeat())
        if frames:
            self._peer.on_spoke(now=now)
        return [
            Outgoing(Lane.CONTROL, pack(frame, max_payload=self._max_payload)) for frame in frames
        ]

    # What the shell does.

    def consumed(self, chunk: int, *, epoch: int, part: int = 0, now: float) -> None:
        """Give a whole bitstream's memory back; the agent gets the credit."""
        size = self._taken_bytes.pop((chunk, part, epoch), None)
        if size is None:
            raise LocalProtocolError(f"chunk {chunk} part {part} epoch {epoch} is not held")
        self._held_bytes -= size
        self._free(size)

    def chunk_ready(self, ready: ChunkReady, *, now: float) -> None:
        """Say that a chunk is in the KV cache."""
        self._say(ready, now)

    def reject(self, chunk: int, *, epoch: int, sentence: str, part: int = 0, now: float) -> None:
        """Say that a whole bitstream does not decode, and give its memory back."""
        self._say(ChunkBad(chunk, part, epoch, sentence), now)
        self._least_epoch[chunk, part] = max(epoch + 1, self._least_epoch.get((chunk, part), 0))
        self.consumed(chunk, epoch=epoch, part=part, now=now)

    def send_token(self, token: Token, *, now: float) -> None:
        """Send one token of the answer."""
        self._say(token, now)

    def answered(self, answered: Answered, *, now: float) -> None:
        """Say that the answer is complete."""
        self._say(answered, now)

    def finish(self, done: Done, *, now: float) -> None:
        """End the session in good order."""
        self._say(done, now)
        self._close(now)

    def fail(self, failed: Failed, *, now: float) -> None:
        """Give the session up and say why; does nothing once it is over."""
        if not self.is_over:
            self._say(failed, now)
            self._close(now)

    def on_connection(self, *, is_up: bool, now: float) -> None:
        """Take in that the transport went down or came back."""
        self._peer.on_connection(is_up=is_up, now=now)
        if is_up:
            self._lane.resend_all()

    def next_timer(self) -> float | None:
        """When ``handle_timer`` and ``frames_to_send`` have something to do without any input."""
        if not self._peer.is_connected or self._is_abandoned:
            return None
        times = [self._lane.next_timer(), self._peer.next_timer()]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, *, now: float) -> None:
        """Look at the silence of the peer."""
        verdict = self._peer.check(now=now)
        if isinstance(verdict, PeerLost):
            self._is_abandoned = True
        if verdict is None or self.is_over:
            return
        self._events.append(verdict)
        if self._is_abandoned:
            self._move(Failed, is_local=True)
            self._close(now)

    # Inside.

    def _dispatch(self, frame: Frame, now: float) -> None:
        match frame.type:
            case FrameType.SEGMENT:
                self._on_segment(frame, now)
            case FrameType.HAVE_QUERY:
                self._outbox.append(
                    Frame(
                        type=FrameType.HAVE,
                        session=self.session,
                        sequence=frame.sequence,
                        payload=pack_have(self._have()),
                    )
                )
            case FrameType.HEARTBEAT:
                self._lane.on_acked(frame.sequence)
            case FrameType.MESSAGE:
                for payload in self._lane.receive(frame):
                    self._on_message(payload, now)
            case _:
                raise RemoteProtocolError(f"an agent does not send {frame.type.name}")

    def _fail_protocol(self, error: RemoteProtocolError, now: float) -> None:
        if self.is_over:
            return
        failed = Failed(FailCode.PROTOCOL, str(error))
        self.fail(failed, now=now)
        self._events.append(failed)

    def _move(self, trigger: type, *, is_local: bool) -> None:
        self.state = advance(RECEIVER_TRANSITIONS, self.state, trigger, is_local=is_local)

    def _say(self, message: WorkerMessage, now: float) -> None:
        payload = pack_message(message)
        if HEADER_BYTES + len(payload) > self._max_payload:
            raise LocalProtocolError(f"{type(message).__name__} of {len(payload)} bytes")
        self._move(type(message), is_local=True)
        self._lane.send(payload)

    def _close(self, now: float) -> None:
        self._transfers.clear()
        self._held_bytes = sum(self._taken_bytes.values())

    def _free(self, num_bytes: int) -> None:
        self._freed_bytes += num_bytes
        if not self.is_over:
            self._move(Credit, is_local=True)
            self._lane.send(pack_message(Credit(self._credit_limit)))

    @property
    def _credit_limit(self) -> int:
        return self._accept.window_bytes + self._freed_bytes

    def _on_segment(self, frame: Frame, now: float) -> None:
        key = frame.chunk, frame.part
        if frame.chunk >= len(self._open.chunks) or frame.part > MAX_PART:
            raise RemoteProtocolError(f"segment of chunk {frame.chunk} part {frame.part}")
        if self.is_over:
            return
        if frame.epoch < self._least_epoch.get(key, 0):
            self._acknowledge(frame, None, now)
            self.num_bytes_repeated += len(frame.payload)
            return
        epoch, transfer = self._transfers.get(key, (-1, None))
        if transfer is None or frame.epoch > epoch:
            if frame.sequence != 0:
                # Its descriptor was lost; unacknowledged, it comes again behind the descriptor.
                return
            transfer = self._begin(frame)
        elif frame.sequence == 0:
            if parse_body(frame.payload, ChunkDescriptor)[0] != transfer.descriptor:
                raise RemoteProtocolError(f"chunk {frame.chunk} has two descriptors in one epoch")
            self.num_bytes_repeated += len(frame.payload)
        elif transfer.is_complete:
            self.num_bytes_repeated += len(frame.payload)
        else:
            self._add(frame, transfer)
        self._acknowledge(frame, transfer, now)
        if transfer.is_whole() and not transfer.is_complete:
            self._complete(frame, transfer, now)

    def _begin(self, frame: Frame) -> ReceiveTransfer:
        descriptor, _ = parse_body(frame.payload, ChunkDescriptor)
        limit = min(self._open.max_chunk_bytes, self._accept.window_bytes)
        if not 1 <= descriptor.total_bytes <= limit:
            raise RemoteProtocolError(
                f"chunk {frame.chunk} declares {descriptor.total_bytes} bytes, not 1 to {limit}"
            )
        if not 1 <= descriptor.segment_bytes <= self._accept.segment_bytes:
            raise RemoteProtocolError(f"segments of {descriptor.segment_bytes} bytes")
        if descriptor.total_bytes > descriptor.segment_bytes * 16_000:
            # So that a have-map stays small and the bookkeeping is bounded by the bytes.
            raise RemoteProtocolError(f"chunk {frame.chunk} has too many segments")
        if len(descriptor.digest) != DIGEST_BYTES:
            raise RemoteProtocolError(f"digest of {len(descriptor.digest)} bytes")
        key = frame.chunk, frame.part
        self._drop(key)
        transfer = ReceiveTransfer(descriptor)
        self._transfers[key] = frame.epoch, transfer
        self._least_epoch[key] = frame.epoch
        return transfer

    def _add(self, frame: Frame, transfer: ReceiveTransfer) -> None:
        # The agent may not hold more here than it was granted, whatever it says about aborts. A repeat
        # adds nothing, and may well come while the window is full.
        is_repeat = frame.sequence < transfer.count and transfer.received[frame.sequence]
        room = self._accept.window_bytes - self._held_bytes
        if not is_repeat and len(frame.payload) > room:
            raise RemoteProtocolError(
                f"agent overran its window of {self._accept.window_bytes} bytes"
            )
        new_bytes = transfer.add(frame.sequence, frame.payload)
        self._held_bytes += new_bytes
        self.num_bytes_received += new_bytes
        self.num_bytes_repeated += len(frame.payload) - new_bytes

    def _drop(self, key: tuple[int, int]) -> None:
        _, transfer = self._transfers.pop(key, (-1, None))
        if transfer is not None and not transfer.is_complete:
            self._held_bytes -= transfer.buffered_bytes

    def _complete(self, frame: Frame, transfer: ReceiveTransfer, now: float) -> None:
        total = transfer.descriptor.total_bytes
        epochs = self._complete_epochs.setdefault((frame.chunk, frame.part), set())
        if len(epochs) >= MAX_COMPLETE_EPOCHS:
            raise RemoteProtocolError(f"chunk {frame.chunk} was sent whole {len(epochs)} times")
        epochs.add(frame.epoch)
        payload = transfer.take()
        self._taken_bytes[frame.chunk, frame.part, frame.epoch] = total
        if payload is None:
            self.reject(
                frame.chunk,
                part=frame.part,
                epoch=frame.epoch,
                sentence=f"chunk {frame.chunk} arrived whole and does not match its digest",
                now=now,
            )
            self._events.append(
                ChunkBad(frame.chunk, frame.part, frame.epoch, "does not match its digest")
            )
            return
        self._events.append(
            ChunkComplete(
                chunk=frame.chunk,
                part=frame.part,
                epoch=frame.epoch,
                kind=transfer.descriptor.kind,
                level=transfer.descriptor.level,
                payload=payload,
            )
        )

    def _acknowledge(self, frame: Frame, transfer: ReceiveTransfer | None, now: float) -> None:
        cumulative, bitmap = (transfer.cumulative, transfer.bitmap) if transfer else (0, 0)
        self._outbox.append(
            Frame(
                type=FrameType.ACK,
                session=self.session,
                payload=ACK.pack(cumulative, bitmap, self._credit_limit, now - self._started_s),
                chunk=frame.chunk,
                part=frame.part,
                epoch=frame.epoch,
                sequence=frame.sequence,
            )
        )

    def _have(self) -> list[HaveTransfer]:
        return [
            HaveTransfer(
                chunk=chunk,
                part=part,
                epoch=epoch,
                is_complete=transfer.is_complete,
                received=b"" if transfer.is_complete else pack_bits(transfer.received),
            )
            for (chunk, part), (epoch, transfer) in self._transfers.items()
        ]

    def _on_message(self, payload: bytes, now: float) -> None:
        message, blob = parse_message(payload)
        if isinstance(message, WorkerMessage):
            raise RemoteProtocolError(f"an agent does not say {type(message).__name__}")
        if self.is_over:
            return
        if isinstance(message, Abort | Recompute) and message.chunk >= len(self._open.chunks):
            raise RemoteProtocolError(f"chunk {message.chunk} does not exist")
        self._move(type(message), is_local=False)
        match message:
            case Ask():
                ids = parse_token_ids(blob, max_tokens=self._open.question_tokens)
                self._events.append(Asked(message, ids))
            case Abort():
                self._on_abort(message)
                self._events.append(message)
            case Recompute():
                key = message.chunk, 0
                self._least_epoch[key] = max(message.epoch, self._least_epoch.get(key, 0))
                self._events.append(message)
            case Cancel():
                self._close(now)
                self._events.append(message)

    def _on_abort(self, abort: Abort) -> None:
        key = abort.chunk, abort.part
        epochs = self._complete_epochs.get(key, set())
        was_complete = abort.epoch in epochs
        # Aborts keep their order: one of an earlier epoch cannot follow.
        epochs.difference_update([epoch for epoch in epochs if epoch <= abort.epoch])
        if was_complete:
            # It overtook the abort: it was handed up, and ``consumed`` frees it, even when a newer epoch
            # has begun since.
            return
        self._least_epoch[key] = max(abort.epoch + 1, self._least_epoch.get(key, 0))
        if self._transfers.get(key, (-1, None))[0] == abort.epoch:
            self._drop(key)
        self._free(abort.sent_bytes)
