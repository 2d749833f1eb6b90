from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from codec import Codec, CorruptBitstream, Geometry, inspect_bitstream, reference
from codec.bitstream import Bitstream, pack, parse
from codec.geometry import BLOCK_TOKENS
from tests.codec.builders import GEOMETRY, MODEL_DIGEST, make_codec, make_kv

halves = hnp.arrays(
    np.float16,
    st.integers(1, 30).map(lambda n: (1, 2, n, 1, 4)),
    elements=st.floats(-65504, 65504, width=16),
)
floats = hnp.arrays(
    np.float32,
    st.integers(1, 30).map(lambda n: (1, 2, n, 1, 4)),
    elements=st.floats(-65504, 65504, width=32),
)
TINY = Codec(Geometry(1, 1, 4), model_digest=MODEL_DIGEST, num_threads=1)


@settings(deadline=None)
@given(st.one_of(halves, floats))
def test_fp16_bytes_equal_the_oracles(kv: np.ndarray) -> None:
    stream = parse(TINY.encode(kv, level="fp16", token_start=0))
    expected = b"".join(reference.encode_fp16_block(kv[0, side, :, 0]) for side in range(2))
    assert stream.payload.tobytes() == expected


@settings(deadline=None)
@given(st.one_of(halves, floats))
def test_int8_bytes_and_values_equal_the_oracles(kv: np.ndarray) -> None:
    data = TINY.encode(kv, level="int8", token_start=0)
    blocks = [reference.encode_int8_block(kv[0, side, :, 0]) for side in range(2)]
    assert parse(data).payload.tobytes() == b"".join(blocks)
    full = TINY.decode(data, dtype=np.float32).kv
    half = TINY.decode(data, dtype=np.float16).kv
    for side in range(2):
        values = reference.decode_int8_block(blocks[side], kv.shape[2], 4)
        np.testing.assert_array_equal(full[0, side, :, 0], values)
        np.testing.assert_array_equal(half[0, side, :, 0], reference.to_half(values))


@settings(deadline=None)
@given(halves)
def test_int8_error_is_at_most_half_a_step_of_the_row(kv: np.ndarray) -> None:
    decoded = TINY.decode(TINY.encode(kv, level="int8", token_start=0), dtype=np.float32).kv
    wide = kv.astype(np.float64)
    step = np.abs(wide).max(axis=-1, keepdims=True) / 127
    limit = step * 0.5 * (1 + 2.0**-9) + 2.0**-25  # the scale is a half, rounded up
    assert bool(np.all(np.abs(decoded - wide) <= limit))


def test_fp16_keeps_every_finite_half_exactly_also_through_float32() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    values = patterns.view(np.float16)
    finite = values[np.isfinite(values)]
    kv = finite.reshape(1, 2, -1, 1, 4)
    for array in (kv, kv.astype(np.float32)):
        data = TINY.encode(array, level="fp16", token_start=0)
        decoded = TINY.decode(data, dtype=array.dtype).kv
        assert decoded.astype(np.float16).tobytes() == kv.tobytes()


def test_float32_rounds_to_half_like_numpy_on_ties_and_subnormals() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    samples = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    )
    samples = np.concatenate([samples, -samples])[: 8 * (len(samples) // 4)]
    kv = samples[: len(samples) // 8 * 8].reshape(1, 2, -1, 1, 4)
    decoded = TINY.decode(TINY.encode(kv, level="fp16", token_start=0)).kv
    np.testing.assert_array_equal(decoded, kv.astype(np.float16))


def test_zero_rows_are_zero_and_constant_rows_are_exact_at_int8() -> None:
    kv = np.zeros(GEOMETRY.kv_shape(3), np.float32)
    kv[:, :, 1] = 1.27
    decoded = make_codec().decode(make_codec().encode(kv, level="int8", token_start=0)).kv
    assert not decoded[:, :, 0].any()
    np.testing.assert_allclose(decoded[:, :, 1], 1.27, rtol=1e-3)


def test_long_chunks_are_cut_into_spans_and_threads_do_not_change_bytes() -> None:
    geometry = Geometry(1, 2, 2)
    kv = make_kv(2 * BLOCK_TOKENS + 3, seed=1, geometry=geometry)
    for level in ("fp16", "int8"):
        one = Codec(geometry, model_digest=MODEL_DIGEST, num_threads=1)
        many = Codec(geometry, model_digest=MODEL_DIGEST, num_threads=5)
        data = one.encode(kv, level=level, token_start=0)
        assert data == many.encode(kv, level=level, token_start=0)
        assert inspect_bitstream(data).num_blocks == 1 * 2 * 2 * 3
        np.testing.assert_array_equal(one.decode(data).kv, many.decode(data).kv)


def _with(stream: Bitstream, payload: np.ndarray) -> bytes:
    return pack(
        Bitstream(
            stream.level_set,
            stream.level_index,
            stream.geometry,
            stream.token_start,
            stream.token_stop,
            stream.block_tokens,
            stream.model_digest,
            stream.profile_digest,
            stream.offsets,
            payload,
        )
    )


@pytest.mark.parametrize("pattern", [0x7C00, 0xFC00, 0x7E01])
def test_infinite_or_nan_halves_are_corrupt(pattern: int) -> None:
    codec = make_codec()
    stream = parse(codec.encode(make_kv(5, seed=2), level="fp16", token_start=0))
    payload = stream.payload.copy()
    payload[6:8] = np.frombuffer(np.uint16(pattern).tobytes(), np.uint8)
    with pytest.raises(CorruptBitstream, match="value 3 of the payload is not finite"):
        codec.decode(_with(stream, payload))


@pytest.mark.parametrize("pattern", [0x7C00, 0x7E01, 0x8001])
def test_infinite_nan_or_negative_scales_are_corrupt(pattern: int) -> None:
    codec = make_codec()
    stream = parse(codec.encode(make_kv(5, seed=2), level="int8", token_start=0))
    payload = stream.payload.copy()
    payload[:2] = np.frombuffer(np.uint16(pattern).tobytes(), np.uint8)
    with pytest.raises(CorruptBitstream, match="block 0 is corrupt: it has a scale"):
        codec.decode(_with(stream, payload))
