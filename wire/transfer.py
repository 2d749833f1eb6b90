"""One bitstream on its way, at both ends.

Owns the cutting into segments and the putting together again. Invariant: a transfer is whole only when
every segment is there and the digest matches. Must not know: sessions, windows.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class InFlight:
    """A segment that was sent and not answered for."""

    sequence: int
    mark: SentMark
    order: int
    """Counts all segments of the session in the order of sending."""


class SendTransfer:
    """A bitstream at the sender."""

    def __init__(
        self, *, chunk: int, part: int, epoch: int, descriptor: ChunkDescriptor, payload: bytes
    ) -> None:
        self.chunk = chunk
        self.part = part
        self.epoch = epoch
        self.descriptor = descriptor
        self.count = num_segments(descriptor)
        self.acked_bytes = 0
        """Bytes of segments that the receiver has; the descriptor does not count."""
        self.lost: deque[int] = deque()
        """Segments to send again."""
        self.in_flight: dict[int, InFlight] = {}
        self.is_given_up = False
        self.started_at_s: float | None = None
        self._payload = payload
        self._next = 0
        self._num_acked = 0
        self._acked = bytearray(self.count)

    @property
    def key(self) -> tuple[int, int, int]:
        """Chunk, part and epoch."""
        return self.chunk, self.part, self.epoch

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were never sent, and will be."""
        return 0 if self.is_given_up else self.descriptor.total_bytes - self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes sent at least once; the descriptor does not count."""
        return self._bytes_below(self._next)

    @property
    def is_acked(self) -> bool:
        """Whether the receiver has every segment."""
        return self._num_acked == self.count

    @property
    def next_to_send(self) -> int | None:
        """A lost segment, else the first that was never sent; None when there is nothing."""
        if self.is_given_up:
            return None
        if self.lost:
            return self.lost[0]
        return self._next if self._next < self.count else None

    def segment(self, sequence: int) -> bytes:
        """Bytes of a segment."""
        if sequence == 0:
            return pack_body(self.descriptor)
        size = self.descriptor.segment_bytes
        return self._payload[(sequence - 1) * size : sequence * size]

    def on_sent(self, sequence: int, entry: InFlight) -> None:
        """Take note that ``next_to_send`` went out."""
        if self.lost:
            self.lost.popleft()
        else:
            self._next += 1
        if self.started_at_s is None:
            self.started_at_s = entry.mark.sent_at_s
        self.in_flight[sequence] = entry

    def on_arrived(self, cumulative: int, bitmap: int, sequence: int) -> None:
        """Take in an acknowledgement; of segments that count as lost, too."""
        for candidate in [*self.in_flight, *self.lost]:
            offset = candidate - cumulative
            if (
                offset < 0
                or candidate == sequence
                or (offset < BITMAP_BITS and bitmap >> offset & 1)
            ):
                self.on_found(candidate)

    def on_found(self, sequence: int) -> None:
        """Take in that a segment arrived."""
        self.in_flight.pop(sequence, None)
        if self._acked[sequence]:
            return
        self._acked[sequence] = 1
        self._num_acked += 1
        self.acked_bytes += self._bytes_below(sequence + 1) - self._bytes_below(sequence)
        if sequence in self.lost:
            self.lost.remove(sequence)

    def on_lost(self, sequence: int) -> None:
        """Take in that a segment did not arrive and never will."""
        del self.in_flight[sequence]
        if not self.is_given_up and not self._acked[sequence]:
            self.lost.append(sequence)

    def give_up(self) -> None:
        """Send nothing more, and let go of the payload."""
        self.is_given_up = True
        self.lost.clear()
        self._payload = b""

    def _bytes_below(self, sequence: int) -> int:
        """Payload bytes of the segments before one."""
        size = max(0, sequence - 1) * self.descriptor.segment_bytes
        return min(size, self.descriptor.total_bytes)


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
