"""Profiles: offline statistics of one level set for one model, in a file that is checked when read.

The container is the same for every level set: a JSON description, named arrays, and a BLAKE3 digest over
both, which is also the profile's identity in bitstreams. What the arrays mean is the level set's own
business. docs/bitstream.md, "Profiles". Never pickled, never evaluated.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from codec.errors import CodecError, CorruptBitstream, UnsupportedVersion
from codec.geometry import Geometry
from codec.levels import LevelInfo, LevelSet, parse_level

__all__ = ["Profile", "bundled_profiles"]

MAGIC = b"KVTP"
VERSION = 1
DIGEST_BYTES = 32
MAX_DESCRIPTION_BYTES = 1 << 20
MAX_ARRAYS = 256
ALIGNMENT = 8

_PREFIX = struct.Struct("<4sHHII")  # magic, version, 0, description bytes, 0
_DTYPES = {"i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True)
class Profile:
    """What a profile file holds."""

    model_digest: bytes
    """32 bytes: the model whose statistics these are."""

    geometry: Geometry
    level_set: LevelSet

    levels: tuple[LevelInfo, ...]
    """This set's levels, finest first, and what `fp16` and `int8` lose on the same texts if measured."""

    arrays: Mapping[str, Array]
    """Named arrays, little-endian, read-only when loaded from a file."""

    notes: Mapping[str, Any] = field(default_factory=dict)
    """Where the profile comes from: model name, texts with digests, command. JSON values."""

    digest: bytes = b""
    """32 bytes, BLAKE3 of the file up to its digest; empty until the profile was written or read."""

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file.

        Raises:
            CodecError: the file cannot be read.
            CorruptBitstream, UnsupportedVersion: it is no profile of ours.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CodecError(f"cannot read profile {path}: {error.strerror}") from error
        try:
            return cls.from_bytes(data)
        except UnsupportedVersion:
            raise
        except CorruptBitstream as error:
            raise CorruptBitstream(f"{path}: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Parse a profile.

        Raises:
            CorruptBitstream: not ours, cut, changed, or inconsistent.
            UnsupportedVersion: ours, of another version.
        """
        if len(data) < _PREFIX.size + DIGEST_BYTES or data[:4] != MAGIC:
            raise CorruptBitstream(f"these {len(data)} bytes are not a kvtide profile")
        _, version, zero, description_bytes, zero2 = _PREFIX.unpack_from(data)
        if version != VERSION:
            raise UnsupportedVersion("the profile", expected=VERSION, actual=version)
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if blake3(body).digest() != digest:
            raise CorruptBitstream("the profile does not match its digest")
        if zero or zero2 or not 2 <= description_bytes <= MAX_DESCRIPTION_BYTES:
            raise CorruptBitstream(f"impossible profile description of {description_bytes} bytes")
        if description_bytes % ALIGNMENT or _PREFIX.size + description_bytes > len(body):
            raise CorruptBitstream("the profile's description does not fit")
        try:
            text = body[_PREFIX.size : _PREFIX.size + description_bytes].decode("utf-8")
            description = json.loads(text, parse_constant=_refuse_constant)
            return _from_description(
                description, memoryview(body)[_PREFIX.size + description_bytes :], digest
            )
        except CodecError as error:
            raise CorruptBitstream(f"the profile's description is wrong: {error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptBitstream(
                f"the profile's description is wrong: {type(error).__name__} {error}"
            ) from error

    def to_bytes(self) -> bytes:
        """Return the file's bytes."""
        description = {
            "level_set": self.level_set.value,
            "model_digest": self.model_digest.hex(),
            "geometry": [
                self.geometry.num_layers,
                self.geometry.num_kv_heads,
                self.geometry.head_dim,
            ],
            "levels": [
                {
                    "name": info.name,
                    "bits_per_element": info.bits_per_element,
                    "kl": info.kl,
                    "ppl_ratio": info.ppl_ratio,
                    "top1": info.top1,
                }
                for info in self.levels
            ],
            "arrays": [
                [name, array.dtype.str.lstrip("<|="), list(array.shape)]
                for name, array in self.arrays.items()
            ],
            "notes": self.notes,
        }
        text = json.dumps(description, allow_nan=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        parts = [_PREFIX.pack(MAGIC, VERSION, 0, len(text), 0), text]
        for array in self.arrays.values():
            raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
            parts += [raw, bytes(-len(raw) % ALIGNMENT)]
        body = b"".join(parts)
        return body + blake3(body).digest()

    def level_indices(self) -> dict[int, LevelInfo]:
        """Return this set's levels by index."""
        return {info.index: info for info in self.levels if info.level_set is self.level_set}

    def array(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> Array:
        """Return an array after checking it; None in `shape` takes any length of at least 1.

        Raises:
            CorruptBitstream: it is not there, or of another dtype or shape.
        """
        found = self.arrays.get(name)
        if found is None:
            raise CorruptBitstream(f"the {self.level_set} profile has no array {name!r}")
        fits = found.ndim == len(shape) and all(
            have == want if want is not None else have >= 1
            for have, want in zip(found.shape, shape, strict=True)
        )
        if found.dtype != np.dtype(dtype) or not fits:
            raise CorruptBitstream(
                f"array {name!r} is {found.dtype} {found.shape}, not {np.dtype(dtype)} {shape}"
            )
        return found


def bundled_profiles(model_digest: bytes) -> list[Profile]:
    """Return the profiles that ship with the product for a model; empty where there are none.

    Args:
        model_digest: 32 bytes, the model's identity without its compute dtype.
    """
    return [profile for profile in _read_bundled() if profile.model_digest == model_digest]


@functools.cache
def _read_bundled() -> tuple[Profile, ...]:
    folder = Path(__file__).resolve().parent / "profiles"
    return tuple(Profile.load(path) for path in sorted(folder.glob("*.kvprofile")))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _from_description(description: dict[str, Any], blob: memoryview, digest: bytes) -> Profile:
    level_set = LevelSet(description["level_set"])
    model_digest = bytes.fromhex(description["model_digest"])
    if len(model_digest) != DIGEST_BYTES:
        raise ValueError(f"a model digest has {DIGEST_BYTES} bytes, not {len(model_digest)}")
    geometry = Geometry(*(_integer(n) for n in _list(description["geometry"], 3)))
    levels = tuple(_level(entry) for entry in _list(description["levels"], None))
    names = [info.name for info in levels]
    if len(set(names)) != len(names):
        raise ValueError("two levels have one name")
    notes = description["notes"]
    if not isinstance(notes, dict):
        raise TypeError("notes are not an object")
    arrays: dict[str, Array] = {}
    at = 0
    for entry in _list(description["arrays"], None):
        name, dtype, shape = _list(entry, 3)
        if not isinstance(name, str) or name in arrays or len(arrays) >= MAX_ARRAYS:
            raise ValueError(f"bad or repeated array name {name!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {dtype!r}")
        sizes = [_integer(n) for n in _list(shape, None)]
        count = 1
        for size in sizes:
            if size < 0 or size > len(blob):
                raise ValueError(f"array {name!r} has an axis of {size}")
            count *= size
        wanted = np.dtype(f"<{dtype}")
        num_bytes = count * wanted.itemsize
        if len(sizes) > 8 or at + num_bytes > len(blob):
            raise ValueError(f"array {name!r} does not fit into the file")
        arrays[name] = np.frombuffer(blob, wanted, count, at).reshape(sizes)
        at += num_bytes + -num_bytes % ALIGNMENT
    if at != len(blob):
        raise ValueError(f"{len(blob) - at} bytes are left after the arrays")
    return Profile(model_digest, geometry, level_set, levels, arrays, notes, digest)


def _level(entry: Any) -> LevelInfo:
    if not isinstance(entry["name"], str):
        raise TypeError(f"a level's name is {entry['name']!r}")
    level_set, index = parse_level(entry["name"])
    measured: list[float | None] = []
    for key in ("bits_per_element", "kl", "ppl_ratio", "top1"):
        value = entry[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{key} of level {entry['name']} is {value!r}")
        measured.append(None if value is None else float(value))
    return LevelInfo(entry["name"], level_set, index, *measured)


def _list(value: Any, length: int | None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise TypeError(f"expected a list, found {str(value)[:40]!r}")
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, found {value!r}")
    return value
