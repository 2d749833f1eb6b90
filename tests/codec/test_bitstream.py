from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from codec import CodecError, CorruptBitstream, UnsupportedVersion, inspect_bitstream
from codec.bitstream import HEADER_BYTES, Bitstream, pack, parse
from codec.geometry import BlockGrid, Geometry
from codec.levels import LevelSet

STREAM = Bitstream(
    level_set=LevelSet.CACHEGEN,
    level_index=2,
    geometry=Geometry(2, 1, 4),
    token_start=10,
    token_stop=35,
    block_tokens=20,
    model_digest=bytes(range(32)),
    profile_digest=bytes(range(32, 64)),
    offsets=np.arange(9, dtype=np.uint32) * 3,
    payload=np.arange(24, dtype=np.uint8),
)
DATA = pack(STREAM)


def _sealed(data: bytearray) -> bytes:
    data[120:124] = struct.pack("<I", zlib.crc32(data[HEADER_BYTES:]))
    data[124:128] = struct.pack("<I", zlib.crc32(data[:124]))
    return bytes(data)


def _with(at: int, value: bytes) -> bytes:
    data = bytearray(DATA)
    data[at : at + len(value)] = value
    return _sealed(data)


def test_header_lies_where_the_document_says() -> None:
    assert DATA[:8] == b"KVTB" + struct.pack("<HH", 1, 128)
    assert DATA[8:12] == bytes([3, 2, 0, 0])
    assert struct.unpack_from("<5I", DATA, 12) == (2, 1, 4, 20, 8)
    assert struct.unpack_from("<3Q", DATA, 32) == (10, 35, 128 + 36 + 24)
    assert DATA[56:88] == bytes(range(32))
    assert DATA[88:120] == bytes(range(32, 64))
    assert struct.unpack_from("<2I", DATA, 120) == (zlib.crc32(DATA[128:]), zlib.crc32(DATA[:124]))
    assert struct.unpack_from("<9I", DATA, 128) == tuple(range(0, 27, 3))
    assert DATA[164:] == bytes(range(24))


def test_parse_undoes_pack() -> None:
    parsed = parse(DATA)
    for name in (
        "level_set",
        "level_index",
        "geometry",
        "token_start",
        "token_stop",
        "block_tokens",
    ):
        assert getattr(parsed, name) == getattr(STREAM, name)
    np.testing.assert_array_equal(parsed.offsets, STREAM.offsets)
    np.testing.assert_array_equal(parsed.payload, STREAM.payload)
    assert parsed.level == "cachegen:2"
    assert inspect_bitstream(DATA).bytes_by_layer == ((6, 6), (6, 6))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (6, struct.pack("<H", 127), "header of 127 bytes"),
        (8, b"\x00", "no level set has number 0"),
        (8, b"\x63", "no level set has number 99"),
        (10, b"\x01", "1 is no level that it refines"),
        (12, struct.pack("<I", 0), "num_layers is 0"),
        (12, struct.pack("<I", 3), "8 blocks where the geometry makes 12"),
        (16, struct.pack("<I", 70000), "num_kv_heads is 70000"),
        (20, struct.pack("<I", 2**32 - 1), "head_dim"),
        (24, struct.pack("<I", 0), "block of 0 tokens"),
        (24, struct.pack("<I", 70000), "block of 70000 tokens"),
        (28, struct.pack("<I", 2**32 - 1), "4294967295 blocks"),
        (32, struct.pack("<Q", 35), "token range 35 to 35"),
        (32, struct.pack("<Q", 36), "token range 36 to 35"),
        (40, struct.pack("<Q", 10 + 65537), "token range"),
        (40, struct.pack("<Q", 2**64 - 1), "token range"),
        (48, struct.pack("<Q", 187), "its header says 187"),
        (128, struct.pack("<I", 1), "offset table"),
        (132, struct.pack("<I", 7), "offset table"),
        (160, struct.pack("<I", 25), "offset table"),
    ],
)
def test_every_impossible_field_is_named(at: int, value: bytes, reason: str) -> None:
    with pytest.raises(CorruptBitstream, match=reason):
        parse(_with(at, value))


def test_a_table_longer_than_the_file_is_refused_before_it_is_read() -> None:
    data = bytearray(DATA[:HEADER_BYTES])
    data[12:16] = struct.pack("<I", 60000)
    data[28:32] = struct.pack("<I", 60000 * 4)
    data[48:56] = struct.pack("<Q", HEADER_BYTES)
    with pytest.raises(CorruptBitstream, match="does not fit into 128 bytes"):
        parse(_sealed(data))


def test_another_version_says_which_is_read() -> None:
    with pytest.raises(UnsupportedVersion, match="the bitstream has format version 9") as caught:
        parse(_with(4, struct.pack("<H", 9)))
    assert caught.value.actual == 9
    with pytest.raises(CorruptBitstream, match="cachegen in a bitstream of version 2"):
        parse(_with(4, struct.pack("<H", 2)))


@pytest.mark.parametrize("data", [b"", b"KVT", b"KVTBxyz", b"PK\x03\x04" + bytes(200), bytes(4096)])
def test_what_is_not_ours_is_said_to_be_so(data: bytes) -> None:
    with pytest.raises(CorruptBitstream, match=f"these {len(data)} bytes are not"):
        parse(data)


def test_damage_is_told_from_the_checksum_it_breaks() -> None:
    for at, reason in ((60, "header does not match"), (130, "body does not match"), (170, "body")):
        data = bytearray(DATA)
        data[at] ^= 1
        with pytest.raises(CorruptBitstream, match=reason):
            parse(data)


def test_four_gibibytes_are_refused() -> None:
    huge = np.broadcast_to(np.zeros(1, np.uint8), (2**32,))  # no memory behind it
    with pytest.raises(CodecError, match="limit 4 GiB"):
        pack(replace(STREAM, payload=huge))


def test_grid_numbers_spans_within_heads() -> None:
    grid = BlockGrid(Geometry(2, 3, 4), num_tokens=45, block_tokens=20)
    assert (grid.num_spans, grid.num_blocks) == (3, 36)
    assert [grid.span(i) for i in range(3)] == [slice(0, 20), slice(20, 40), slice(40, 45)]
    assert list(grid.span_tokens()) == [20, 20, 5]
