"""The parts below a session: reliable lane, heartbeats, transfers, have-map, subjects, states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from wire import (
    Cancel,
    LocalProtocolError,
    MessageError,
    ReceiverState,
    RemoteProtocolError,
    SenderState,
    Token,
    agent_inbox,
    bitstream_digest,
    check_inbox,
    check_name,
    control_subject,
    data_subject,
    open_subject,
    reply_subject,
)
from wire.delivery import DeliveryMeter
from wire.frames import FrameType
from wire.have import HaveTransfer, pack_bits, pack_have, parse_have
from wire.messages import ChunkDescriptor, ChunkKind
from wire.peer import PeerClock
from wire.reliable import MAX_AHEAD, MAX_UNACKED, RESEND_MAX_S, RESEND_MIN_S, ReliableLane
from wire.states import RECEIVER_TRANSITIONS, SENDER_TRANSITIONS, advance, draw
from wire.transfer import ReceiveTransfer, num_segments

SESSION = bytes(16)


def texts(frames: list[bytes]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@given(st.permutations(list(range(6))), st.lists(st.integers(0, 5), max_size=6))
def test_messages_come_once_and_in_order_whatever_the_link_does(
    order: list[int], repeats: list[int]
) -> None:
    left, right = ReliableLane(SESSION), ReliableLane(SESSION)
    for number in range(6):
        left.send(b"%d" % number)
    frames = left.frames_to_send(now=0.0)
    came: list[bytes] = []
    for number in [*order, *repeats]:
        came += right.receive(frames[number])
    assert texts(came) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    (ack,) = right.frames_to_send(now=0.0)
    assert (ack.type, ack.sequence) == (FrameType.HEARTBEAT, 6)
    left.on_acked(ack.sequence)
    assert left.is_idle


def test_an_unacknowledged_message_is_repeated_with_growing_pauses() -> None:
    lane = ReliableLane(SESSION)
    lane.send(b"x")
    assert lane.next_timer() is None
    times = []
    now = 0.0
    for _ in range(7):
        assert len(lane.frames_to_send(now=now)) == 1
        times.append(now)
        due = lane.next_timer()
        assert due is not None
        assert lane.frames_to_send(now=due - 0.001) == []
        now = due
    pauses = [right - left for left, right in itertools.pairwise(times)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert (RESEND_MIN_S, RESEND_MAX_S) == (0.5, 8.0)
    lane.resend_all()
    assert len(lane.frames_to_send(now=now - 1.0)) == 1


def test_a_lane_takes_no_ack_of_what_was_never_sent_and_holds_no_endless_gap() -> None:
    lane = ReliableLane(SESSION)
    with pytest.raises(RemoteProtocolError):
        lane.on_acked(1)
    from wire.frames import Frame

    with pytest.raises(RemoteProtocolError):
        lane.receive(Frame(FrameType.MESSAGE, SESSION, b"", sequence=MAX_AHEAD))
    for _ in range(MAX_UNACKED):
        lane.send(b"")
    with pytest.raises(LocalProtocolError):
        lane.send(b"")


def test_timers_of_a_peer_fire_at_the_very_time_they_name() -> None:
    for start in (0.1, 1e6 + 0.3, 123456.789):
        clock = PeerClock(now=start, lost_after_s=60.0)
        clock.on_heard(now=start)
        due = clock.next_timer()
        assert due is not None
        assert clock.is_heartbeat_due(now=due)
        clock.on_spoke(now=start + 3.0)
        due = clock.next_timer()
        assert due is not None
        assert clock.check(now=due) is not None


def descriptor(total: int, size: int, digest: bytes) -> ChunkDescriptor:
    return ChunkDescriptor(ChunkKind.KV, "any", total, size, digest)


@given(st.binary(min_size=1, max_size=200), st.integers(1, 60), st.randoms(use_true_random=False))
def test_a_bitstream_comes_together_in_any_order(payload: bytes, size: int, source: object) -> None:
    transfer = ReceiveTransfer(descriptor(len(payload), size, bitstream_digest(payload)))
    order = list(range(1, num_segments(transfer.descriptor)))
    source.shuffle(order)  # type: ignore[attr-defined]
    for number in order:
        piece = payload[(number - 1) * size : number * size]
        assert not transfer.is_whole()
        assert transfer.add(number, piece) == len(piece)
        assert transfer.add(number, piece) == 0
        assert all(transfer.received[: transfer.cumulative])
    assert transfer.is_whole()
    assert transfer.cumulative == transfer.count
    assert transfer.take() == payload


def test_a_bitstream_with_another_digest_is_not_given_away() -> None:
    transfer = ReceiveTransfer(descriptor(1, 1, bytes(32)))
    transfer.add(1, b"x")
    assert transfer.take() is None


@given(st.lists(st.booleans(), min_size=1, max_size=80))
def test_the_have_map_survives_the_round_trip(received: list[bool]) -> None:
    item = HaveTransfer(1, 2, 3, False, pack_bits(bytes(received)))
    done = HaveTransfer(4, 0, 0, True, b"")
    read = parse_have(pack_have([item, done]))
    assert read == {(1, 2, 3): item, (4, 0, 0): done}
    assert [read[1, 2, 3].has(n) for n in range(len(received) + 9)] == [*received, *[False] * 9]
    assert read[4, 0, 0].has(12345)


def test_bytes_that_are_no_have_map_are_a_message_error() -> None:
    for data in (b"", b"\2\0\0\0{}", b"\x12\0\0\0" + b'{"transfers":[[1]]}'):
        with pytest.raises(MessageError):
            parse_have(data)


def test_subjects_are_those_of_the_permissions() -> None:
    session = bytes(range(16))
    name = session.hex()
    assert open_subject("clinic") == "kvtide.clinic.open"
    assert data_subject("clinic", "w-1", session) == f"kvtide.clinic.w.w-1.{name}.d"
    assert control_subject("clinic", "w-1", session) == f"kvtide.clinic.w.w-1.{name}.c"
    assert agent_inbox("clinic", "a_1") == "kvtide.clinic.i.a_1"
    assert reply_subject("kvtide.clinic.i.a_1", session) == f"kvtide.clinic.i.a_1.{name}"
    assert check_inbox("kvtide.clinic.i.a_1", tenant="clinic") == "kvtide.clinic.i.a_1"
    assert check_inbox("_INBOX.abc", tenant="clinic") == "_INBOX.abc"


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "a\n", "ü", "x" * 65, "a/b"])
def test_a_name_that_could_widen_a_subject_is_refused(name: str) -> None:
    with pytest.raises(LocalProtocolError):
        check_name(name, what="tenant")
    with pytest.raises(LocalProtocolError):
        open_subject(name)
    if "." not in name:
        with pytest.raises(LocalProtocolError):
            check_inbox(f"kvtide.clinic.i.{name}", tenant="clinic")


def test_a_move_that_is_not_in_the_table_is_an_error_of_whoever_made_it() -> None:
    with pytest.raises(LocalProtocolError, match="Token is not allowed in state opening"):
        advance(SENDER_TRANSITIONS, SenderState.OPENING, Token, is_local=True)
    with pytest.raises(RemoteProtocolError, match="Token is not allowed in state sending"):
        advance(SENDER_TRANSITIONS, SenderState.SENDING, Token, is_local=False)
    state = advance(RECEIVER_TRANSITIONS, ReceiverState.ASKED, Cancel, is_local=False)
    assert state is ReceiverState.CANCELLED


@pytest.mark.parametrize(
    ("table", "kind"),
    [(SENDER_TRANSITIONS, SenderState), (RECEIVER_TRANSITIONS, ReceiverState)],
    ids=["sender", "receiver"],
)
def test_every_state_has_a_row_and_can_be_reached(table: Any, kind: Any) -> None:
    assert set(table) == set(kind)
    reached = {next(iter(table))} | {end for moves in table.values() for end in moves.values()}
    assert reached == set(kind)
    assert draw(table).startswith("stateDiagram-v2")


def test_nothing_counts_against_a_peer_while_the_connection_is_down() -> None:
    clock = PeerClock(now=0.0, lost_after_s=60.0)
    clock.on_heard(now=0.0)
    clock.on_connection(is_up=False, now=1.0)
    assert clock.next_timer() is None
    assert clock.check(now=1000.0) is None
    assert not clock.is_heartbeat_due(now=1000.0)
    clock.on_connection(is_up=True, now=1000.0)
    assert clock.is_heartbeat_due(now=1000.0)
    assert clock.check(now=1002.9) is None
    assert clock.check(now=1003.0) is not None


def test_a_repeated_old_message_is_neither_delivered_nor_kept() -> None:
    left, right = ReliableLane(SESSION), ReliableLane(SESSION)
    for _ in range(3):
        left.send(b"x")
    frames = left.frames_to_send(now=0.0)
    assert len([message for frame in frames for message in right.receive(frame)]) == 3
    for frame in frames:
        assert right.receive(frame) == []
    assert not right._held


def test_the_acknowledgement_of_a_repeated_segment_times_nothing() -> None:
    meter = DeliveryMeter()
    first = meter.on_sent(1000, window_full=False, now=0.0)
    assert meter.on_acked([first], now=0.1) is not None
    again = meter.on_sent(1000, window_full=False, is_repeat=True, now=1.0)
    assert meter.on_acked([again], now=1.001) is None
    assert meter.min_rtt_s == 0.1
    assert meter.in_flight_bytes == 0
    assert meter.delivered_bytes == 2000


def test_every_ten_seconds_the_window_shrinks_until_a_bare_round_trip_was_seen() -> None:
    meter = DeliveryMeter()
    least = 4 * 1000
    now = 0.0
    for rtt_s in (0.05, *[0.2] * 51):
        mark = meter.on_sent(20_000, window_full=True, now=now)
        now += rtt_s
        meter.on_acked([mark], now=now)
    assert meter.min_rtt_s == 0.05
    assert meter.window_bytes(segment_bytes=1000) == least
    mark = meter.on_sent(1000, window_full=True, now=now)
    meter.on_acked([mark], now=now + 0.08)
    assert meter.min_rtt_s == pytest.approx(0.08)
    assert meter.window_bytes(segment_bytes=1000) > least
