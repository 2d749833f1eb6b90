"""The have-map: what a receiver holds of every transfer.

Owns its encoding. Invariant: reading it raises ``MessageError`` or gives a valid map. Must not know:
who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wire.messages import pack_body, parse_body


@dataclass(frozen=True, slots=True)
class HaveTransfer:
    """What is there of one transfer."""

    chunk: int
    part: int
    epoch: int
    is_complete: bool
    received: bytes
    """One bit a segment, least significant first; empty when complete."""

    def has(self, sequence: int) -> bool:
        """Whether a segment is there."""
        if self.is_complete:
            return True
        index = sequence >> 3
        return index < len(self.received) and bool(self.received[index] >> (sequence & 7) & 1)


@dataclass(frozen=True, slots=True)
class _HaveMap:
    transfers: tuple[HaveTransfer, ...]


def pack_have(transfers: Iterable[HaveTransfer]) -> bytes:
    """Give the payload of a HAVE frame."""
    return pack_body(_HaveMap(tuple(transfers)))


def parse_have(data: bytes) -> dict[tuple[int, int, int], HaveTransfer]:
    """Read a HAVE payload, by chunk, part and epoch.

    Raises:
        MessageError: it is not a have-map.
    """
    body, _ = parse_body(data, _HaveMap)
    return {(item.chunk, item.part, item.epoch): item for item in body.transfers}


def pack_bits(received: bytes | bytearray) -> bytes:
    """Pack one byte a segment into one bit a segment."""
    packed = bytearray(-(-len(received) // 8))
    for sequence, there in enumerate(received):
        if there:
            packed[sequence >> 3] |= 1 << (sequence & 7)
    return bytes(packed)
