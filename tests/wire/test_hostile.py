"""A peer that knows the protocol and means ill: whatever it sends, nothing breaks and nothing grows."""

from __future__ import annotations

import contextlib
import gc
import random
import tracemalloc
from collections.abc import Callable

from hypothesis import given, settings, strategies as st

from tests.wire.duet import SESSION, Duet
from wire import (
    Abort,
    Ask,
    Cancel,
    ChunkBad,
    ChunkComplete,
    ChunkReady,
    Credit,
    Done,
    FailCode,
    Failed,
    OutgoingChunk,
    Recompute,
    RemoteProtocolError,
    Token,
    bitstream_digest,
    parse_open,
)
from wire.frames import Frame, FrameType, pack
from wire.have import HaveTransfer, pack_have
from wire.messages import ChunkDescriptor, ChunkKind, pack_body, pack_message
from wire.transfer import ACK

WINDOW = 5000
SMALL = st.integers(0, 5)
WILD = SMALL | st.sampled_from([2**31, 2**32 - 1])
PIECES = st.sampled_from([0, 1, 999, 1000, 1001, 2000]).map(bytes)
DESCRIPTORS = st.builds(
    ChunkDescriptor,
    st.sampled_from(ChunkKind),
    st.just("any"),
    st.sampled_from([0, 1, 1000, 1500, 2000, 5000, 5001, 2**40]),
    st.sampled_from([0, 1, 500, 1000, 1001, 2**40]),
    st.sampled_from([bytes(32), b"", bitstream_digest(bytes(1000)), bitstream_digest(bytes(1500))]),
).map(pack_body)
COUNT = SMALL | st.sampled_from([2**40, 2**53 - 1])
MESSAGES = st.one_of(
    st.builds(Abort, SMALL, SMALL, SMALL, COUNT),
    st.builds(Recompute, SMALL, SMALL),
    st.builds(Ask, COUNT),
    st.builds(Cancel, st.text(max_size=5)),
    st.builds(Credit, COUNT),
    st.builds(
        ChunkReady, SMALL, SMALL, SMALL, st.just("any"), st.just(0.0), st.just(0.0), st.just(0.0)
    ),
    st.builds(ChunkBad, SMALL, SMALL, SMALL, st.just("bad")),
    st.builds(Token, COUNT, COUNT, st.just(0.0)),
    st.builds(Done),
    st.builds(Failed, st.sampled_from(FailCode), st.just("")),
).map(pack_message)
ACKS = st.builds(ACK.pack, WILD, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.floats())
HAVES = st.lists(
    st.builds(HaveTransfer, SMALL, SMALL, SMALL, st.booleans(), st.binary(max_size=4)), max_size=3
).map(pack_have)
FRAMES = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    session=st.just(SESSION),
    payload=st.one_of(PIECES, DESCRIPTORS, MESSAGES, ACKS, HAVES, st.binary(max_size=30)),
    chunk=WILD,
    part=st.sampled_from([0, 0, 0, 1, 15, 16, 255]),
    epoch=WILD,
    sequence=WILD,
).map(pack)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAMES, max_size=25))
def test_no_agent_can_break_a_worker_or_make_it_hold_more_than_it_granted(
    frames: list[bytes],
) -> None:
    duet = Duet(window_bytes=WINDOW, max_chunk_bytes=WINDOW)
    for frame in frames:
        duet.receiver.receive(frame, now=duet.now)
        duet.now += 0.1
        duet.receiver.handle_timer(now=duet.now)
        duet.receiver.frames_to_send(now=duet.now)
        duet.receiver.next_timer()
        while (event := duet.receiver.next_event()) is not None:
            if isinstance(event, ChunkComplete):
                assert bitstream_digest(event.payload) in (
                    bitstream_digest(bytes(1000)),
                    bitstream_digest(bytes(1500)),
                )
        assert 0 <= duet.receiver.held_bytes <= WINDOW


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAMES, max_size=25))
def test_no_worker_can_break_an_agent(frames: list[bytes]) -> None:
    duet = Duet(window_bytes=WINDOW, max_chunk_bytes=WINDOW)
    duet.accept()
    sender = duet.sender
    for index in range(2):
        sender.offer(OutgoingChunk(index, "any", bytes(2500)), now=duet.now)
    sender.ask(Ask(max_tokens=1), [1], now=duet.now)
    for frame in frames:
        sender.receive(frame, now=duet.now)
        duet.now += 0.1
        sender.handle_timer(now=duet.now)
        sender.frames_to_send(now=duet.now)
        sender.next_timer()
        while sender.next_event() is not None:
            pass
        assert sender.bytes_in_flight >= 0
        assert sender.num_bytes_sent - sender.num_bytes_resent <= 2 * 2500 + 2 * 400


@settings(max_examples=200, deadline=None)
@given(FRAMES | st.binary(max_size=100))
def test_no_bytes_on_the_open_subject_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parse_open(data)


def flood(send: Callable[[bytes], None], frames: Callable[[int], bytes], count: int) -> int:
    """Return how many bytes stay allocated after so many frames."""
    for number in range(200):
        send(frames(number))
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(200, 200 + count):
        send(frames(number))
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


def test_a_flood_of_beginnings_does_not_grow_the_worker() -> None:
    """Each frame begins a new epoch of the same chunk, which costs the worker nothing to keep."""
    duet = Duet(window_bytes=WINDOW, max_chunk_bytes=WINDOW)
    body = pack_body(ChunkDescriptor(ChunkKind.KV, "any", 2000, 1000, bytes(32)))

    def send(data: bytes) -> None:
        duet.receiver.receive(data, now=duet.now)
        duet.receiver.frames_to_send(now=duet.now)

    def frame(number: int) -> bytes:
        return pack(Frame(FrameType.SEGMENT, SESSION, body, epoch=number))

    assert flood(send, frame, 2000) < 20_000
    assert not duet.receiver.is_over


def test_a_flood_of_random_segments_does_not_grow_the_worker() -> None:
    duet = Duet(window_bytes=WINDOW, max_chunk_bytes=WINDOW)
    source = random.Random(1)

    def send(data: bytes) -> None:
        duet.receiver.receive(data, now=duet.now)
        duet.receiver.frames_to_send(now=duet.now)

    def frame(_number: int) -> bytes:
        return pack(
            Frame(
                FrameType.SEGMENT,
                SESSION,
                bytes(1000),
                chunk=source.randrange(3),
                part=source.randrange(16),
                epoch=source.randrange(2**32),
                sequence=1 + source.randrange(1000),
            )
        )

    assert flood(send, frame, 2000) < 20_000
    assert duet.receiver.held_bytes == 0
