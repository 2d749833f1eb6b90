"""Bitstream v1 to v3: the envelope of an encoded chunk. Byte by byte in docs/bitstream.md.

Owns the header, the block offset table and the checksums. Knows nothing of what is inside a block.
Invariant: `parse` returns only what it has checked; it allocates nothing in proportion to a count
before the bytes that back the count are there.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec.errors import CodecError, CorruptBitstream, UnsupportedVersion
from codec.geometry import MAX_CHUNK_TOKENS, BlockGrid, Geometry
from codec.levels import REFINEMENT_LEVELS, LevelSet, level_name, refinement_name

__all__ = [
    "HEADER_BYTES",
    "VERSION",
    "Bitstream",
    "BitstreamInfo",
    "inspect_bitstream",
    "pack",
    "parse",
]

MAGIC = b"KVTB"
VERSION = 1
KLT_VERSION = 2
"""Version of level set `klt`: its blocks follow the profile's groups of layers, not the geometry's heads."""

REFINEMENT_VERSION = 3
"""Version of refinements of level set `klt`: the header's last field says which level they refine."""

HEADER_BYTES = 128
NO_PROFILE = bytes(32)
"""Profile digest of the level sets that need none."""

_FIELDS = struct.Struct("<4sHHBBHIIIIIQQQ32s32s")  # all but the two checksums
_CHECKSUMS = struct.Struct("<II")  # CRC-32 of the body, then of the 124 bytes before it
assert _FIELDS.size + _CHECKSUMS.size == HEADER_BYTES

U32Array = npt.NDArray[np.uint32]
U8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Bitstream:
    """A parsed and checked bitstream."""

    level_set: LevelSet
    level_index: int
    geometry: Geometry
    token_start: int
    token_stop: int
    block_tokens: int
    model_digest: bytes
    profile_digest: bytes
    offsets: U32Array
    """uint32 [num_blocks + 1]: block i is payload[offsets[i]:offsets[i + 1]]."""

    payload: U8Array
    """uint8, all blocks one after the other; a view of the bytes that were parsed."""

    base_index: int | None = None
    """Of a refinement: the level that it makes into `level_index`."""

    @property
    def level(self) -> str:
        """The name of the level, or of the refinement."""
        if self.base_index is not None:
            return refinement_name(self.base_index, self.level_index)
        return level_name(self.level_set, self.level_index)

    @property
    def version(self) -> int:
        """The format's version, which the level set decides."""
        return _version_of(self.level_set, is_refinement=self.base_index is not None)

    @property
    def num_blocks(self) -> int:
        """Blocks in the payload."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.token_stop - self.token_start

    @property
    def grid(self) -> BlockGrid:
        """How the chunk is cut into blocks."""
        return BlockGrid(self.geometry, self.num_tokens, self.block_tokens)


@dataclass(frozen=True, slots=True)
class BitstreamInfo:
    """What `kvtide codec inspect` prints."""

    version: int
    level: str
    geometry: Geometry
    token_start: int
    token_stop: int
    block_tokens: int
    num_blocks: int
    model_digest: bytes
    profile_digest: bytes
    total_bytes: int
    overhead_bytes: int
    """Header and offset table."""

    bits_per_element: float
    """Everything counted."""

    bytes_by_layer: tuple[tuple[int, int], ...]
    """Per layer: payload bytes of K and of V; empty where blocks hold both, as in level set `klt`."""


def pack(bitstream: Bitstream) -> bytes:
    """Return the bytes of a bitstream.

    Raises:
        CodecError: the payload is 4 GiB or more, which the offset table cannot express.
    """
    num_blocks = bitstream.num_blocks
    if bitstream.version == VERSION and num_blocks != bitstream.grid.num_blocks:
        raise AssertionError("one offset per block and one for the end")
    total = HEADER_BYTES + 4 * (num_blocks + 1) + bitstream.payload.nbytes
    if bitstream.payload.nbytes >= 2**32:
        raise CodecError(f"the encoded chunk has {total} bytes; use shorter chunks (limit 4 GiB)")
    table = bitstream.offsets.astype("<u4").tobytes()
    geometry = bitstream.geometry
    fields = _FIELDS.pack(
        MAGIC,
        bitstream.version,
        HEADER_BYTES,
        bitstream.level_set.wire_id,
        bitstream.level_index,
        bitstream.base_index or 0,
        geometry.num_layers,
        geometry.num_kv_heads,
        geometry.head_dim,
        bitstream.block_tokens,
        num_blocks,
        bitstream.token_start,
        bitstream.token_stop,
        total,
        bitstream.model_digest,
        bitstream.profile_digest,
    )
    payload = bitstream.payload.data
    body_crc = zlib.crc32(payload, zlib.crc32(table))
    fields += struct.pack("<I", body_crc)
    fields += struct.pack("<I", zlib.crc32(fields))
    return b"".join((fields, table, payload))


def parse(data: bytes | bytearray | memoryview) -> Bitstream:
    """Check and take apart an encoded chunk.

    Args:
        data: the whole bitstream, nothing before it and nothing after.

    Raises:
        CorruptBitstream: not ours, cut, changed, or inconsistent.
        UnsupportedVersion: ours, of another version.
    """
    view = memoryview(data).cast("B")
    if len(view) < 8 or view[:4] != MAGIC:
        raise CorruptBitstream(
            f"these {len(view)} bytes are not a kvtide bitstream: no {MAGIC!r} at the start"
        )
    version = int.from_bytes(view[4:6], "little")
    if version not in (VERSION, KLT_VERSION, REFINEMENT_VERSION):
        raise UnsupportedVersion("the bitstream", expected=REFINEMENT_VERSION, actual=version)
    if len(view) < HEADER_BYTES:
        raise CorruptBitstream(
            f"the bitstream ends after {len(view)} bytes, inside its {HEADER_BYTES}-byte header"
        )
    (
        _,
        _,
        header_bytes,
        level_set_id,
        level_index,
        base_index,
        num_layers,
        num_kv_heads,
        head_dim,
        block_tokens,
        num_blocks,
        token_start,
        token_stop,
        total_bytes,
        model_digest,
        profile_digest,
    ) = _FIELDS.unpack_from(view)
    body_crc, header_crc = _CHECKSUMS.unpack_from(view, _FIELDS.size)
    if zlib.crc32(view[: HEADER_BYTES - 4]) != header_crc:
        raise CorruptBitstream("the bitstream's header does not match its checksum")
    if header_bytes != HEADER_BYTES:
        raise CorruptBitstream(f"a header of {header_bytes} bytes; all have {HEADER_BYTES}")
    is_refinement = version == REFINEMENT_VERSION
    if (base_index != level_index + REFINEMENT_LEVELS) if is_refinement else (base_index != 0):
        raise CorruptBitstream(
            f"version {version}, level {level_index}: {base_index} is no level that it refines"
        )
    if total_bytes != len(view):
        raise CorruptBitstream(
            f"the bitstream has {len(view)} bytes; its header says {total_bytes}"
        )
    try:
        level_set = LevelSet.from_wire_id(level_set_id)
        geometry = Geometry(num_layers, num_kv_heads, head_dim)
    except ValueError as error:
        raise CorruptBitstream(f"impossible header: {error}") from error
    num_tokens = token_stop - token_start
    if not 1 <= num_tokens <= MAX_CHUNK_TOKENS or token_stop >= 2**63:
        raise CorruptBitstream(f"impossible token range {token_start} to {token_stop}")
    if not 1 <= block_tokens <= MAX_CHUNK_TOKENS:
        raise CorruptBitstream(f"impossible block of {block_tokens} tokens")
    if version != _version_of(level_set, is_refinement=is_refinement):
        raise CorruptBitstream(f"level set {level_set} in a bitstream of version {version}")
    grid = BlockGrid(geometry, num_tokens, block_tokens)
    if version == VERSION and num_blocks != grid.num_blocks:
        raise CorruptBitstream(f"{num_blocks} blocks where the geometry makes {grid.num_blocks}")
    payload_start = HEADER_BYTES + 4 * (num_blocks + 1)
    if payload_start > len(view):
        raise CorruptBitstream(
            f"the offset table of {num_blocks} blocks does not fit into {len(view)} bytes"
        )
    if zlib.crc32(view[HEADER_BYTES:]) != body_crc:
        raise CorruptBitstream("the bitstream's body does not match its checksum")
    offsets = np.frombuffer(view, dtype="<u4", count=num_blocks + 1, offset=HEADER_BYTES)
    payload = np.frombuffer(view, dtype=np.uint8, offset=payload_start)
    if offsets[0] != 0 or offsets[-1] != payload.nbytes or bool(np.any(offsets[1:] < offsets[:-1])):
        raise CorruptBitstream("the offset table does not cover the payload in order")
    return Bitstream(
        level_set=level_set,
        level_index=level_index,
        geometry=geometry,
        token_start=token_start,
        token_stop=token_stop,
        block_tokens=block_tokens,
        model_digest=model_digest,
        profile_digest=profile_digest,
        offsets=offsets.astype(np.uint32),
        payload=payload,
        base_index=base_index if is_refinement else None,
    )


def inspect_bitstream(data: bytes | bytearray | memoryview) -> BitstreamInfo:
    """Describe an encoded chunk without decoding it; needs no profile.

    Raises:
        CorruptBitstream: not ours, cut, changed, or inconsistent.
        UnsupportedVersion: ours, of another version.
    """
    stream = parse(data)
    geometry = stream.geometry
    sizes = np.diff(stream.offsets.astype(np.int64))
    by_layer: tuple[tuple[int, int], ...] = ()
    if stream.version == VERSION:
        by_layer = tuple(
            (int(k), int(v)) for k, v in sizes.reshape(geometry.num_layers, 2, -1).sum(axis=2)
        )
    total = memoryview(data).nbytes
    return BitstreamInfo(
        version=stream.version,
        level=stream.level,
        geometry=geometry,
        token_start=stream.token_start,
        token_stop=stream.token_stop,
        block_tokens=stream.block_tokens,
        num_blocks=stream.num_blocks,
        model_digest=stream.model_digest,
        profile_digest=stream.profile_digest,
        total_bytes=total,
        overhead_bytes=total - stream.payload.nbytes,
        bits_per_element=8.0 * total / (stream.num_tokens * geometry.elements_per_token),
        bytes_by_layer=by_layer,
    )


def _version_of(level_set: LevelSet, *, is_refinement: bool) -> int:
    """Return the version that a level set is written in; 0 where there is none."""
    if is_refinement:
        return REFINEMENT_VERSION if level_set is LevelSet.KLT else 0
    return KLT_VERSION if level_set is LevelSet.KLT else VERSION
