"""The public codec: kv arrays to bitstreams and back, for one model and the profiles it has.

Checks everything at this boundary, once; transforms behind it trust their arguments. Holds no state
between calls, so that any number of threads may use one codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from codec import bitstream, native
from codec.baselines import BaselineTransform
from codec.cachegen import CachegenTransform
from codec.errors import (
    CorruptBitstream,
    NonFiniteInput,
    ProfileMismatch,
    ShapeMismatch,
    UnknownLevel,
)
from codec.geometry import (
    BLOCK_TOKENS,
    BlockGrid,
    FloatArray,
    Geometry,
    Rotary,
    check_kv,
)
from codec.klt import KltRequest, KltTransform
from codec.levels import (
    BASELINE_LEVELS,
    REFINEMENT_LEVELS,
    LevelInfo,
    LevelSet,
    RefinementInfo,
    level_name,
    parse_level,
    parse_refinement,
    refinement_name,
)
from codec.profile import Profile
from codec.transform import EncodedBlocks, Transform

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

    def refinements(self) -> tuple[RefinementInfo, ...]:
        """Return every refinement that this codec can encode, coarsest first."""
        klt = self._transforms.get(LevelSet.KLT)
        if not isinstance(klt, KltTransform):
            return ()
        return tuple(
            RefinementInfo(
                refinement_name(base, base - REFINEMENT_LEVELS),
                level_name(LevelSet.KLT, base),
                level_name(LevelSet.KLT, base - REFINEMENT_LEVELS),
            )
            for base in reversed(range(len(klt.plan.levels)))
            if klt.plan.is_refined(base)
        )

    def encode(
        self,
        kv: FloatArray,
        *,
        level: str,
        token_start: int,
        layer0: npt.NDArray[np.float32] | None = None,
    ) -> bytes:
        """Encode one chunk at one level; `encode_many` for several.

        Args:
            kv: float16 or float32, shape [layer, kv=2, token, head, dim], magnitudes up to 65504.
            level: a name from `levels()` or `refinements()`.
            token_start: position of the first token in its context, 0 or more.
            layer0: float32 [2, token, head, dim], for level set `klt` only.

        Raises:
            ShapeMismatch: kv does not fit the geometry.
            NonFiniteInput: NaN, Inf or too large, with the place.
            UnknownLevel: no such level, or its profile is not loaded.
        """
        return self.encode_many(kv, levels=[level], token_start=token_start, layer0=layer0)[0]

    def encode_many(
        self,
        kv: FloatArray,
        *,
        levels: Sequence[str],
        token_start: int,
        layer0: npt.NDArray[np.float32] | None = None,
    ) -> list[bytes]:
        """Encode one chunk at several levels, in the order asked for. Levels of `klt` share the transform.

        Args and errors: as `encode`.
        """
        parsed = [self._parse(level) for level in levels]
        kv = check_kv(kv, self.geometry)
        if not 0 <= token_start < 2**62:
            raise ShapeMismatch(f"token_start is {token_start}; a position is 0 or more")
        _check_finite(kv)
        klt = self._transforms.get(LevelSet.KLT)
        shared: Iterator[EncodedBlocks] = iter(())
        if isinstance(klt, KltTransform):
            requests = [KltRequest(i, base) for kind, i, base in parsed if kind is LevelSet.KLT]
            if requests:
                shared = iter(klt.encode_many(kv, requests, token_start=token_start, layer0=layer0))
        made = []
        for level_set, index, base_index in parsed:
            blocks = (
                next(shared)
                if level_set is LevelSet.KLT
                else self._transforms[level_set].encode(
                    kv, level_index=index, token_start=token_start, layer0=layer0
                )
            )
            stream = bitstream.Bitstream(
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
                base_index=base_index,
            )
            made.append(bitstream.pack(stream))
        return made

    def _parse(self, level: str) -> tuple[LevelSet, int, int | None]:
        """Return set, index and, of a refinement, the index that it starts from.

        Raises:
            UnknownLevel: this codec cannot encode it.
        """
        refinement = parse_refinement(level)
        if refinement is not None:
            if level not in {info.name for info in self.refinements()}:
                raise UnknownLevel(f"no loaded profile has refinement {level!r}")
            level_set, base, fine = refinement
            return level_set, fine, base
        level_set, index = parse_level(level)
        if level not in {info.name for info in self.levels()}:
            raise UnknownLevel(
                f"level {level!r} needs a profile that is not loaded"
                if level_set.needs_profile and level_set not in self._transforms
                else f"the loaded profile has no level {level!r}"
            )
        return level_set, index, None

    def decode(
        self,
        data: bytes | bytearray | memoryview,
        *,
        refinements: Sequence[bytes | bytearray | memoryview] = (),
        layer0: npt.NDArray[np.float32] | None = None,
        dtype: npt.DTypeLike = np.float16,
    ) -> DecodedChunk:
        """Decode one chunk.

        Args:
            data: a whole bitstream of a level.
            refinements: of the same chunk, each of what comes out of the one before it.
            layer0: float32 [2, token, head, dim], for level set `klt` only.
            dtype: float16 (saturating at its largest finite number) or float32.

        Raises:
            CorruptBitstream, UnsupportedVersion: not a bitstream that an encoder wrote, or a refinement of
                something else.
            ShapeMismatch: of another geometry.
            ProfileMismatch: of another model or profile.
            UnknownLevel: its level set has no profile here.
        """
        dtype = np.dtype(dtype)
        if dtype not in (np.float16, np.float32):
            raise ShapeMismatch(f"the codec decodes into float16 or float32, not {dtype}")
        stream = self._checked(data)
        if stream.base_index is not None:
            raise CorruptBitstream(f"refinement {stream.level} stands alone; it refines a chunk")
        finer = [self._checked(refinement) for refinement in refinements]
        index = stream.level_index
        for refinement in finer:
            if refinement.base_index != index or refinement.level_set is not stream.level_set:
                raise CorruptBitstream(
                    f"{refinement.level} does not refine level {level_name(stream.level_set, index)}"
                )
            if (refinement.token_start, refinement.token_stop) != (
                stream.token_start,
                stream.token_stop,
            ):
                raise CorruptBitstream(f"refinement {refinement.level} is of other tokens")
            index = refinement.level_index
        out: FloatArray = np.empty(self.geometry.kv_shape(stream.num_tokens), dtype)
        transform = self._transforms[stream.level_set]
        if finer:
            assert isinstance(transform, KltTransform)  # no other set has refinements
            transform.decode(stream, out=out, layer0=layer0, refinements=finer)
        else:
            transform.decode(stream, out=out, layer0=layer0)
        level = level_name(stream.level_set, index)
        return DecodedChunk(out, stream.token_start, stream.token_stop, level)

    def _checked(self, data: bytes | bytearray | memoryview) -> bitstream.Bitstream:
        """Parse a bitstream and check that this codec can read it."""
        stream = bitstream.parse(data)
        if stream.model_digest != self.model_digest:
            raise ProfileMismatch(
                "the bitstream's model", expected=self.model_digest, actual=stream.model_digest
            )
        if stream.geometry != self.geometry:
            raise ShapeMismatch(f"the bitstream has {stream.geometry}, the model {self.geometry}")
        if stream.level_set not in self._transforms:
            raise UnknownLevel(f"level {stream.level!r} needs a profile that is not loaded")
        expected = self._profile_digests.get(stream.level_set, bitstream.NO_PROFILE)
        if stream.profile_digest != expected:
            raise ProfileMismatch(
                "the bitstream's profile", expected=expected, actual=stream.profile_digest
            )
        self._parse(stream.level)
        if stream.payload.ctypes.data % 2:  # kernels read 16-bit words
            stream = replace(stream, payload=stream.payload.copy())
        return stream


def max_encoded_bytes(geometry: Geometry, num_tokens: int, level: str) -> int:
    """Return a bound on the bitstream of any chunk of that many tokens.

    Args:
        geometry: the model's axes.
        num_tokens: tokens in the chunk, at least 1.
        level: name of a level or of a refinement.

    Raises:
        UnknownLevel: no such level set.
    """
    refinement = parse_refinement(level)
    level_set = refinement[0] if refinement else parse_level(level)[0]
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
