"""Level set klt: round trips, what it promises about its bytes, and hostile input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from codec import (
    Codec,
    CodecError,
    CorruptBitstream,
    ShapeMismatch,
    UnsupportedVersion,
    bitstream,
    inspect_bitstream,
    max_encoded_bytes,
)
from codec.klt import BLOCK_TOKENS, KltTransform, token_classes, token_features
from codec.klt_loud import LoudTokens, pack_loud, parse_loud
from codec.klt_plan import LOUD_CLASS, NEUTRAL_CLASS, NUM_CLASSES
from codec.levels import LevelSet
from tests.codec.klt_builders import (
    GEOMETRY,
    STEPS,
    make_codec,
    make_plain,
    make_profile,
    make_rotary,
    rotated,
)


def _chunk(num_tokens: int, token_start: int, *, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    plain = make_plain(num_tokens, seed=seed)
    return rotated(plain, make_rotary(), token_start), plain[0]


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, BLOCK_TOKENS, BLOCK_TOKENS + 1, 300])
@pytest.mark.parametrize("token_start", [0, 1000])
def test_a_chunk_comes_back_closer_the_finer_the_level(num_tokens: int, token_start: int) -> None:
    codec = make_codec()
    kv, layer0 = _chunk(num_tokens, token_start)
    errors, sizes = [], []
    for level in range(len(STEPS)):
        data = codec.encode(kv, level=f"klt:{level}", token_start=token_start, layer0=layer0)
        chunk = codec.decode(data, layer0=layer0, dtype=np.float32)
        assert (chunk.token_start, chunk.token_stop) == (token_start, token_start + num_tokens)
        assert len(data) <= max_encoded_bytes(GEOMETRY, num_tokens, f"klt:{level}")
        errors.append(float(np.abs(chunk.kv - kv).mean()))
        sizes.append(len(data))
    assert errors[0] < 0.05 * float(np.abs(kv).mean())
    assert errors == sorted(errors)
    assert sizes == sorted(sizes, reverse=True)


def test_layer_zero_is_not_in_the_bytes_and_comes_back_exact() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(200, 64)
    data = codec.encode(kv, level="klt:5", token_start=64, layer0=layer0)
    decoded = codec.decode(data, layer0=layer0, dtype=np.float32).kv
    np.testing.assert_allclose(decoded[0], kv[0], atol=1e-4)
    assert codec.encode(kv, level="klt:5", token_start=64) == data  # taken from the cache itself
    with pytest.raises(ShapeMismatch, match="layer0"):
        codec.decode(data)


def test_the_first_token_of_a_context_keeps_eight_bits_at_every_level() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(200, 0)
    decoded = codec.decode(
        codec.encode(kv, level="klt:5", token_start=0, layer0=layer0),
        layer0=layer0,
        dtype=np.float32,
    ).kv
    rows = np.abs(kv[1:, :, 0]).max(axis=-1, keepdims=True)
    assert np.all(np.abs(decoded[1:, :, 0] - kv[1:, :, 0]) <= 0.51 * rows / 127 + 1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_coded_before_rotation(interleaved: bool) -> None:
    rotary = make_rotary(interleaved=interleaved)
    codec = make_codec(rotary=rotary)
    plain = make_plain(150, seed=9)
    sizes = []
    for token_start in (1, 900):  # the same keys at other places: the same symbols
        kv = rotated(plain, rotary, token_start)
        data = codec.encode(kv, level="klt:2", token_start=token_start, layer0=plain[0])
        sizes.append(len(data))
        assert (
            float(np.abs(codec.decode(data, layer0=plain[0], dtype=np.float32).kv - kv).mean())
            < 0.2
        )
    assert abs(sizes[0] - sizes[1]) <= 4


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    kv, layer0 = _chunk(400, 0)
    data = [
        make_codec(num_threads=n).encode(kv, level="klt:1", token_start=0, layer0=layer0)
        for n in (1, 3)
    ]
    assert data[0] == data[1]


def test_half_precision_decodes_to_the_rounded_values() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(70, 0)
    data = codec.encode(kv.astype(np.float16), level="klt:0", token_start=0, layer0=layer0)
    single = codec.decode(data, layer0=layer0, dtype=np.float32).kv
    half = codec.decode(data, layer0=layer0, dtype=np.float16).kv
    np.testing.assert_array_equal(half, single.astype(np.float16))


def test_values_beyond_the_tables_escape() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(64, 10)
    kv[2, 1, 7] += 300
    data = codec.encode(kv, level="klt:0", token_start=10, layer0=layer0)
    decoded = codec.decode(data, layer0=layer0, dtype=np.float32).kv
    assert float(np.abs(decoded[2, 1, 7] - kv[2, 1, 7]).max()) < 30


def test_louder_tokens_get_higher_classes() -> None:
    transform = make_codec()._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    group = transform.plan.groups[0]
    heads = 2 * group.num_layers * GEOMETRY.num_kv_heads
    loudness = np.zeros(heads + 1, np.float32)
    loudness[0] = 1
    edges = np.arange(LOUD_CLASS, dtype=np.float32) - np.float32(0.5)
    judged = replace(group, sensitivity=loudness, loudness_edges=edges)
    rows = np.ones((20, group.num_rows), np.float32)
    rows[:, : group.num_rows // heads] *= np.exp2(np.arange(20) / 2)[:, None]
    classes = token_classes(token_features(rows, heads), judged)
    assert classes.tolist() == [min(1 + n, LOUD_CLASS) for n in range(20)]


def test_tokens_of_every_class_come_back() -> None:
    codec = make_codec()
    transform = codec._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    num_tokens = 200
    level = transform.plan.levels[3]
    rng = np.random.default_rng(8)
    classes = rng.integers(0, NUM_CLASSES, size=(len(transform.plan.groups), num_tokens))
    size = (level.num_components, num_tokens)
    symbols = np.rint(rng.normal(size=size) * 2.0 ** rng.integers(-2, 11, size=size))
    payload, offsets = transform.blocks.encode(
        level, symbols.astype(np.int16), classes.astype(np.uint8)
    )
    kv, layer0 = _chunk(num_tokens, 5)
    stream = bitstream.parse(codec.encode(kv, level="klt:3", token_start=5, layer0=layer0))
    made = replace(stream, offsets=np.append(np.uint32(0), offsets), payload=payload)
    decoded = transform.blocks.coefficients(made)
    for index, group in enumerate(level.groups):
        part = slice(
            int(group["first_component"]), int(group["first_component"] + group["num_components"])
        )
        scale = level.step * np.exp2(NEUTRAL_CLASS - classes[index].astype(np.float32))
        np.testing.assert_array_equal(decoded[part], symbols[part].astype(np.float32) * scale)


def test_version_and_inspection() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(200, 0)
    data = codec.encode(kv, level="klt:3", token_start=0, layer0=layer0)
    info = inspect_bitstream(data)
    assert (info.version, info.level, info.num_blocks) == (2, "klt:3", 3)
    assert info.bytes_by_layer == ()
    assert info.total_bytes == len(data)


def test_a_klt_level_in_a_version_1_bitstream_is_refused() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(40, 0)
    data = bytearray(codec.encode(kv, level="klt:3", token_start=0, layer0=layer0))
    data[4] = 4
    with pytest.raises(UnsupportedVersion):
        codec.decode(bytes(data), layer0=layer0)
    data[4] = 1
    with pytest.raises(CorruptBitstream):
        codec.decode(bytes(data), layer0=layer0)


def test_every_truncation_and_every_flipped_bit_is_a_codec_error() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(9, 3)
    data = codec.encode(kv, level="klt:5", token_start=3, layer0=layer0)
    for length in range(len(data)):
        with pytest.raises(CodecError):
            codec.decode(data[:length], layer0=layer0)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CodecError):
            codec.decode(bytes(changed), layer0=layer0)


def test_blocks_that_no_encoder_writes_are_refused_or_decode_without_harm() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(150, 0)
    stream = bitstream.parse(codec.encode(kv, level="klt:2", token_start=0, layer0=layer0))
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(200):
        payload = stream.payload.copy()
        for place in rng.integers(0, payload.size, size=3):
            payload[place] = rng.integers(0, 256)
        data = bitstream.pack(replace(stream, payload=payload))
        try:
            codec.decode(data, layer0=layer0)
        except CorruptBitstream:
            refused += 1
    assert refused > 150


def test_wrong_block_counts_and_sizes_are_refused() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(150, 0)
    stream = bitstream.parse(codec.encode(kv, level="klt:2", token_start=0, layer0=layer0))
    fewer = replace(stream, offsets=np.delete(stream.offsets, 1))
    shifted = stream.offsets.copy()
    shifted[1] -= 2
    for wrong in (
        fewer,
        replace(stream, offsets=shifted),
        replace(stream, block_tokens=64),
        replace(stream, token_start=1, token_stop=stream.token_stop + 1),
    ):
        with pytest.raises(CorruptBitstream):
            codec.decode(bitstream.pack(wrong), layer0=layer0)


def test_missing_or_short_rotary_tables_are_named() -> None:
    kv, layer0 = _chunk(20, 0)
    bare = Codec(GEOMETRY, model_digest=make_profile().model_digest, profiles=[make_profile()])
    with pytest.raises(ShapeMismatch, match="rotary"):
        bare.encode(kv, level="klt:0", token_start=0, layer0=layer0)
    short = make_codec(rotary=make_rotary(positions=19))
    with pytest.raises(ShapeMismatch, match="19 positions"):
        short.encode(kv, level="klt:0", token_start=0, layer0=layer0)


def test_layer0_of_another_shape_is_refused() -> None:
    codec = make_codec()
    kv, layer0 = _chunk(20, 0)
    data = codec.encode(kv, level="klt:0", token_start=0, layer0=layer0)
    wrongs: list[Any] = [layer0[:, :19], layer0.astype(np.float64), np.full_like(layer0, np.nan)]
    for wrong in wrongs:
        with pytest.raises(ShapeMismatch):
            codec.decode(data, layer0=wrong)


def test_loud_tokens_come_back_within_their_scale() -> None:
    rng = np.random.default_rng(2)
    for bits in (2, 5, 8):
        values = rng.normal(size=(3, 4, 6)).astype(np.float32) * 50
        values[1, 2] = 0
        data = pack_loud(LoudTokens(np.asarray([0, 7, 11]), values), bits)
        found, used = parse_loud(memoryview(data + b"rest"), 12, 4, 6, bits)
        assert used == len(data)
        assert used % 2 == 0
        assert found.tokens.tolist() == [0, 7, 11]
        unit = np.abs(values).max(axis=2, keepdims=True) / (2 ** (bits - 1) - 1)
        assert np.all(np.abs(found.values - values) <= 0.51 * unit)
        for length in range(len(data) - 1):
            with pytest.raises(CorruptBitstream):
                parse_loud(memoryview(data[:length]), 12, 4, 6, bits)
        with pytest.raises(CorruptBitstream):
            parse_loud(memoryview(data), 11, 4, 6, bits)


def test_a_loud_token_is_coded_beside_the_transform() -> None:
    codec = make_codec()
    transform = codec._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    kv, layer0 = _chunk(100, 50)
    quiet = codec.encode(kv, level="klt:5", token_start=50, layer0=layer0)
    group = transform.plan.groups[0]
    position = transform.rows.position(kv, 50, layer0)
    rows = transform.rows.gather(kv, group, position)
    loudness = token_features(rows, transform.rows.pieces(group)) @ group.sensitivity
    edges = np.full(LOUD_CLASS, np.sort(loudness)[-4], np.float32)
    object.__setattr__(group, "loudness_edges", edges)
    try:
        loud = codec.encode(kv, level="klt:5", token_start=50, layer0=layer0)
        decoded = codec.decode(loud, layer0=layer0, dtype=np.float32).kv
    finally:
        make_profile.cache_clear()
    assert len(loud) > len(quiet)
    tokens = np.flatnonzero(loudness >= edges[0])
    assert len(tokens) == 4
    part = slice(group.first_layer, group.first_layer + group.num_layers)
    unit = np.abs(make_plain(100, seed=5)[part][:, :, tokens]).max() / (2**4 - 1)
    assert float(np.abs(decoded[part][:, :, tokens] - kv[part][:, :, tokens]).max()) <= unit
