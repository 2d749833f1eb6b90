"""The public codec: kv arrays to bitstreams and back, for one model and the profiles it has.

Checks everything at this boundary, once; transforms behind it trust their arguments. Holds no state
between calls, so that any number of threads may use one codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from codec import bitstream, native
from codec.baselines import BaselineTransform
from codec.cachegen import CachegenTransform
from codec.errors import NonFiniteInput, ProfileMismatch, ShapeMismatch, UnknownLevel
from codec.geometry import (
    BLOCK_TOKENS,
    BlockGrid,
    FloatArray,
    Geometry,
    Rotary,
    check_kv,
)
from codec.klt import KltTransform
from codec.levels import BASELINE_LEVELS, LevelInfo, LevelSet, parse_level
from codec.profile import Profile
from codec.transform import Transform

__all__ = ["Codec", "DecodedChunk", "max_encoded_bytes"]

DIGEST_BYTES = 32

VALUE_LIMIT = 65504.0
"""Largest magnitude that is encoded: float16's largest finite number, which a cache of that dtype can hold."""


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """A decoded bitstream."""

    kv: FloatArray
    """Shape [layer, kv=2, token, head, dim], dtype as asked for."""

    token_start: int
    """Position of the chunk's first token in its context."""

    token_stop: int
    """Position after the chunk's last token."""

    level: str
    """The level's name."""


class Codec:
    """Encodes and decodes the chunks of one model."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        model_digest: bytes,
        profiles: Sequence[Profile] = (),
        num_threads: int = 2,
        rotary: Rotary | None = None,
    ) -> None:
        """Build a codec.

        Args:
            geometry: axes of the model's KV cache.
            model_digest: 32 bytes, identity of everything that changes KV values.
            profiles: at most one per level set; each for this model and geometry.
            num_threads: threads per call, at least 1; blocks are shared out among them.
            rotary: the model's rotary tables; only level sets that code keys before rotation use them.

        Raises:
            ProfileMismatch: a profile of another model.
            ShapeMismatch: a profile of another geometry, or two of one level set.
        """
        if len(model_digest) != DIGEST_BYTES:
            raise ValueError(f"model_digest has {len(model_digest)} bytes, not {DIGEST_BYTES}")
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; at least 1")
        self.geometry = geometry
        self.model_digest = bytes(model_digest)
        self.profiles = tuple(profiles)
        self.num_threads = num_threads
        self.rotary = rotary
        for profile in self.profiles:
            if profile.model_digest != self.model_digest:
                raise ProfileMismatch(
                    "the profile's model", expected=self.model_digest, actual=profile.model_digest
                )
            if profile.geometry != geometry:
                raise ShapeMismatch(f"the profile has {profile.geometry}, the model {geometry}")
        sets = [profile.level_set for profile in self.profiles]
        if len(set(sets)) != len(sets):
            raise ShapeMismatch("two profiles of one level set")
        self._transforms: dict[LevelSet, Transform] = {
            level_set: BaselineTransform(geometry, level_set, num_threads)
            for level_set in (LevelSet.FP16, LevelSet.INT8)
        }
        for profile in self.profiles:
            self._transforms[profile.level_set] = _transform_of(profile, num_threads, rotary)
        self._profile_digests = {profile.level_set: profile.digest for profile in self.profiles}

    def levels(self) -> tuple[LevelInfo, ...]:
        """Return every level that this codec can encode, finest set first."""
        # A profile may carry what fp16 and int8 lose on its model; then that entry replaces the bare one.
        found = {info.name: info for info in BASELINE_LEVELS}
        for profile in self.profiles:
            found.update({info.name: info for info in profile.levels})
        return tuple(found.values())

    def encode(
        self,
        kv: FloatArray,
        *,
        level: str,
        token_start: int,
        layer0: npt.NDArray[np.float32] | None = None,
    ) -> bytes:
        """Encode one chunk.

        Args:
            kv: float16 or float32, shape [layer, kv=2, token, head, dim], magnitudes up to 65504.
            level: a name from `levels()`.
            token_start: position of the first token in its context, 0 or more.
            layer0: float32 [2, token, head, dim], for level set `klt` only.

        Raises:
            ShapeMismatch: kv does not fit the geometry.
            NonFiniteInput: NaN, Inf or too large, with the place.
            UnknownLevel: no such level, or its profile is not loaded.
        """
        level_set, index = parse_level(level)
        if level not in {info.name for info in self.levels()}:
            raise UnknownLevel(
                f"level {level!r} needs a profile that is not loaded"
                if level_set.needs_profile and level_set not in self._transforms
                else f"the loaded profile has no level {level!r}"
            )
        kv = check_kv(kv, self.geometry)
        if not 0 <= token_start < 2**62:
            raise ShapeMismatch(f"token_start is {token_start}; a position is 0 or more")
        _check_finite(kv)
        blocks = self._transforms[level_set].encode(
            kv, level_index=index, token_start=token_start, layer0=layer0
        )
        return bitstream.pack(
            bitstream.Bitstream(
                level_set=level_set,
                level_index=index,
                geometry=self.geometry,
                token_start=token_start,
                token_stop=token_start + kv.shape[2],
                block_tokens=blocks.block_tokens,
                model_digest=self.model_digest,
                profile_digest=self._profile_digests.get(level_set, bitstream.NO_PROFILE),
                offsets=blocks.offsets,
                payload=blocks.payload,
            )
        )

    def decode(
        self,
        data: bytes | bytearray | memoryview,
        *,
        layer0: npt.NDArray[np.float32] | None = None,
        dtype: npt.DTypeLike = np.float16,
    ) -> DecodedChunk:
        """Decode one chunk.

        Args:
            data: a whole bitstream.
            layer0: float32 [2, token, head, dim], for level set `klt` only.
            dtype: float16 (saturating at its largest finite number) or float32.

        Raises:
            CorruptBitstream, UnsupportedVersion: not a bitstream that an encoder wrote.
            ShapeMismatch: of another geometry.
            ProfileMismatch: of another model or profile.
            UnknownLevel: its level set has no profile here.
        """
        dtype = np.dtype(dtype)
        if dtype not in (np.float16, np.float32):
            raise ShapeMismatch(f"the codec decodes into float16 or float32, not {dtype}")
        stream = bitstream.parse(data)
        if stream.model_digest != self.model_digest:
            raise ProfileMismatch(
                "the bitstream's model", expected=self.model_digest, actual=stream.model_digest
            )
        if stream.geometry != self.geometry:
            raise ShapeMismatch(f"the bitstream has {stream.geometry}, the model {self.geometry}")
        transform = self._transforms.get(stream.level_set)
        if transform is None:
            raise UnknownLevel(f"level {stream.level!r} needs a profile that is not loaded")
        expected = self._profile_digests.get(stream.level_set, bitstream.NO_PROFILE)
        if stream.profile_digest != expected:
            raise ProfileMismatch(
                "the bitstream's profile", expected=expected, actual=stream.profile_digest
            )
        if stream.level not in {info.name for info in self.levels()}:
            raise UnknownLevel(f"the loaded profile has no level {stream.level!r}")
        if stream.payload.ctypes.data % 2:  # kernels read 16-bit words
            stream = replace(stream, payload=stream.payload.copy())
        out: FloatArray = np.empty(self.geometry.kv_shape(stream.num_tokens), dtype)
        transform.decode(stream, out=out, layer0=layer0)
        return DecodedChunk(out, stream.token_start, stream.token_stop, stream.level)


def max_encoded_bytes(geometry: Geometry, num_tokens: int, level: str) -> int:
    """Return a bound on the bitstream of any chunk of that many tokens.

    Args:
        geometry: the model's axes.
        num_tokens: tokens in the chunk, at least 1.
        level: a level name.

    Raises:
        UnknownLevel: no such level set.
    """
    level_set, _ = parse_level(level)
    if level_set is LevelSet.CACHEGEN:
        payload = CachegenTransform.max_payload_bytes(geometry, num_tokens)
    elif not level_set.needs_profile:
        payload = BaselineTransform.payload_bytes(geometry, level_set, num_tokens)
    else:
        payload = KltTransform.max_payload_bytes(geometry, num_tokens)
    num_blocks = BlockGrid(geometry, num_tokens, BLOCK_TOKENS).num_blocks
    return bitstream.HEADER_BYTES + 4 * (num_blocks + 1) + payload


def _transform_of(profile: Profile, num_threads: int, rotary: Rotary | None) -> Transform:
    if profile.level_set is LevelSet.CACHEGEN:
        return CachegenTransform(profile, num_threads=num_threads)
    if profile.level_set is LevelSet.KLT:
        return KltTransform(profile, num_threads=num_threads, rotary=rotary)
    raise UnknownLevel(f"this build has no level set {profile.level_set!r} with a profile")


def _check_finite(kv: FloatArray) -> None:
    bad = native.find_bad(kv, VALUE_LIMIT)
    if bad is None:
        return
    layer, side, token, head, dim = (int(i) for i in np.unravel_index(bad, kv.shape))
    value = float(kv[layer, side, token, head, dim])
    reason = "not finite" if not np.isfinite(value) else f"larger than {VALUE_LIMIT:g}"
    raise NonFiniteInput(reason, index=(layer, side, token, head, dim), value=value)
