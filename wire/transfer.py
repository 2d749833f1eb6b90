"""One bitstream on its way, at both ends.

Owns the cutting into segments and the putting together again. Invariant: a transfer is whole only when
every segment is there and the digest matches. Must not know: sessions, windows.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from dataclasses import dataclass, field

from wire.delivery import SentMark
from wire.errors import RemoteProtocolError
from wire.messages import ChunkDescriptor, ChunkKind, pack_body

DIGEST_BYTES = 32
ACK = struct.Struct("<IQQd")
"""Payload of an ACK: cumulative segments, bitmap of the 64 after them, credit limit in bytes, the
receiver's clock in seconds since it accepted."""
BITMAP_BITS = 64


def bitstream_digest(payload: bytes) -> bytes:
    """Digest by which a receiver knows a whole bitstream: BLAKE2b-256."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def num_segments(descriptor: ChunkDescriptor) -> int:
    """Segments of a transfer, the descriptor (segment 0) included."""
    return 1 + -(-descriptor.total_bytes // descriptor.segment_bytes)


@dataclass(frozen=True, slots=True)
class OutgoingChunk:
    """A bitstream that the agent's shell offers."""

    chunk: int
    level: str
    payload: bytes
    part: int = 0
    kind: ChunkKind = ChunkKind.KV
    digest: bytes = b""
    """BLAKE2b-256 of the payload where the store knows it; computed otherwise."""


@dataclass(slots=True)
class SendTransfer:
    """A bitstream at the sender."""

    chunk: int
    part: int
    epoch: int
    descriptor: ChunkDescriptor
    payload: bytes
    next_segment: int = 0
    """First segment that was never sent."""
    lost: deque[int] = field(default_factory=deque)
    """Segments to send again."""
    marks: dict[int, tuple[SentMark, int, bool]] = field(default_factory=dict)
    """In flight: the meter's mark, the order of sending, and whether it was sent before."""
    acked: set[int] = field(default_factory=set)
    started_at_s: float | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Chunk, part and epoch."""
        return self.chunk, self.part, self.epoch

    @property
    def count(self) -> int:
        """Segments in all."""
        return num_segments(self.descriptor)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were never sent."""
        sent = max(0, self.next_segment - 1) * self.descriptor.segment_bytes
        return max(0, self.descriptor.total_bytes - sent)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent at least once; the descriptor does not count."""
        return self.descriptor.total_bytes - self.unsent_bytes

    @property
    def is_acked(self) -> bool:
        """Whether every segment is acknowledged."""
        return len(self.acked) == self.count

    def segment(self, sequence: int) -> bytes:
        """Bytes of a segment."""
        if sequence == 0:
            return pack_body(self.descriptor)
        size = self.descriptor.segment_bytes
        return self.payload[(sequence - 1) * size : sequence * size]


class ReceiveTransfer:
    """A bitstream at the receiver."""

    def __init__(self, descriptor: ChunkDescriptor) -> None:
        self.descriptor = descriptor
        self.count = num_segments(descriptor)
        self.is_complete = False
        self.received = bytearray(self.count)
        self.received[0] = 1
        self.num_received = 1
        self.buffered_bytes = 0
        self._segments: dict[int, bytes] = {}
        self._hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._cumulative = 1
        self._hash_on()

    @property
    def cumulative(self) -> int:
        """Segments that are there without a gap, from segment 0."""
        return self._cumulative

    @property
    def bitmap(self) -> int:
        """Of the 64 segments from the first missing one on, bit i is segment ``cumulative + i``."""
        window = self.received[self._cumulative : self._cumulative + BITMAP_BITS]
        return sum(1 << index for index, there in enumerate(window) if there)

    def add(self, sequence: int, payload: bytes) -> int:
        """Take in a segment; return how many bytes are new.

        Raises:
            RemoteProtocolError: no such segment, or it has another size than the descriptor says.
        """
        total, size = self.descriptor.total_bytes, self.descriptor.segment_bytes
        if not 1 <= sequence < self.count:
            raise RemoteProtocolError(f"segment {sequence} of a transfer of {self.count}")
        expected = min(size, total - (sequence - 1) * size)
        if len(payload) != expected:
            raise RemoteProtocolError(
                f"segment {sequence} has {len(payload)} bytes, {expected} belong there"
            )
        if self.received[sequence]:
            return 0
        self.received[sequence] = 1
        self.num_received += 1
        self._segments[sequence] = payload
        self.buffered_bytes += expected
        self._hash_on()
        return expected

    def is_whole(self) -> bool:
        """Whether every segment is there."""
        return self.num_received == self.count

    def take(self) -> bytes | None:
        """Give the bitstream away, once; None if it does not match its digest."""
        self.is_complete = True
        self.buffered_bytes = 0
        segments, self._segments = self._segments, {}
        if self._hasher.digest() != self.descriptor.digest:
            return None
        return b"".join(segments[sequence] for sequence in range(1, self.count))

    def _hash_on(self) -> None:
        # Hashing along the contiguous front spreads the work over the arrivals.
        while self._cumulative < self.count and self.received[self._cumulative]:
            self._hasher.update(self._segments[self._cumulative])
            self._cumulative += 1
