from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from codec import CodecError, CorruptBitstream, Profile
from codec.bitstream import HEADER_BYTES
from tests.golden.make import CASES, FOLDER, GoldenCase, golden_codec, golden_kv, sha256

MANIFEST: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((FOLDER / "manifest.json").read_text())
}
CODEC = golden_codec()


def _data(case: GoldenCase) -> bytes:
    return (FOLDER / f"{case.name}.bin").read_bytes()


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_golden_file_is_in_the_manifest_and_every_entry_has_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(MANIFEST) == {c.name for c in CASES}


@by_name
def test_decoding_gives_the_same_numbers_forever(case: GoldenCase) -> None:
    entry, data = MANIFEST[case.name], _data(case)
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    assert sha256(CODEC.decode(data, dtype=np.float32).kv) == entry["float32_sha256"]
    chunk = CODEC.decode(data, dtype=np.float16)
    assert sha256(chunk.kv) == entry["float16_sha256"]
    assert (chunk.token_start, chunk.level) == (entry["token_start"], entry["level"])
    assert list(chunk.kv.shape) == entry["shape"]


@by_name
def test_encoding_gives_the_same_bytes_until_the_version_changes(case: GoldenCase) -> None:
    kv = golden_kv(case)
    assert sha256(kv) == MANIFEST[case.name]["input_sha256"]
    assert CODEC.encode(kv, level=case.level, token_start=case.token_start) == _data(case)


@by_name
def test_every_truncation_raises(case: GoldenCase) -> None:
    data = _data(case)
    for size in range(len(data)):
        with pytest.raises(CodecError):
            CODEC.decode(data[:size])
    with pytest.raises(CorruptBitstream, match="its header says"):
        CODEC.decode(data + b"\0")


@by_name
def test_every_flipped_bit_raises(case: GoldenCase) -> None:
    data = bytearray(_data(case))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            CODEC.decode(data)
        data[bit // 8] ^= 1 << bit % 8
    assert bytes(data) == _data(case)


@by_name
def test_every_flipped_bit_under_a_mended_checksum_raises_or_decodes_to_numbers(
    case: GoldenCase,
) -> None:
    original = _data(case)
    shape = tuple(MANIFEST[case.name]["shape"])
    for bit in range(8 * len(original)):
        data = bytearray(original)
        data[bit // 8] ^= 1 << bit % 8
        data[HEADER_BYTES - 8 : HEADER_BYTES - 4] = struct.pack(
            "<I", zlib.crc32(data[HEADER_BYTES:])
        )
        data[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack(
            "<I", zlib.crc32(data[: HEADER_BYTES - 4])
        )
        try:
            chunk = CODEC.decode(data, dtype=np.float32)
        except CodecError:
            continue
        assert chunk.kv.shape == shape
        assert bool(np.isfinite(chunk.kv).all())


def test_every_truncation_and_flipped_byte_of_a_profile_raises() -> None:
    data = (FOLDER / "profile.kvprofile").read_bytes()
    step = max(1, len(data) // 3000)
    for size in range(0, len(data), step):
        with pytest.raises(CodecError):
            Profile.from_bytes(data[:size])
    for at in range(0, len(data), step):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(CodecError):
            Profile.from_bytes(bytes(flipped))
