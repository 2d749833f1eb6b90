from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from codec import (
    Codec,
    CodecError,
    CorruptBitstream,
    Geometry,
    NonFiniteInput,
    ProfileMismatch,
    ShapeMismatch,
    UnknownLevel,
    bundled_profiles,
    inspect_bitstream,
    max_encoded_bytes,
)
from codec.bitstream import pack, parse
from tests.codec.builders import GEOMETRY, LEVELS, MODEL_DIGEST, make_codec, make_kv, make_profile

CODEC = make_codec()


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(1, 90),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-12, 3),
    half=st.booleans(),
)
def test_every_chunk_comes_back_within_the_bound_and_encodes_the_same_again(
    num_tokens: int, level: str, seed: int, exponent: int, half: bool
) -> None:
    kv = make_kv(num_tokens, seed=seed) * np.float32(10.0**exponent)
    kv = np.clip(kv, -65504, 65504).astype(np.float16 if half else np.float32)
    data = CODEC.encode(kv, level=level, token_start=3)
    assert len(data) <= max_encoded_bytes(GEOMETRY, num_tokens, level)
    chunk = CODEC.decode(data, dtype=np.float32)
    assert chunk.kv.shape == kv.shape
    assert (chunk.token_start, chunk.token_stop, chunk.level) == (3, 3 + num_tokens, level)
    assert bool(np.isfinite(chunk.kv).all())
    assert data == CODEC.encode(kv, level=level, token_start=3)
    assert bool(np.isfinite(CODEC.decode(data, dtype=np.float16).kv).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_tokens", [1, 2600])
def test_noise_of_the_worst_kind_stays_within_the_bound(level: str, num_tokens: int) -> None:
    kv = np.random.default_rng(0).uniform(-65504, 65504, GEOMETRY.kv_shape(num_tokens))
    data = CODEC.encode(kv.astype(np.float32), level=level, token_start=0)
    assert len(data) <= max_encoded_bytes(GEOMETRY, num_tokens, level)


def test_levels_are_the_baselines_and_the_profiles() -> None:
    assert tuple(info.name for info in CODEC.levels()) == LEVELS
    bare = Codec(GEOMETRY, model_digest=MODEL_DIGEST)
    assert [info.name for info in bare.levels()] == ["fp16", "int8"]


def test_a_profile_may_say_what_the_baselines_lose() -> None:
    profile = make_profile()
    measured = replace(CODEC.levels()[1], kl=0.5, bits_per_element=8.3)
    codec = Codec(
        GEOMETRY,
        model_digest=MODEL_DIGEST,
        profiles=[replace(profile, levels=(measured, *profile.levels))],
    )
    assert {info.name: info.kl for info in codec.levels()}["int8"] == 0.5
    assert len(codec.levels()) == len(LEVELS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65536.0])
def test_what_is_not_finite_is_refused_with_its_place(
    value: float, dtype: type[np.floating]
) -> None:
    kv = make_kv(21, seed=0).astype(dtype)
    with np.errstate(over="ignore"):  # 65536 is an infinite half
        kv[2, 1, 20, 1, 7] = value
        kv[1, 0, 5, 1, 3] = value
    for level in LEVELS:
        with pytest.raises(
            NonFiniteInput, match=r"key of layer 1, token 5 .* head 1, dim 3"
        ) as caught:
            CODEC.encode(kv, level=level, token_start=0)
        assert caught.value.index == (1, 0, 5, 1, 3)


@pytest.mark.parametrize(
    "kv",
    [
        np.zeros((3, 2, 4, 2, 7), np.float32),
        np.zeros((2, 2, 4, 2, 8), np.float32),
        np.zeros((3, 1, 4, 2, 8), np.float32),
        np.zeros((3, 2, 0, 2, 8), np.float32),
        np.zeros((3, 2, 4, 16), np.float32),
        np.zeros((3, 2, 4, 2, 8), np.float64),
        np.zeros((3, 2, 4, 2, 8), np.int8),
        [[1.0]],
        None,
    ],
)
def test_arrays_of_another_shape_are_refused(kv: object) -> None:
    with pytest.raises(ShapeMismatch):
        CODEC.encode(kv, level="fp16", token_start=0)  # type: ignore[arg-type]


def test_too_many_tokens_are_refused_before_work() -> None:
    geometry = Geometry(1, 1, 1)
    codec = Codec(geometry, model_digest=MODEL_DIGEST)
    with pytest.raises(ShapeMismatch, match="1 to 65536 tokens, not 65537"):
        codec.encode(np.zeros((1, 2, 65537, 1, 1), np.float16), level="fp16", token_start=0)


@pytest.mark.parametrize("start", [-1, 2**62])
def test_impossible_positions_are_refused(start: int) -> None:
    with pytest.raises(ShapeMismatch, match="token_start"):
        CODEC.encode(make_kv(1, seed=0), level="fp16", token_start=start)


@pytest.mark.parametrize(
    "level",
    [
        "",
        "fp32",
        "fp16:0",
        "cachegen",
        "cachegen:",
        "cachegen:6",
        "cachegen:-1",
        "cachegen:٣",
        "klt:0",
        "cachegen:0001",
    ],
)
def test_unknown_levels_are_named(level: str) -> None:
    with pytest.raises(UnknownLevel):
        CODEC.encode(make_kv(1, seed=0), level=level, token_start=0)


def test_a_missing_profile_is_said_at_encode_and_decode() -> None:
    bare = Codec(GEOMETRY, model_digest=MODEL_DIGEST)
    kv = make_kv(10, seed=0)
    with pytest.raises(UnknownLevel, match="needs a profile"):
        bare.encode(kv, level="cachegen:0", token_start=0)
    with pytest.raises(UnknownLevel, match="needs a profile"):
        bare.decode(CODEC.encode(kv, level="cachegen:0", token_start=0))


def test_a_bitstream_of_another_model_names_both_digests() -> None:
    other = Codec(GEOMETRY, model_digest=bytes(32))
    data = other.encode(make_kv(10, seed=0), level="int8", token_start=0)
    with pytest.raises(ProfileMismatch) as caught:
        CODEC.decode(data)
    assert MODEL_DIGEST.hex() in str(caught.value)
    assert bytes(32).hex() in str(caught.value)


def test_a_bitstream_of_another_profile_is_refused() -> None:
    stream = parse(CODEC.encode(make_kv(10, seed=0), level="cachegen:1", token_start=0))
    with pytest.raises(ProfileMismatch, match="profile differs"):
        CODEC.decode(pack(replace(stream, profile_digest=bytes(32))))


def test_a_bitstream_of_another_geometry_is_refused() -> None:
    other = Codec(Geometry(3, 1, 8), model_digest=MODEL_DIGEST)
    data = other.encode(make_kv(5, seed=0)[:, :, :, :1].copy(), level="fp16", token_start=0)
    with pytest.raises(ShapeMismatch, match="num_kv_heads=1"):
        CODEC.decode(data)


def test_a_level_that_the_profile_lacks_is_refused_at_decode() -> None:
    stream = parse(CODEC.encode(make_kv(10, seed=0), level="cachegen:1", token_start=0))
    with pytest.raises(UnknownLevel, match="cachegen:77"):
        CODEC.decode(pack(replace(stream, level_index=77)))


def test_profiles_of_other_models_or_twice_are_refused() -> None:
    profile = make_profile()
    with pytest.raises(ProfileMismatch):
        Codec(GEOMETRY, model_digest=bytes(32), profiles=[profile])
    with pytest.raises(ShapeMismatch, match="the profile has"):
        Codec(Geometry(1, 1, 1), model_digest=MODEL_DIGEST, profiles=[profile])
    with pytest.raises(ShapeMismatch, match="two profiles"):
        Codec(GEOMETRY, model_digest=MODEL_DIGEST, profiles=[profile, profile])


def test_programmer_errors_are_plain_value_errors() -> None:
    with pytest.raises(ValueError, match="32"):
        Codec(GEOMETRY, model_digest=b"short")
    with pytest.raises(ValueError, match="at least 1"):
        Codec(GEOMETRY, model_digest=MODEL_DIGEST, num_threads=0)
    with pytest.raises(ShapeMismatch, match="float64"):
        CODEC.decode(
            CODEC.encode(make_kv(1, seed=0), level="fp16", token_start=0), dtype=np.float64
        )


def test_block_sizes_that_do_not_fit_the_level_are_corrupt() -> None:
    stream = parse(CODEC.encode(make_kv(12, seed=0), level="int8", token_start=0))
    offsets = stream.offsets.copy()
    offsets[1] += 1
    with pytest.raises(CorruptBitstream, match="block sizes"):
        CODEC.decode(pack(replace(stream, offsets=offsets)))


def test_blocks_that_cut_a_group_are_corrupt() -> None:
    stream = parse(CODEC.encode(make_kv(12, seed=0), level="cachegen:0", token_start=0))
    with pytest.raises(CorruptBitstream, match="cuts a group"):
        CODEC.decode(pack(replace(stream, block_tokens=15)))


def test_every_byte_of_a_blocks_payload_matters_even_with_a_good_checksum() -> None:
    stream = parse(CODEC.encode(make_kv(40, seed=0), level="cachegen:2", token_start=0))
    for at in range(0, stream.payload.nbytes, 37):
        payload = stream.payload.copy()
        payload[at] ^= 0x10
        try:
            chunk = CODEC.decode(pack(replace(stream, payload=payload)), dtype=np.float32)
        except CodecError:
            continue
        assert bool(np.isfinite(chunk.kv).all())


def test_any_buffer_decodes_at_any_alignment_and_input_layout() -> None:
    kv = make_kv(33, seed=1)
    strided = np.asfortranarray(kv)
    for level in LEVELS:
        data = CODEC.encode(kv, level=level, token_start=0)
        assert data == CODEC.encode(strided, level=level, token_start=0)
        expected = CODEC.decode(data).kv
        shifted = memoryview(b"x" + data)[1:]
        for buffer in (bytearray(data), memoryview(data), shifted):
            np.testing.assert_array_equal(CODEC.decode(buffer).kv, expected)


def test_one_codec_serves_many_threads() -> None:
    arrays = [make_kv(50, seed=seed) for seed in range(8)]
    codec = make_codec(num_threads=2)
    expected = [codec.encode(kv, level="cachegen:1", token_start=0) for kv in arrays]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda kv: codec.encode(kv, level="cachegen:1", token_start=0), arrays)
        )
    assert found == expected


def test_inspect_counts_every_byte() -> None:
    kv = make_kv(64, seed=2)
    data = CODEC.encode(kv, level="cachegen:3", token_start=100)
    info = inspect_bitstream(data)
    assert (info.level, info.token_start, info.token_stop) == ("cachegen:3", 100, 164)
    assert info.total_bytes == len(data)
    assert info.overhead_bytes + sum(map(sum, info.bytes_by_layer)) == len(data)
    assert info.bits_per_element == pytest.approx(8 * len(data) / kv.size)
    assert info.profile_digest == make_profile().digest


def test_no_profile_is_bundled_for_an_unknown_model() -> None:
    assert bundled_profiles(bytes(32)) == []


@pytest.mark.parametrize("axes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (65536, 1, 1)])
def test_impossible_geometries_are_refused(axes: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeMismatch):
        Geometry(*axes)
