from __future__ import annotations

import pytest

from tests.wire.duet import SESSION, Duet
from tests.wire.shells import make_accept, make_open
from wire import (
    Ask,
    Cancel,
    ChunkBad,
    ChunkComplete,
    ChunkRange,
    FailCode,
    Failed,
    FrameError,
    Lane,
    LocalProtocolError,
    Open,
    OutgoingChunk,
    PeerLost,
    ReceiverState,
    Recompute,
    RemoteProtocolError,
    SenderSession,
    Token,
    bitstream_digest,
    parse_open,
)
from wire.frames import Frame, FrameType, pack, parse
from wire.messages import ChunkDescriptor, ChunkKind, pack_body, pack_message
from wire.receiver import MAX_COMPLETE_EPOCHS


def descriptor(total_bytes: int, *, segment_bytes: int = 1000, digest: bytes = b"d" * 32) -> bytes:
    return pack_body(ChunkDescriptor(ChunkKind.KV, "any", total_bytes, segment_bytes, digest))


def segment(
    sequence: int, payload: bytes, *, chunk: int = 0, part: int = 0, epoch: int = 0
) -> bytes:
    return pack(
        Frame(
            FrameType.SEGMENT,
            SESSION,
            payload,
            chunk=chunk,
            part=part,
            epoch=epoch,
            sequence=sequence,
        )
    )


def breach(duet: Duet, data: bytes) -> str:
    """Deliver a frame that must end the session; return the sentence."""
    duet.receiver.receive(data, now=duet.now)
    duet.collect()
    failed = duet.received[-1]
    assert isinstance(failed, Failed)
    assert failed.code is FailCode.PROTOCOL
    assert duet.receiver.state is ReceiverState.FAILED
    assert duet.receiver.held_bytes == 0
    return failed.sentence


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (segment(0, descriptor(10), chunk=3), "segment of chunk 3"),
        (segment(0, descriptor(10), part=16), "part 16"),
        (segment(0, descriptor(0)), "declares 0 bytes"),
        (segment(0, descriptor(2**40)), "declares 1099511627776 bytes, not 1 to"),
        (segment(0, descriptor(10, segment_bytes=0)), "segments of 0 bytes"),
        (segment(0, descriptor(10, segment_bytes=1001)), "segments of 1001 bytes"),
        (segment(0, descriptor(50_000, segment_bytes=1)), "too many segments"),
        (segment(0, descriptor(10, digest=b"short")), "digest of 5 bytes"),
        (segment(0, b"nonsense"), "says"),
        (pack(Frame(FrameType.ACK, SESSION)), "an agent does not send ACK"),
        (pack(Frame(FrameType.MESSAGE, SESSION, b"")), "too few"),
        (pack(Frame(FrameType.MESSAGE, SESSION, b"", sequence=5000)), "5000 ahead"),
        (pack(Frame(FrameType.HEARTBEAT, SESSION, b"", sequence=9)), "acknowledges message 8"),
        (
            pack(Frame(FrameType.MESSAGE, SESSION, pack_message(Recompute(9, 0)))),
            "chunk 9 does not exist",
        ),
        (
            pack(Frame(FrameType.MESSAGE, SESSION, pack_message(Failed(FailCode.ENGINE, "")))),
            "an agent does not say Failed",
        ),
        (
            pack(Frame(FrameType.MESSAGE, SESSION, pack_message(Ask(1), [1, 2, 3, 4]))),
            "more than 3 ids",
        ),
    ],
)
def test_a_breach_of_the_protocol_ends_the_session_with_a_sentence(
    data: bytes, sentence: str
) -> None:
    assert sentence in breach(Duet(), data)


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (segment(1, bytes(999)), "999 bytes, 1000 belong there"),
        (segment(3, bytes(500)), "500 bytes, 100 belong there"),
        (segment(4, bytes(1)), "segment 4 of a transfer of 4"),
        (segment(0, descriptor(2101)), "two descriptors"),
    ],
)
def test_a_segment_that_does_not_fit_its_descriptor_ends_the_session(
    second: bytes, sentence: str
) -> None:
    duet = Duet()
    duet.receiver.receive(segment(0, descriptor(2100)), now=duet.now)
    assert sentence in breach(duet, second)


def test_an_agent_cannot_make_the_worker_hold_more_than_its_window() -> None:
    duet = Duet(window_bytes=3000)
    for chunk in range(3):
        duet.receiver.receive(segment(0, descriptor(2000), chunk=chunk), now=duet.now)
    for chunk in range(3):
        duet.receiver.receive(segment(1, bytes(1000), chunk=chunk), now=duet.now)
    assert duet.receiver.held_bytes == 3000
    assert "overran its window of 3000 bytes" in breach(duet, segment(2, bytes(1000)))


def test_a_repeated_segment_is_no_breach_while_the_window_is_full() -> None:
    duet = Duet(window_bytes=3000)
    for chunk in range(3):
        duet.receiver.receive(segment(0, descriptor(2000), chunk=chunk), now=duet.now)
        duet.receiver.receive(segment(1, bytes(1000), chunk=chunk), now=duet.now)
    duet.receiver.receive(segment(1, bytes(1000)), now=duet.now)
    assert duet.receiver.held_bytes == 3000
    assert duet.receiver.num_bytes_repeated == 1000
    assert not duet.receiver.is_over


def test_an_agent_cannot_make_the_worker_remember_epochs_without_bound() -> None:
    duet = Duet()
    digest = bitstream_digest(b"x")
    for epoch in range(MAX_COMPLETE_EPOCHS):
        duet.receiver.receive(segment(0, descriptor(1, digest=digest), epoch=epoch), now=duet.now)
        duet.receiver.receive(segment(1, b"x", epoch=epoch), now=duet.now)
        duet.receiver.consumed(0, epoch=epoch, now=duet.now)
    epoch = MAX_COMPLETE_EPOCHS
    duet.receiver.receive(segment(0, descriptor(1, digest=digest), epoch=epoch), now=duet.now)
    assert "was sent whole 64 times" in breach(duet, segment(1, b"x", epoch=epoch))


def test_declaring_a_large_chunk_allocates_nothing() -> None:
    duet = Duet(window_bytes=1 << 30, max_chunk_bytes=1 << 30, segment_bytes=1 << 20)
    duet.receiver.receive(segment(0, descriptor(1 << 30, segment_bytes=1 << 20)), now=duet.now)
    assert duet.receiver.held_bytes == 0


def test_a_wrong_digest_is_asked_for_again_and_never_handed_up() -> None:
    duet = Duet()
    duet.accept()
    chunk = OutgoingChunk(0, "any", b"payload", digest=b"w" * 32)
    duet.sender.offer(chunk, now=duet.now)
    duet.collect()
    duet.settle(
        lambda: any(isinstance(event, ChunkBad) for event in duet.sent), on_step=lambda: None
    )
    assert not any(isinstance(event, ChunkComplete) for event in duet.received)
    assert duet.receiver.held_bytes == 0
    assert duet.sender.offer(OutgoingChunk(0, "any", b"payload"), now=duet.now) == 1
    duet.settle(
        lambda: any(isinstance(event, ChunkComplete) for event in duet.received),
        on_step=lambda: None,
    )


def test_credit_comes_back_once_when_a_whole_epoch_was_given_up_late() -> None:
    """The data of epochs 0 and 1 overtakes the abort of epoch 0."""
    duet = Duet(window_bytes=4000)
    duet.accept()
    duet.deliver(duet.parcels.pop())
    duet.sender.offer(OutgoingChunk(0, "first", bytes(1500)), now=duet.now)
    first = duet.collect()
    duet.sender.abort(0, now=duet.now)
    duet.sender.offer(OutgoingChunk(0, "second", bytes(1600)), now=duet.now)
    second = duet.collect()
    data = [parcel for parcel in [*first, *second] if parcel.to_worker and parcel.lane is Lane.DATA]
    for parcel in data:
        duet.parcels.remove(parcel)
        duet.deliver(parcel)
    complete = [event for event in duet.received if isinstance(event, ChunkComplete)]
    assert [event.level for event in complete] == ["first", "second"]
    assert duet.receiver.held_bytes == 3100
    duet.settle(lambda: duet.sender.bytes_in_flight == 0, on_step=lambda: None)
    assert duet.sender.credit_bytes == 4000 - 3100
    for event in complete:
        duet.consume(event)
    duet.settle(lambda: duet.sender.credit_bytes >= 4000, on_step=lambda: None)
    duet.tick(5.0)
    duet.settle(lambda: True, on_step=lambda: None)
    assert duet.sender.credit_bytes == 4000
    assert duet.receiver.held_bytes == 0


def test_a_newer_epoch_replaces_an_older_one_and_stale_segments_are_only_acknowledged() -> None:
    duet = Duet()
    payload = bytes(range(200)) * 10
    new = descriptor(2000, digest=bitstream_digest(payload))
    duet.receiver.receive(segment(0, descriptor(1500)), now=duet.now)
    duet.receiver.receive(segment(1, b"o" * 1000), now=duet.now)
    assert duet.receiver.held_bytes == 1000
    duet.receiver.receive(segment(0, new, epoch=1), now=duet.now)
    assert duet.receiver.held_bytes == 0
    duet.collect()
    stale = [segment(0, descriptor(1500)), segment(1, b"o" * 1000), segment(2, b"o" * 500)]
    for data in stale:
        duet.receiver.receive(data, now=duet.now)
    acks = [parse(parcel.data) for parcel in duet.collect()]
    assert [(ack.type, ack.epoch, ack.sequence) for ack in acks] == [
        (FrameType.ACK, 0, number) for number in range(3)
    ]
    assert duet.receiver.held_bytes == 0
    duet.receiver.receive(segment(1, payload[:1000], epoch=1), now=duet.now)
    duet.receiver.receive(segment(2, payload[1000:], epoch=1), now=duet.now)
    duet.collect()
    complete = duet.received[-1]
    assert isinstance(complete, ChunkComplete)
    assert (complete.epoch, complete.payload) == (1, payload)


def test_an_abort_frees_what_was_held_and_its_stragglers() -> None:
    duet = Duet(window_bytes=4000)
    duet.accept()
    duet.deliver(duet.parcels.pop())
    duet.sender.offer(OutgoingChunk(0, "any", bytes(3500)), now=duet.now)
    first, second, *late = duet.collect()
    duet.parcels.clear()
    duet.deliver(first)
    duet.deliver(second)
    assert duet.receiver.held_bytes == 1000
    duet.sender.abort(0, now=duet.now)
    duet.collect()
    duet.settle(lambda: duet.sender.credit_bytes == 4000, on_step=lambda: None)
    assert duet.receiver.held_bytes == 0
    for parcel in late:
        duet.deliver(parcel)
    assert duet.receiver.held_bytes == 0
    assert not any(isinstance(event, ChunkComplete) for event in duet.received)


def test_frames_of_another_session_or_of_nothing_leave_it_as_it_was() -> None:
    duet = Duet()
    with pytest.raises(FrameError, match="another session"):
        duet.receiver.receive(pack(Frame(FrameType.HEARTBEAT, b"x" * 16)), now=duet.now)
    with pytest.raises(FrameError):
        duet.receiver.receive(b"hello", now=duet.now)
    assert duet.receiver.state is ReceiverState.RECEIVING


def test_moves_out_of_turn_are_our_own_error_and_change_nothing() -> None:
    duet = Duet()
    with pytest.raises(LocalProtocolError, match="not held"):
        duet.receiver.consumed(0, epoch=0, now=duet.now)
    duet.receiver.fail(Failed(FailCode.ENGINE, "out of order"), now=duet.now)
    duet.receiver.fail(Failed(FailCode.ENGINE, "once more"), now=duet.now)
    assert duet.receiver.state is ReceiverState.FAILED
    with pytest.raises(LocalProtocolError, match="Token is not allowed in state failed"):
        duet.receiver.send_token(Token(0, 1, 0.0), now=duet.now)


def test_an_agent_that_never_speaks_is_given_up_after_five_seconds() -> None:
    duet = Duet()
    duet.tick(4.9)
    assert not duet.receiver.is_over
    duet.tick(0.2)
    assert isinstance(duet.received[-1], PeerLost)
    assert duet.receiver.is_closed(now=duet.now)


def test_an_agent_that_spoke_is_waited_for_through_an_outage() -> None:
    duet = Duet()
    duet.accept()
    duet.deliver(duet.parcels.pop())
    for _ in range(59):
        duet.tick(1.0)
        assert not duet.receiver.is_over
    duet.tick(1.1)
    assert isinstance(duet.received[-1], PeerLost)


def test_a_cancelled_session_is_closed_at_once_and_holds_nothing() -> None:
    duet = Duet()
    duet.accept()
    duet.sender.offer(OutgoingChunk(0, "any", bytes(5000)), now=duet.now)
    duet.collect()
    duet.deliver(duet.parcels.pop(0))
    duet.deliver(duet.parcels.pop(0))
    duet.deliver(duet.parcels.pop(0))
    assert duet.receiver.held_bytes > 0
    duet.sender.cancel("enough", now=duet.now)
    duet.settle(lambda: duet.receiver.is_closed(now=duet.now), on_step=lambda: None)
    assert Cancel("enough") in duet.received
    assert duet.receiver.held_bytes == 0
    duet.settle(lambda: duet.sender.is_closed(now=duet.now), on_step=lambda: None)


def opening(open_: Open, token_ids: tuple[int, ...]) -> bytes:
    return SenderSession(open_, token_ids, session=SESSION, now=0.0).open_frame()


def changed(**changes: object) -> bytes:
    from dataclasses import replace

    open_, ids = make_open(2)
    return opening(replace(open_, **changes), ids)  # type: ignore[arg-type]


KEY = b"k" * 32


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (pack(Frame(FrameType.HEARTBEAT, SESSION)), "HEARTBEAT on the open subject"),
        (changed(chunks=()), "chunks end at token 0 of|more than 0 ids"),
        (changed(chunks=(ChunkRange(0, 10, KEY),)), "more than 10 ids"),
        (changed(chunks=(ChunkRange(0, 30, KEY),)), "chunks end at token 30 of 20"),
        (changed(chunks=(ChunkRange(1, 20, KEY),)), "chunk at token 1 follows 0"),
        (changed(chunks=(ChunkRange(0, 0, KEY),)), "chunk at token 0 follows 0"),
        (changed(chunks=(ChunkRange(0, 20, b"short"),)), "chunk at token 0"),
        (changed(model_digest=b"short"), "digests have 32 bytes"),
        (changed(deadline_s=-1.0), "deadline is below 0"),
        (changed(max_chunk_bytes=0), "largest chunk below 1"),
        (changed(tenant="a.b"), "tenant 'a.b'"),
        (changed(inbox="kvtide.other.i.agent"), "not one of tenant"),
        (changed(inbox="kvtide.clinic.w.worker"), "not one of tenant"),
        (changed(inbox="kvtide.clinic.i.>"), "not one of tenant"),
        (changed(inbox="_INBOX"), "not one of tenant"),
        (changed(inbox="_INBOX.*"), "not one of tenant"),
        (changed(inbox="_INBOX." + "x" * 300), "not one of tenant"),
    ],
)
def test_a_bad_opening_is_refused_with_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        parse_open(data)


def test_a_passed_deadline_is_no_reason_to_refuse() -> None:
    assert parse_open(changed(deadline_s=0.0))[0].deadline_s == 0.0


def test_the_accept_frame_is_the_same_for_a_repeated_opening() -> None:
    duet = Duet()
    assert duet.receiver.accept_frame() == duet.receiver.accept_frame()
    assert make_accept(window_bytes=duet.window_bytes, segment_bytes=1000).worker == "w-1"
