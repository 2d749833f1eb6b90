"""KV cache chunks to bitstreams and back. This is the room's whole public surface."""

from __future__ import annotations

from codec.bitstream import BitstreamInfo, inspect_bitstream
from codec.codec import Codec, DecodedChunk, max_encoded_bytes
from codec.errors import (
    CodecError,
    CorruptBitstream,
    NonFiniteInput,
    ProfileMismatch,
    ShapeMismatch,
    UnknownLevel,
    UnsupportedVersion,
)
from codec.geometry import Geometry, Rotary
from codec.levels import LevelInfo, LevelSet, RefinementInfo
from codec.profile import Profile, bundled_profiles

__all__ = [
    "BitstreamInfo",
    "Codec",
    "CodecError",
    "CorruptBitstream",
    "DecodedChunk",
    "Geometry",
    "LevelInfo",
    "LevelSet",
    "NonFiniteInput",
    "Profile",
    "ProfileMismatch",
    "RefinementInfo",
    "Rotary",
    "ShapeMismatch",
    "UnknownLevel",
    "UnsupportedVersion",
    "bundled_profiles",
    "inspect_bitstream",
    "max_encoded_bytes",
]
