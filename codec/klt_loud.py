"""Tokens that level set `klt` does not transform: in some groups of layers, a few tokens act as attention sinks.

They are found by their features, carry most of what the model is sensitive to, and look like no other token. So
they are coded beside the transform: per layer, side and head, a scale and a few bits per number. The list of a
group: a count, the tokens in ascending order, scales, packed symbols. docs/bitstream.md, "Loud tokens".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import reference
from codec.errors import CorruptBitstream

__all__ = ["LoudTokens", "pack_loud", "parse_loud"]

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class LoudTokens:
    """The loud tokens of a group."""

    tokens: I64
    """int64 [n], ascending, relative to the chunk."""

    values: F32
    """float32 [n, piece, dim]: keys before rotation and values; a piece is a layer's, side's and head's."""


def pack_loud(found: LoudTokens, bits: int) -> bytes:
    """Return the bytes of a group's list, an even number of them."""
    half = np.float32(2 ** (bits - 1) - 1)
    count = len(found.values)
    scale = reference.to_half(np.abs(found.values).max(axis=2, initial=0) / half)
    unit = scale.astype(np.float32)[:, :, None]
    symbols = np.rint(
        np.divide(found.values, unit, out=np.zeros_like(found.values), where=unit > 0)
    )
    symbols = (np.clip(symbols, -half, half) + half).astype(np.uint8).reshape(-1)
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint8)
    packed = np.packbits((symbols[:, None] >> shifts) & 1).tobytes()
    head = np.asarray([count], "<u4").tobytes() + found.tokens.astype("<u2").tobytes()
    data = head + scale.astype("<f2").tobytes() + packed
    return data + bytes(len(data) % 2)


def parse_loud(
    data: memoryview, num_tokens: int, pieces: int, dim: int, bits: int
) -> tuple[LoudTokens, int]:
    """Undo `pack_loud`; also returns the number of bytes read.

    Raises:
        CorruptBitstream: cut, or not what an encoder writes.
    """
    if len(data) < 4:
        raise CorruptBitstream("a list of loud tokens is cut")
    count = int.from_bytes(data[:4], "little")
    if count > num_tokens:
        raise CorruptBitstream(f"{count} loud tokens in a chunk of {num_tokens}")
    packed_bytes = -(-count * pieces * dim * bits // 8)
    total = 4 + 2 * count + 2 * count * pieces + packed_bytes
    total += total % 2
    if total > len(data):
        raise CorruptBitstream("a list of loud tokens is cut")
    tokens = np.frombuffer(data, "<u2", count, 4).astype(np.int64)
    if np.any(np.diff(tokens) <= 0) or (count and tokens[-1] >= num_tokens):
        raise CorruptBitstream("loud tokens are out of order")
    scale_bits = np.frombuffer(data, "<u2", count * pieces, 4 + 2 * count)
    if scale_bits.size and int(scale_bits.max()) > 0x7BFF:
        raise CorruptBitstream("a loud token has a scale that no encoder writes")
    scale = scale_bits.view(np.float16).astype(np.float32).reshape(count, pieces, 1)
    packed = np.frombuffer(data, np.uint8, packed_bytes, 4 + 2 * count + 2 * count * pieces)
    fields = np.unpackbits(packed, count=count * pieces * dim * bits).reshape(-1, bits)
    weights = 1 << np.arange(bits - 1, -1, -1)
    symbols = (fields @ weights).astype(np.float32) - np.float32(2 ** (bits - 1) - 1)
    return LoudTokens(tokens, symbols.reshape(count, pieces, dim) * scale), total
