from __future__ import annotations

import pytest

from tests.wire.duet import SESSION, Duet, Parcel
from tests.wire.shells import make_accept, make_open
from wire import (
    Accept,
    Ask,
    Cancel,
    ChunkReady,
    FailCode,
    Failed,
    FrameError,
    HaveChunk,
    Lane,
    LocalProtocolError,
    OutgoingChunk,
    PayloadTooLarge,
    PeerBack,
    PeerLost,
    PeerSilent,
    Refuse,
    RefuseCode,
    SenderSession,
    SenderState,
    refusal_frame,
)
from wire.delivery import DeliveryMeter
from wire.frames import Frame, FrameType, pack, parse
from wire.messages import ChunkDescriptor, ChunkKind, pack_body, pack_message
from wire.transfer import ACK, InFlight, SendTransfer


def new_sender(*, max_payload: int = 1 << 20) -> SenderSession:
    open_, ids = make_open(3)
    return SenderSession(open_, ids, session=SESSION, now=0.0, max_payload=max_payload)


def accept_frame(accept: Accept) -> bytes:
    return pack(Frame(FrameType.ACCEPT, SESSION, pack_body(accept)))


def breach(session: SenderSession, data: bytes) -> str:
    """Deliver a frame that must end the session; return the sentence."""
    session.receive(data, now=1.0)
    events = []
    while (event := session.next_event()) is not None:
        events.append(event)
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.code is FailCode.PROTOCOL
    assert session.state is SenderState.FAILED
    assert session.is_over
    return failed.sentence


def replaced(**changes: object) -> Accept:
    from dataclasses import replace

    return replace(make_accept(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("accept", "sentence"),
    [
        (replaced(window_bytes=0), "grants nothing"),
        (replaced(segment_bytes=0), "grants nothing"),
        (replaced(worker="a.b"), "worker 'a.b'"),
        (replaced(worker=">"), "worker '>'"),
        (replaced(have=(HaveChunk(3, "fp16"),)), "a chunk that does not exist"),
    ],
)
def test_an_accept_that_makes_no_sense_ends_the_session(accept: Accept, sentence: str) -> None:
    assert sentence in breach(new_sender(), accept_frame(accept))


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (Frame(FrameType.SEGMENT, SESSION), "a worker does not send SEGMENT"),
        (Frame(FrameType.MESSAGE, SESSION, pack_message(Cancel("x"))), "does not say Cancel"),
        (
            Frame(FrameType.MESSAGE, SESSION, pack_message(ChunkReady(3, 0, 0, "", 0, 0, 0))),
            "chunk 3 does not exist",
        ),
        (Frame(FrameType.ACK, SESSION, b"short"), "ack of 5 bytes"),
        (Frame(FrameType.ACK, SESSION, ACK.pack(9, 0, 0, 0.0)), "ack of segment 0 of 2"),
        (Frame(FrameType.ACK, SESSION, ACK.pack(0, 0, 0, 0.0), sequence=2), "ack of segment 2 of"),
        (Frame(FrameType.HAVE, SESSION, b"{}"), "too few"),
        (Frame(FrameType.HEARTBEAT, SESSION, sequence=1), "acknowledges message 0"),
    ],
)
def test_a_breach_of_the_protocol_ends_the_session_and_tells_the_worker(
    frame: Frame, sentence: str
) -> None:
    session = new_sender()
    session.receive(accept_frame(make_accept()), now=0.5)
    session.offer(OutgoingChunk(0, "any", b"x"), now=0.5)
    session.frames_to_send(now=0.5)
    assert sentence in breach(session, pack(frame))
    told = [parse(outgoing.data) for outgoing in session.frames_to_send(now=1.0)]
    assert any(b"Cancel" in bytes(frame.payload) for frame in told)


def test_frames_of_another_session_leave_it_as_it_was() -> None:
    session = new_sender()
    with pytest.raises(FrameError, match="another session"):
        session.receive(pack(Frame(FrameType.HEARTBEAT, b"x" * 16)), now=0.0)
    assert session.state is SenderState.OPENING


def test_a_refusal_ends_it_and_is_told() -> None:
    session = new_sender()
    refuse = Refuse(RefuseCode.BUSY, "later", retry_after_s=1.0)
    session.receive(refusal_frame(SESSION, refuse), now=0.0)
    assert session.next_event() == refuse
    assert session.state is SenderState.REFUSED
    assert session.frames_to_send(now=0.0) == []
    assert session.next_timer() is None


def test_a_second_accept_changes_nothing() -> None:
    session = new_sender()
    session.receive(accept_frame(make_accept(worker="first")), now=0.0)
    session.receive(accept_frame(make_accept(worker="second")), now=0.0)
    assert session.accept is not None
    assert session.accept.worker == "first"


def test_moves_out_of_turn_are_our_own_error() -> None:
    session = new_sender()
    with pytest.raises(LocalProtocolError, match="state opening"):
        session.offer(OutgoingChunk(0, "any", b"x"), now=0.0)
    with pytest.raises(LocalProtocolError, match="Ask is not allowed in state opening"):
        session.ask(Ask(max_tokens=1), [1], now=0.0)
    session.receive(accept_frame(make_accept()), now=0.0)
    for bad in (
        OutgoingChunk(3, "any", b"x"),
        OutgoingChunk(-1, "any", b"x"),
        OutgoingChunk(0, "any", b""),
        OutgoingChunk(0, "any", b"x", part=256),
        OutgoingChunk(0, "any", bytes((1 << 20) + 1)),
    ):
        with pytest.raises(LocalProtocolError):
            session.offer(bad, now=0.0)
    with pytest.raises(LocalProtocolError, match="not on its way"):
        session.abort(0, now=0.0)
    session.offer(OutgoingChunk(0, "any", b"x"), now=0.0)
    with pytest.raises(LocalProtocolError, match="on its way"):
        session.offer(OutgoingChunk(0, "any", b"x"), now=0.0)
    with pytest.raises(LocalProtocolError, match="on its way"):
        session.recompute(0, now=0.0)


def test_an_opening_that_does_not_fit_a_frame_is_said_so_at_once() -> None:
    with pytest.raises(PayloadTooLarge, match="the session's opening is"):
        new_sender(max_payload=200)


def wants_chunk(duet: Duet) -> bool:
    return duet.sender.wants_chunk


def test_the_next_chunk_is_wanted_as_late_as_possible() -> None:
    duet = Duet(segment_bytes=32 * 1024)
    assert not wants_chunk(duet)
    duet.accept()
    assert wants_chunk(duet)
    duet.sender.offer(OutgoingChunk(0, "any", bytes(500_000)), now=duet.now)
    duet.collect()
    # Four segments are out, the rest waits for the window: nothing to decide yet.
    assert duet.sender.bytes_in_flight <= duet.sender.window_bytes
    assert not wants_chunk(duet)
    duet.settle(lambda: wants_chunk(duet), on_step=lambda: None)
    acked, sent = duet.sender.progress(0) or (0, 0)
    assert acked < sent
    assert sent > 500_000 - 32 * 1024


def test_an_abort_stops_sending_at_once() -> None:
    duet = Duet(segment_bytes=32 * 1024)
    duet.accept()
    duet.sender.offer(OutgoingChunk(0, "fine", bytes(900_000)), now=duet.now)
    duet.collect()
    duet.sender.abort(0, now=duet.now)
    frames = [parse(parcel.data) for parcel in duet.collect()]
    assert not any(frame.type is FrameType.SEGMENT for frame in frames)
    assert duet.sender.progress(0) is None
    assert duet.sender.wants_chunk


def test_a_window_share_narrows_the_window() -> None:
    duet = Duet(segment_bytes=32 * 1024)
    duet.accept()
    assert duet.sender.window_bytes == 4 * 32 * 1024
    duet.sender.window_share_bytes = 50_000
    assert duet.sender.window_bytes == 50_000
    duet.sender.window_share_bytes = 1
    assert duet.sender.window_bytes == 32 * 1024


def test_data_and_control_go_on_their_own_lanes() -> None:
    duet = Duet()
    duet.accept()
    duet.sender.offer(OutgoingChunk(0, "any", bytes(3000)), now=duet.now)
    duet.sender.recompute(1, now=duet.now)
    duet.sender.ask(Ask(max_tokens=1), [1], now=duet.now)
    lanes = {
        (parcel.lane, parse(parcel.data).type) for parcel in duet.collect() if parcel.to_worker
    }
    assert lanes == {(Lane.DATA, FrameType.SEGMENT), (Lane.CONTROL, FrameType.MESSAGE)}


def test_nothing_is_sent_and_nothing_is_due_while_the_connection_is_down() -> None:
    duet = Duet()
    duet.accept()
    duet.sender.offer(OutgoingChunk(0, "any", bytes(3000)), now=duet.now)
    duet.sender.ask(Ask(max_tokens=1), [1], now=duet.now)
    duet.collect()
    duet.sender.on_connection(is_up=False, now=duet.now)
    assert duet.sender.frames_to_send(now=duet.now + 100) == []
    assert duet.sender.next_timer() is None
    assert not duet.sender.wants_chunk


def test_a_link_that_stands_still_costs_questions_and_no_data() -> None:
    duet = Duet(peer_timeout_s=1e6)
    duet.accept()
    duet.deliver(duet.parcels.pop())
    duet.sender.offer(OutgoingChunk(0, "any", bytes(3000)), now=duet.now)
    held = list(duet.collect())
    for _ in range(400):
        duet.tick(0.1)
        # The worker is alive, its end of the link works; nothing of ours gets through.
        duet.sender.receive(pack(Frame(FrameType.HEARTBEAT, SESSION)), now=duet.now)
    frames = [parse(parcel.data) for parcel in duet.parcels if parcel not in held]
    queries = [frame for frame in frames if frame.type is FrameType.HAVE_QUERY]
    assert not any(frame.type is FrameType.SEGMENT for frame in frames)
    assert 3 <= len(queries) <= 10
    duet.settle(lambda: duet.sender.progress(0) is None, on_step=lambda: None)
    assert duet.sender.num_bytes_resent == 0


def test_silence_is_told_then_the_return_then_the_loss() -> None:
    session = new_sender()
    session.receive(accept_frame(make_accept()), now=0.0)
    assert isinstance(session.next_event(), Accept)
    session.handle_timer(now=3.0)
    assert session.next_event() == PeerSilent(since_s=0.0)
    session.handle_timer(now=4.0)
    assert session.next_event() is None
    session.receive(pack(Frame(FrameType.HEARTBEAT, SESSION)), now=5.0)
    assert session.next_event() == PeerBack()
    session.handle_timer(now=64.9)
    assert isinstance(session.next_event(), PeerSilent)
    session.handle_timer(now=65.0)
    assert session.next_event() == PeerLost(silent_s=60.0)
    assert session.state is SenderState.FAILED
    assert session.is_closed(now=65.0)


def test_cancel_before_the_answer_to_the_claim_says_nothing() -> None:
    session = new_sender()
    session.cancel("left", now=0.0)
    session.cancel("left again", now=0.0)
    assert session.state is SenderState.CANCELLED
    assert session.frames_to_send(now=0.0) == []
    assert session.is_closed(now=0.0)


def test_a_cancel_is_repeated_until_it_is_known_but_not_for_ever() -> None:
    session = new_sender()
    session.receive(accept_frame(make_accept()), now=0.0)
    session.cancel("left", now=0.0)
    sendings = 0
    now = 0.0
    while not session.is_closed(now=now):
        sendings += len(session.frames_to_send(now=now))
        due = session.next_timer()
        assert due is not None
        assert due > now
        now = due
    assert sendings >= 3
    assert now == 5.0


def segments_to(parcels: list[Parcel]) -> list[tuple[int, int]]:
    """Chunk and sequence of the segments among some parcels."""
    frames = [parse(parcel.data) for parcel in parcels if parcel.to_worker]
    return [(f.chunk, f.sequence) for f in frames if f.type is FrameType.SEGMENT]


def test_no_more_is_sent_than_there_is_credit_for() -> None:
    duet = Duet(window_bytes=4000)
    duet.accept()
    for chunk in range(2):
        duet.sender.offer(OutgoingChunk(chunk, "any", bytes(3000)), now=duet.now)
    sent: set[tuple[int, int]] = set()
    for _ in range(10):
        duet.tick(0.02)
        batch, duet.parcels = duet.parcels, []
        sent |= set(segments_to(batch))
        for parcel in batch:
            duet.deliver(parcel)
    assert sent == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)}
    assert duet.sender.credit_bytes == 0
    assert not duet.receiver.is_over


def test_a_gap_is_asked_about_at_once_and_nothing_is_sent_on_a_guess() -> None:
    duet = Duet()
    duet.accept()
    duet.sender.offer(OutgoingChunk(0, "any", bytes(9000)), now=duet.now)
    duet.collect()
    asked = False
    while duet.parcels and not asked:
        parcel = duet.parcels.pop(0)
        frame = parse(parcel.data)
        asked = frame.type is FrameType.HAVE_QUERY
        if (frame.type, frame.sequence) != (FrameType.SEGMENT, 1):
            duet.deliver(parcel)
    # No time went by at all.
    assert asked
    assert duet.sender.num_bytes_resent == 0
    duet.settle(lambda: duet.sender.progress(0) is None, on_step=lambda: None)
    assert duet.sender.num_bytes_resent == 1000


def test_an_answer_says_nothing_of_what_was_sent_behind_its_question() -> None:
    duet = Duet()
    duet.accept()
    duet.deliver(duet.parcels.pop())
    duet.sender.offer(OutgoingChunk(0, "any", bytes(500)), now=duet.now)
    lost = duet.collect()
    duet.parcels.clear()
    duet.tick(0.6)
    duet.sender.offer(OutgoingChunk(1, "any", bytes(600)), now=duet.now)
    duet.collect()
    assert segments_to(lost) == [(0, 0), (0, 1)]
    assert segments_to(duet.parcels) == [(1, 0), (1, 1)]
    questions = [p for p in duet.parcels if parse(p.data).type is FrameType.HAVE_QUERY]
    (question,) = questions
    duet.parcels.remove(question)
    duet.deliver(question)
    (answer,) = [p for p in duet.parcels if parse(p.data).type is FrameType.HAVE]
    duet.parcels.remove(answer)
    duet.deliver(answer)
    assert segments_to(duet.parcels) == [(1, 0), (1, 1), (0, 0), (0, 1)]
    duet.settle(lambda: duet.sender.bytes_in_flight == 0, on_step=lambda: None)
    assert duet.receiver.num_bytes_repeated == 0


def test_coming_back_is_followed_by_a_question_and_everything_unacknowledged_at_once() -> None:
    duet = Duet()
    duet.accept()
    duet.sender.offer(OutgoingChunk(0, "any", bytes(2000)), now=duet.now)
    duet.sender.recompute(1, now=duet.now)
    duet.collect()
    duet.parcels.clear()
    duet.sender.on_connection(is_up=False, now=duet.now)
    duet.sender.on_connection(is_up=True, now=duet.now)
    kinds = {parse(parcel.data).type for parcel in duet.collect()}
    assert kinds == {FrameType.HAVE_QUERY, FrameType.MESSAGE}


def test_a_worker_says_everything_again_to_an_agent_that_was_silent() -> None:
    duet = Duet()
    duet.accept()
    duet.deliver(duet.parcels.pop())
    ready = ChunkReady(0, 0, 0, "any", 0.0, 0.0, 0.0)
    duet.receiver.chunk_ready(ready, now=duet.now)
    # Sent at 0, 0.5, 1.5 and 3.5 s, next due at 7.5 s.
    for _ in range(8):
        duet.tick(0.5)
    assert any(isinstance(event, PeerSilent) for event in duet.received)
    duet.parcels.clear()
    duet.receiver.receive(pack(Frame(FrameType.HEARTBEAT, SESSION)), now=duet.now)
    kinds = [parse(parcel.data).type for parcel in duet.collect() if not parcel.to_worker]
    assert FrameType.MESSAGE in kinds


def upcoming(transfer: SendTransfer) -> int | None:
    return transfer.next_to_send


def test_a_segment_that_counted_as_lost_and_arrived_is_not_sent_again() -> None:
    transfer = SendTransfer(
        chunk=0,
        part=0,
        epoch=0,
        descriptor=ChunkDescriptor(ChunkKind.KV, "any", 2500, 1000, bytes(32)),
        payload=bytes(2500),
    )
    meter = DeliveryMeter()
    for order in range(4):
        sequence = transfer.next_to_send
        assert sequence == order
        mark = meter.on_sent(1000, window_full=False, now=0.0)
        transfer.on_sent(sequence, InFlight(sequence, mark, order))
    assert upcoming(transfer) is None
    transfer.on_lost(1)
    transfer.on_lost(3)
    assert upcoming(transfer) == 1
    transfer.on_arrived(2, 0, 1)
    assert upcoming(transfer) == 3
    assert transfer.acked_bytes == 1000
    transfer.on_arrived(2, 0, 1)
    transfer.on_found(1)
    assert transfer.acked_bytes == 1000
    transfer.on_arrived(4, 0, 3)
    assert transfer.is_acked
    assert transfer.acked_bytes == 2500
    assert upcoming(transfer) is None
