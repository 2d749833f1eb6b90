from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from engine import RotaryTables, UnsupportedModel
from engine.rope import rotate, unrotate
from engine.rotary_probe import PROBE_SHIFT, PROBE_TOKENS, prove_rotation, with_identity


def tables(
    *, half: int = 4, interleaved: bool = False, scale: float = 1.0, layers: int = 3
) -> RotaryTables:
    positions = np.arange(PROBE_TOKENS + PROBE_SHIFT)[:, None]
    frequencies = [100.0 ** (-np.arange(half) / half), 3.0 ** (-np.arange(half) / half)]
    angles = np.stack([positions * f for f in frequencies])
    return RotaryTables(
        cos=(np.cos(angles) * scale).astype(np.float32),
        sin=(np.sin(angles) * scale).astype(np.float32),
        table_of_layer=np.arange(layers, dtype=np.int32) % 2,
        interleaved=interleaved,
        scaling=np.full(2, scale, np.float32),
    )


def random_keys(layers: int = 3, tokens: int = 10, dim: int = 12) -> np.ndarray:
    shape = (layers, tokens, 2, dim)
    return np.random.default_rng(layers + tokens).standard_normal(shape).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    interleaved=st.booleans(),
    scale=st.sampled_from([1.0, 0.7, 1.4]),
    start=st.integers(0, 40),
    half=st.integers(1, 6),
)
def test_unrotate_undoes_rotate(interleaved: bool, scale: float, start: int, half: int) -> None:
    turn = tables(half=half, interleaved=interleaved, scale=scale)
    keys = random_keys()
    back = unrotate(rotate(keys, turn, token_start=start), turn, token_start=start)
    np.testing.assert_allclose(back, keys, atol=1e-5)


def test_elements_beyond_the_rotary_width_pass_through() -> None:
    keys = random_keys()
    turned = rotate(keys, tables(half=4), token_start=5)
    np.testing.assert_array_equal(turned[..., 8:], keys[..., 8:])
    assert np.abs(turned[..., :8] - keys[..., :8]).max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_turn_is_a_complex_product_with_scaling(interleaved: bool) -> None:
    turn = tables(half=6, interleaved=interleaved, scale=0.5)
    keys = random_keys()
    pairs = (keys[..., 0::2], keys[..., 1::2]) if interleaved else (keys[..., :6], keys[..., 6:])
    spin = (turn.cos + 1j * turn.sin)[turn.table_of_layer][:, 3:13, None]
    expected = (pairs[0] + 1j * pairs[1]) * spin
    actual = rotate(keys, turn, token_start=3)
    parts = (
        (actual[..., 0::2], actual[..., 1::2])
        if interleaved
        else (actual[..., :6], actual[..., 6:])
    )
    np.testing.assert_allclose(parts[0], expected.real, atol=1e-5)
    np.testing.assert_allclose(parts[1], expected.imag, atol=1e-5)


def test_layer_start_picks_the_layers_own_table() -> None:
    keys, turn = random_keys(), tables()
    whole = rotate(keys, turn, token_start=2)
    np.testing.assert_array_equal(rotate(keys[1:2], turn, token_start=2, layer_start=1), whole[1:2])


def test_tokens_and_layers_outside_the_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the rotary tables"):
        rotate(random_keys(), tables(), token_start=PROBE_TOKENS + PROBE_SHIFT - 9)
    with pytest.raises(ValueError, match="outside the model"):
        rotate(random_keys(), tables(), token_start=0, layer_start=1)


def probe(turn: RotaryTables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    before = random_keys(tokens=PROBE_TOKENS)
    return (
        before[0],
        rotate(before, turn, token_start=0),
        rotate(before, turn, token_start=PROBE_SHIFT),
    )


def test_right_tables_are_proved_and_unturned_layers_found() -> None:
    turn = tables()
    layer0, keys, shifted = probe(turn)
    assert prove_rotation(turn, layer0, keys, shifted, name="m") == (False, False, False)
    shifted[2] = keys[2]
    unturned = prove_rotation(turn, layer0, keys, shifted, name="m")
    assert unturned == (False, False, True)
    fixed = with_identity(turn, unturned)
    np.testing.assert_array_equal(rotate(keys, fixed, token_start=7)[2], keys[2])
    np.testing.assert_array_equal(
        rotate(keys, fixed, token_start=7)[:2], rotate(keys, turn, token_start=7)[:2]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        replace(tables(), interleaved=True),
        replace(tables(), sin=-tables().sin),
        replace(tables(), table_of_layer=np.array([1, 0, 1], dtype=np.int32)),
    ],
    ids=["pairs", "direction", "tables swapped"],
)
def test_wrong_tables_are_refused(wrong: RotaryTables) -> None:
    layer0, keys, shifted = probe(tables())
    with pytest.raises(UnsupportedModel, match="model 'm'"):
        prove_rotation(wrong, layer0, keys, shifted, name="m")


def test_layer_0_that_is_not_the_keys_before_rope_is_refused() -> None:
    layer0, keys, shifted = probe(tables())
    with pytest.raises(UnsupportedModel, match="not rotated the way its config says"):
        prove_rotation(tables(), layer0 * np.float32(1.1), keys, shifted, name="m")
