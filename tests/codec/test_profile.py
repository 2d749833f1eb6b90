from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from codec import (
    CodecError,
    CorruptBitstream,
    Geometry,
    LevelInfo,
    LevelSet,
    Profile,
    UnsupportedVersion,
)
from tests.codec.builders import make_profile

PROFILE = Profile(
    model_digest=bytes(range(32)),
    geometry=Geometry(2, 1, 4),
    level_set=LevelSet.CACHEGEN,
    levels=(LevelInfo("cachegen:0", LevelSet.CACHEGEN, 0, 3.5, 0.01, 1.001, 0.99),),
    arrays={
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.asarray([1.5], np.float32),
        "c": np.zeros((0, 4), np.uint8),
    },
    notes={"model": "x"},
)
DATA = PROFILE.to_bytes()


def _edited(edit: Callable[[dict[str, Any]], None], *, tail: bytes = b"") -> bytes:
    size = struct.unpack_from("<I", DATA, 8)[0]
    description = json.loads(DATA[16 : 16 + size])
    edit(description)
    text = json.dumps(description).encode()
    text += b" " * (-len(text) % 8)
    body = DATA[:8] + struct.pack("<II", len(text), 0) + text + DATA[16 + size : -32] + tail
    return body + blake3(body).digest()


def test_a_profile_comes_back_with_its_digest() -> None:
    back = Profile.from_bytes(DATA)
    assert back.digest == blake3(DATA[:-32]).digest() == DATA[-32:]
    assert (back.model_digest, back.geometry, back.level_set) == (
        PROFILE.model_digest,
        PROFILE.geometry,
        PROFILE.level_set,
    )
    assert back.levels == PROFILE.levels
    assert back.notes == PROFILE.notes
    for name, array in PROFILE.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
        assert back.arrays[name].dtype == array.dtype
    assert back.to_bytes() == DATA


def test_arrays_are_checked_when_they_are_asked_for() -> None:
    back = Profile.from_bytes(DATA)
    assert back.array("a", np.int16, (2, None)).shape == (2, 3)
    for name, dtype, shape in (
        ("z", np.int16, (2, 3)),
        ("a", np.int32, (2, 3)),
        ("a", np.int16, (3, 2)),
        ("a", np.int16, (6,)),
        ("c", np.uint8, (None, 4)),
    ):
        with pytest.raises(CorruptBitstream, match=f"array '{name}'"):
            back.array(name, dtype, shape)


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "level set": lambda d: d.update(level_set="zip"),
    "level set of another kind": lambda d: d.update(level_set=3),
    "digest": lambda d: d.update(model_digest="00"),
    "digest not hex": lambda d: d.update(model_digest="zz" * 32),
    "digest missing": lambda d: d.pop("model_digest"),
    "geometry": lambda d: d.update(geometry=[0, 1, 4]),
    "geometry short": lambda d: d.update(geometry=[1, 4]),
    "geometry of floats": lambda d: d.update(geometry=[2.0, 1, 4]),
    "geometry of booleans": lambda d: d.update(geometry=[True, True, True]),
    "levels": lambda d: d.update(levels={}),
    "level name": lambda d: d["levels"][0].update(name="best"),
    "level name of another kind": lambda d: d["levels"][0].update(name=3),
    "level twice": lambda d: d["levels"].append(d["levels"][0]),
    "figure": lambda d: d["levels"][0].update(kl="0.1"),
    "figure missing": lambda d: d["levels"][0].pop("kl"),
    "notes": lambda d: d.update(notes=[]),
    "array twice": lambda d: d["arrays"].append(["a", "u1", [0]]),
    "array dtype": lambda d: d["arrays"][0].__setitem__(1, "O"),
    "array dtype of another kind": lambda d: d["arrays"][0].__setitem__(1, ["f4"]),
    "array axis negative": lambda d: d["arrays"][0].__setitem__(2, [-2, -3]),
    "array axis huge": lambda d: d["arrays"][0].__setitem__(2, [2**62, 2**62]),
    "array axes many": lambda d: d["arrays"][2].__setitem__(2, [0] * 40),
    "array too long": lambda d: d["arrays"][1].__setitem__(2, [9]),
    "arrays too short": lambda d: d["arrays"].pop(0),
    "arrays too many": lambda d: d["arrays"].extend([f"x{i}", "u1", [0]] for i in range(300)),
}


@pytest.mark.parametrize("name", list(EDITS))
def test_every_wrong_description_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptBitstream, match="description is wrong"):
        Profile.from_bytes(_edited(EDITS[name]))


def test_bytes_after_the_arrays_are_corrupt() -> None:
    with pytest.raises(CorruptBitstream, match="8 bytes are left"):
        Profile.from_bytes(_edited(lambda d: None, tail=bytes(8)))


def test_json_that_is_no_json_or_has_nan_is_corrupt() -> None:
    for text in (b"[" * 4096, b'{"level_set": NaN}      ', b"\xff" * 8, b"[]      "):
        body = DATA[:8] + struct.pack("<II", len(text), 0) + text
        with pytest.raises(CorruptBitstream, match="description is wrong"):
            Profile.from_bytes(body + blake3(body).digest())


@pytest.mark.parametrize("size", [0, 1, 9, 2**20 + 8, 2**32 - 1, 4096])
def test_description_sizes_that_do_not_fit_are_corrupt(size: int) -> None:
    body = DATA[:8] + struct.pack("<II", size, 0) + DATA[16:-32]
    with pytest.raises(CorruptBitstream):
        Profile.from_bytes(body + blake3(body).digest())


def test_another_version_is_said() -> None:
    body = DATA[:4] + struct.pack("<H", 9) + DATA[6:-32]
    with pytest.raises(UnsupportedVersion, match="the profile has format version 9"):
        Profile.from_bytes(body + blake3(body).digest())


def test_files_that_are_missing_or_no_profile_are_named(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="nowhere"):
        Profile.load(tmp_path / "nowhere")
    (tmp_path / "other").write_bytes(b"x" * 100)
    with pytest.raises(CorruptBitstream, match=r"other: these 100 bytes are not a kvtide profile"):
        Profile.load(tmp_path / "other")
    body = DATA[:4] + struct.pack("<H", 9) + DATA[6:-32]
    (tmp_path / "newer").write_bytes(body + blake3(body).digest())
    with pytest.raises(UnsupportedVersion):
        Profile.load(tmp_path / "newer")
    (tmp_path / "good").write_bytes(make_profile().to_bytes())
    assert Profile.load(tmp_path / "good").digest == make_profile().digest
