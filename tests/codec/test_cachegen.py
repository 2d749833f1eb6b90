from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codec import CorruptBitstream, Profile, cachegen, reference
from codec.bitstream import parse
from codec.cachegen import CachegenStatistics, CachegenTransform
from codec.entropy import num_lanes
from tests.codec.builders import GEOMETRY, make_codec, make_kv, make_profile, oracle_channels

CODEC = make_codec()


def _check_against_oracle(kv: np.ndarray, level: int) -> None:
    data = CODEC.encode(kv, level=f"cachegen:{level}", token_start=7)
    stream = parse(data)
    full = CODEC.decode(data, dtype=np.float32)
    half = CODEC.decode(data, dtype=np.float16)
    assert (full.token_start, full.token_stop, full.level) == (
        7,
        7 + kv.shape[2],
        f"cachegen:{level}",
    )
    lanes = num_lanes(kv.shape[2])
    block = 0
    for layer in range(GEOMETRY.num_layers):
        for side in range(2):
            for head in range(GEOMETRY.num_kv_heads):
                channels = oracle_channels(
                    make_profile(), level=level, layer=layer, side=side, head=head
                )
                expected = reference.encode_cachegen_block(
                    kv[layer, side, :, head], channels, lanes
                )
                part = stream.payload[stream.offsets[block] : stream.offsets[block + 1]]
                assert part.tobytes() == expected
                values = reference.decode_cachegen_block(expected, channels, kv.shape[2], lanes)
                np.testing.assert_array_equal(full.kv[layer, side, :, head], values)
                np.testing.assert_array_equal(
                    half.kv[layer, side, :, head], reference.to_half(values)
                )
                block += 1


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 10, 11, 20, 37, 300])
@pytest.mark.parametrize("level", [0, 5])
def test_kernel_equals_the_oracle_at_ragged_lengths(num_tokens: int, level: int) -> None:
    _check_against_oracle(make_kv(num_tokens, seed=num_tokens), level)


@pytest.mark.parametrize("fill", [0.0, 3.25, -65504.0])
def test_kernel_equals_the_oracle_on_constant_rows(fill: float) -> None:
    _check_against_oracle(np.full(GEOMETRY.kv_shape(23), fill, np.float32), 2)


def test_kernel_equals_the_oracle_where_everything_escapes_or_saturates() -> None:
    rng = np.random.default_rng(4)
    kv = rng.choice([-1, 1], GEOMETRY.kv_shape(64)) * 10.0 ** rng.uniform(
        -8, 4.8, GEOMETRY.kv_shape(64)
    )
    _check_against_oracle(kv.astype(np.float32), 0)
    _check_against_oracle(kv.astype(np.float16), 3)


def test_error_of_a_delta_is_at_most_half_its_step() -> None:
    kv = make_kv(300, seed=8)
    statistics = CachegenStatistics.from_profile(make_profile())
    for index, level in enumerate(statistics.levels):
        data = CODEC.encode(kv, level=f"cachegen:{index}", token_start=0)
        decoded = CODEC.decode(data, dtype=np.float32).kv
        error = np.abs(decoded - kv).reshape(3, 2, 300, -1)
        is_anchor = np.arange(300) % 10 == 0
        slack = 1e-5 * np.abs(kv).reshape(3, 2, 300, -1) + 1e-7
        bound = np.where(
            is_anchor[:, None], level.anchor_step[:, :, None], level.delta_step[:, :, None]
        )
        assert bool(np.all(error <= bound / 2 + slack))


def test_coarser_levels_take_fewer_bytes_and_err_more() -> None:
    kv = make_kv(1000, seed=9)
    sizes, errors = [], []
    for index in range(6):
        data = CODEC.encode(kv, level=f"cachegen:{index}", token_start=0)
        sizes.append(len(data))
        errors.append(float(np.square(CODEC.decode(data, dtype=np.float32).kv - kv).mean()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


def test_threads_do_not_change_bytes_or_values() -> None:
    kv = make_kv(170, seed=10)
    many = make_codec(num_threads=4)
    data = CODEC.encode(kv, level="cachegen:1", token_start=0)
    assert data == many.encode(kv, level="cachegen:1", token_start=0)
    np.testing.assert_array_equal(CODEC.decode(data).kv, many.decode(data).kv)


def test_layers_encoded_in_parts_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(170, seed=11)
    data = CODEC.encode(kv, level="cachegen:1", token_start=0)
    for workspace in (1, 200_000):
        monkeypatch.setattr(cachegen, "WORKSPACE_BYTES", workspace)
        assert CODEC.encode(kv, level="cachegen:1", token_start=0) == data


def _broken(**changes: np.ndarray | None) -> Profile:
    profile = make_profile()
    arrays = {**profile.arrays, **changes}
    return replace(profile, arrays={k: v for k, v in arrays.items() if v is not None})


ARRAYS = make_profile().arrays


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"anchor_step": None}, "no array 'anchor_step'"),
        ({"anchor_step": ARRAYS["anchor_step"].astype(np.float16)}, "float16"),
        ({"anchor_step": ARRAYS["anchor_step"][:2]}, "not float32"),
        ({"anchor_step": np.zeros_like(ARRAYS["anchor_step"])}, "step"),
        ({"delta_scale": ARRAYS["delta_scale"] * np.float32(np.nan)}, "step"),
        ({"delta_scale": ARRAYS["delta_scale"] * np.float32(1e30)}, "step"),
        ({"bins": ARRAYS["bins"] * np.float32(-1)}, "step"),
        ({"bins": ARRAYS["bins"][:5]}, "bins"),
        ({"anchor_table": ARRAYS["anchor_table"] + np.uint16(9999)}, "table that is not there"),
        ({"delta_table": ARRAYS["delta_table"] + np.uint16(9999)}, "table that is not there"),
        ({"layer_group": ARRAYS["layer_group"] + np.uint8(1)}, "no layer group"),
        ({"anchor_shift": ARRAYS["anchor_shift"] + np.int16(20000)}, "shift"),
        ({"table_frequency": ARRAYS["table_frequency"] + np.uint16(1)}, "sum to 4096"),
    ],
)
def test_profiles_that_would_mislead_the_kernel_are_refused(
    changes: dict[str, np.ndarray | None], reason: str
) -> None:
    with pytest.raises(CorruptBitstream, match=reason):
        CachegenTransform(_broken(**changes), num_threads=1)


def test_levels_with_a_gap_are_refused() -> None:
    profile = make_profile()
    with pytest.raises(CorruptBitstream, match="not numbered from 0"):
        CachegenStatistics.from_profile(replace(profile, levels=profile.levels[1:]))
