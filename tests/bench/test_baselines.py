"""Schemes of others: their arithmetic on small arrays."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from bench.baselines.kvtc import allocate_bits, calibrate, pack_symbols
from bench.baselines.plain import int4, kivi, lmcache
from bench.baselines.scheme import Prepared, Scheme, shifted_keys, turned_keys
from engine.rope import RotaryTables, rotate


def tables(positions: int = 64, *, interleaved: bool = False, scaling: float = 1.0) -> RotaryTables:
    angles = np.arange(positions)[:, None] / 10.0 ** np.arange(3)
    return RotaryTables(
        cos=(np.cos(angles) * scaling)[None].astype(np.float32),
        sin=(np.sin(angles) * scaling)[None].astype(np.float32),
        table_of_layer=np.zeros(2, np.int32),
        interleaved=interleaved,
        scaling=np.asarray([scaling], np.float32),
    )


def keys(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, num_tokens, 3, 8)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_consecutive_positions_turn_as_the_engine_turns(interleaved: bool) -> None:
    made = turned_keys(keys(9), tables(interleaved=interleaved), np.arange(5, 14), inverse=False)
    expected = rotate(keys(9), tables(interleaved=interleaved), token_start=5)
    np.testing.assert_allclose(made, expected, atol=1e-6)


def test_turning_back_undoes_positions_of_each_head() -> None:
    where = np.random.default_rng(2).integers(0, 64, (2, 9, 3))
    scaled = tables(scaling=1.25)
    there = turned_keys(keys(9), scaled, where, inverse=False)
    np.testing.assert_allclose(turned_keys(there, scaled, where, inverse=True), keys(9), atol=1e-5)


@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_a_shift_is_what_smaller_positions_give(scaling: float) -> None:
    far = turned_keys(keys(4), tables(scaling=scaling), np.asarray([20, 22, 30, 31]), inverse=False)
    near = turned_keys(keys(4), tables(scaling=scaling), np.asarray([5, 7, 15, 16]), inverse=False)
    np.testing.assert_allclose(shifted_keys(far, tables(scaling=scaling), 15), near, atol=1e-5)


def test_bits_go_where_the_error_falls_most() -> None:
    bits = allocate_bits(np.asarray([[100.0, 1.0], [1e-6, 1e-6]]), 1.0)
    assert bits.sum() == 4
    assert bits[0, 0] > bits[0, 1] >= 0
    assert not bits[1].any()


def test_no_budget_gives_no_bits() -> None:
    assert not allocate_bits(np.ones((2, 5)), 0.0).any()


def test_packed_symbols_take_their_bits() -> None:
    symbols = np.asarray([[1, 0, 1, 1, 0, 0, 1, 0], [7, 0, 5, 1, 2, 3, 4, 6]], np.uint8)
    packed = zlib.decompress(pack_symbols(symbols, np.asarray([1, 3])))
    assert len(packed) == 1 + 3
    assert packed[0] == 0b10110010
    assert int.from_bytes(packed[1:], "big") == int("".join(f"{s:03b}" for s in symbols[1]), 2)


def test_the_basis_finds_the_direction_that_data_lies_in() -> None:
    rng = np.random.default_rng(3)
    direction = rng.normal(size=2 * 3 * 8)
    direction /= np.linalg.norm(direction)
    rows = 5 * rng.normal(size=(400, 1)) * direction + 0.1 * rng.normal(size=(400, direction.size))
    kv = rows.reshape(400, 2, 3, 8).transpose(1, 0, 2, 3)[:, None].repeat(2, axis=1)
    basis = calibrate([kv.astype(np.float32)])
    assert abs(basis.vectors[0][:, 0] @ direction) > 0.99
    assert basis.variance[1, 0] == pytest.approx(25, rel=0.2)


@pytest.mark.parametrize("make", [int4, lmcache, lambda: kivi(4)])
def test_schemes_give_back_about_what_they_got_for_fewer_bytes(make: Callable[[], Scheme]) -> None:
    kv = np.random.default_rng(4).normal(size=(3, 2, 300, 2, 32)).astype(np.float32)
    coded = make().run(Prepared(None, range(300), kv, kv[0]))
    assert coded.kv.shape == kv.shape
    assert np.abs(coded.kv - kv).mean() < 0.2
    assert kv.size / 4 < coded.num_bytes < kv.size
