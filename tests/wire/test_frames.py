from __future__ import annotations

import contextlib
import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from wire import FrameError, LocalProtocolError, PayloadTooLarge, WireError
from wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame, FrameType, pack, parse

GOLDEN = Path(__file__).parent / "golden" / "frames-v1.json"
U32 = st.integers(0, 2**32 - 1)
FRAMES = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    session=st.binary(min_size=16, max_size=16),
    payload=st.binary(max_size=300),
    chunk=U32,
    part=st.integers(0, 255),
    epoch=U32,
    sequence=U32,
)


@given(FRAMES)
def test_every_frame_survives_the_round_trip(frame: Frame) -> None:
    data = pack(frame)
    assert len(data) == HEADER_BYTES + len(frame.payload)
    assert parse(data) == frame
    assert parse(memoryview(data)) == frame
    assert parse(bytearray(data)) == frame


def golden_frames() -> dict[str, tuple[Frame, str]]:
    entries = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return {
        name: (
            Frame(
                type=FrameType[entry["type"]],
                session=bytes.fromhex(entry["session"]),
                payload=bytes.fromhex(entry["payload"]),
                chunk=entry["chunk"],
                part=entry["part"],
                epoch=entry["epoch"],
                sequence=entry["sequence"],
            ),
            entry["bytes"],
        )
        for name, entry in entries.items()
    }


def test_golden_frames_cover_every_type() -> None:
    assert {frame.type for frame, _ in golden_frames().values()} == set(FrameType)


@pytest.mark.parametrize("name", list(golden_frames()))
def test_golden_frame_is_written_and_read_as_ever(name: str) -> None:
    frame, data = golden_frames()[name]
    assert pack(frame).hex() == data
    assert parse(bytes.fromhex(data)) == frame


@pytest.mark.parametrize("name", list(golden_frames()))
def test_every_truncation_of_a_golden_frame_is_a_frame_error(name: str) -> None:
    data = bytes.fromhex(golden_frames()[name][1])
    for length in range(len(data)):
        with pytest.raises(FrameError):
            parse(data[:length])
    with pytest.raises(FrameError):
        parse(data + b"\0")


@pytest.mark.parametrize("name", list(golden_frames()))
def test_every_bit_flip_of_a_golden_frame_is_a_frame_error(name: str) -> None:
    data = bytes.fromhex(golden_frames()[name][1])
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            parse(damaged)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        parse(data)


@given(FRAMES, st.data())
def test_a_frame_with_a_right_checksum_and_any_header_is_a_frame_or_a_frame_error(
    frame: Frame, data: st.DataObject
) -> None:
    raw = bytearray(pack(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, HEADER_BYTES - 5))] = data.draw(st.integers(0, 255))
    struct.pack_into("<I", raw, HEADER_BYTES - 4, 0)
    struct.pack_into("<I", raw, HEADER_BYTES - 4, zlib.crc32(raw))
    with contextlib.suppress(FrameError):
        parse(raw)


def reforge(frame: Frame, offset: int, value: int) -> bytes:
    raw = bytearray(pack(frame))
    raw[offset] = value
    struct.pack_into("<I", raw, HEADER_BYTES - 4, 0)
    struct.pack_into("<I", raw, HEADER_BYTES - 4, zlib.crc32(raw))
    return bytes(raw)


@pytest.mark.parametrize(
    ("offset", "value", "sentence"),
    [
        (0, 0x4E, "not a kvtide frame"),
        (2, 9, "version 9, this program speaks 1"),
        (3, 0, "unknown type 0"),
        (3, 200, "unknown type 200"),
        (4, 1, "reserved bits"),
        (6, 1, "reserved bits"),
    ],
)
def test_a_wrong_field_is_named(offset: int, value: int, sentence: str) -> None:
    frame = Frame(FrameType.HEARTBEAT, bytes(16))
    with pytest.raises(FrameError, match=sentence):
        parse(reforge(frame, offset, value))


def test_a_message_above_the_limit_is_not_looked_at() -> None:
    with pytest.raises(FrameError, match="is not a frame"):
        parse(bytes(HEADER_BYTES + MAX_PAYLOAD_BYTES + 1))


def test_a_frame_above_the_servers_limit_is_not_made() -> None:
    frame = Frame(FrameType.SEGMENT, bytes(16), bytes(1000))
    assert len(pack(frame, max_payload=1000 + HEADER_BYTES)) == 1000 + HEADER_BYTES
    with pytest.raises(
        PayloadTooLarge, match="SEGMENT is 1044 bytes, the server takes 1043"
    ) as caught:
        pack(frame, max_payload=999 + HEADER_BYTES)
    assert (caught.value.size_bytes, caught.value.max_payload) == (1044, 1043)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameType.ACK, b"short"),
        Frame(FrameType.ACK, bytes(16), chunk=-1),
        Frame(FrameType.ACK, bytes(16), chunk=2**32),
        Frame(FrameType.ACK, bytes(16), epoch=2**32),
        Frame(FrameType.ACK, bytes(16), sequence=-1),
        Frame(FrameType.ACK, bytes(16), part=256),
        Frame(FrameType.ACK, bytes(16), part=-1),
    ],
)
def test_a_field_out_of_range_is_our_own_error(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        pack(frame)


def test_all_errors_have_one_root() -> None:
    assert issubclass(FrameError, WireError)
    assert issubclass(PayloadTooLarge, WireError)
