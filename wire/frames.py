"""Frames: one NATS message each.

Owns the fixed header and its checks. Invariant: ``parse(pack(frame)) == frame``, and any other bytes
raise ``FrameError`` before anything is allocated. Must not know: what a payload means.

Layout, little-endian, 44 bytes, then the payload (docs/wire-protocol.md):

    magic  version type flags part reserved session chunk epoch sequence length crc32
    2s     u8      u8   u8    u8   u16      16s     u32   u32   u32      u32    u32
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

from wire.errors import FrameError, LocalProtocolError, PayloadTooLarge

MAGIC = b"KT"
VERSION = 1
_HEADER = struct.Struct("<2sBBBBH16sIIIII")
HEADER_BYTES = _HEADER.size
SESSION_ID_BYTES = 16
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Source: NATS documentation advises against messages above 8 MB."""

_U32_MAX = 0xFFFF_FFFF
assert HEADER_BYTES == 44


class FrameType(enum.IntEnum):
    """What a frame is; the values are on the wire and never change."""

    OPEN = 1
    ACCEPT = 2
    REFUSE = 3
    SEGMENT = 4
    """Part of a chunk; sequence 0 is the chunk's descriptor, n > 0 its n-th segment."""
    ACK = 5
    HAVE_QUERY = 6
    """Travels behind the data, so that its answer says what was lost before it."""
    HAVE = 7
    MESSAGE = 8
    """A control message of ``wire.messages``, numbered and resent until acknowledged."""
    HEARTBEAT = 9
    """Carries nothing but the acknowledgement of control messages (in ``sequence``)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on the wire."""

    type: FrameType
    session: bytes
    """Random id of the session, 16 bytes."""
    payload: bytes = b""
    chunk: int = 0
    """Index of the chunk in the context; 0 where a frame concerns none."""
    part: int = 0
    """0: the chunk's base bitstream; n > 0: its n-th refinement."""
    epoch: int = 0
    """Attempt at this (chunk, part); a higher one replaces the lower."""
    sequence: int = 0
    """Number of the segment, message or query."""


def pack(frame: Frame, *, max_payload: int = MAX_PAYLOAD_BYTES) -> bytes:
    """Give the bytes of a frame.

    Raises:
        PayloadTooLarge: the frame is above ``max_payload``.
        LocalProtocolError: a field is out of range.
    """
    if len(frame.session) != SESSION_ID_BYTES:
        raise LocalProtocolError(f"session id has {len(frame.session)} bytes")
    size = HEADER_BYTES + len(frame.payload)
    if size > max_payload:
        raise PayloadTooLarge(frame.type.name, size_bytes=size, max_payload=max_payload)
    numbers = (frame.chunk, frame.epoch, frame.sequence)
    if not all(0 <= number <= _U32_MAX for number in numbers) or not 0 <= frame.part <= 255:
        raise LocalProtocolError(f"a number of the frame is out of range: {numbers}, {frame.part}")
    header = _pack_header(frame, crc=0)
    crc = zlib.crc32(frame.payload, zlib.crc32(header))
    return _pack_header(frame, crc=crc) + frame.payload


def parse(data: bytes | bytearray | memoryview) -> Frame:
    """Read a frame from one whole NATS message.

    Raises:
        FrameError: not our magic or version, a wrong length or checksum, an unknown type.
    """
    if not HEADER_BYTES <= len(data) <= HEADER_BYTES + MAX_PAYLOAD_BYTES:
        raise FrameError(f"message of {len(data)} bytes is not a frame")
    view = memoryview(data)
    (magic, version, kind, flags, part, reserved, session, chunk, epoch, sequence, length, crc) = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise FrameError(f"message begins with {magic!r}, not {MAGIC!r}: not a kvtide frame")
    if version != VERSION:
        raise FrameError(f"frame has version {version}, this program speaks {VERSION}")
    if length != len(data) - HEADER_BYTES:
        raise FrameError(f"frame says {length} payload bytes, {len(data) - HEADER_BYTES} are there")
    # The checksum covers the header with its own field at zero, then the payload.
    summed = zlib.crc32(bytes(4), zlib.crc32(view[: HEADER_BYTES - 4]))
    if zlib.crc32(view[HEADER_BYTES:], summed) != crc:
        raise FrameError("frame does not match its checksum")
    try:
        frame_type = FrameType(kind)
    except ValueError:
        raise FrameError(f"frame has unknown type {kind}") from None
    if flags or reserved:
        raise FrameError(f"frame sets reserved bits: flags {flags}, reserved {reserved}")
    return Frame(
        type=frame_type,
        session=session,
        payload=bytes(view[HEADER_BYTES:]),
        chunk=chunk,
        part=part,
        epoch=epoch,
        sequence=sequence,
    )


def _pack_header(frame: Frame, *, crc: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        frame.type,
        0,
        frame.part,
        0,
        frame.session,
        frame.chunk,
        frame.epoch,
        frame.sequence,
        len(frame.payload),
        crc,
    )
