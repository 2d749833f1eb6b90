from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from codec.errors import CorruptBitstream
from codec.tables import PROB_SCALE, TableSet, quantize_frequencies

weights = st.lists(st.floats(0, 1e9), min_size=2, max_size=256).filter(lambda w: sum(w) > 1e-300)


@given(weights)
def test_frequencies_sum_to_the_scale_and_are_never_zero(values: list[float]) -> None:
    frequencies = quantize_frequencies(values)
    assert int(frequencies.sum()) == PROB_SCALE
    assert frequencies.min() >= 1


def test_no_single_move_of_a_frequency_shortens_the_code() -> None:
    weight = np.random.default_rng(3).exponential(size=40) ** 3
    frequencies = quantize_frequencies(weight).astype(np.float64)
    cost = -(weight * np.log2(frequencies)).sum()
    for taker in range(40):
        for giver in range(40):
            moved = frequencies.copy()
            moved[taker] += 1
            moved[giver] -= 1
            if taker != giver and moved[giver] >= 1:
                assert -(weight * np.log2(moved)).sum() >= cost - 1e-9


@pytest.mark.parametrize("bad", [[], [1.0], [0.0, 0.0], [-1.0, 2.0], [1.0] * 257])
def test_impossible_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        quantize_frequencies(bad)


def test_every_slot_decodes_to_its_symbol() -> None:
    rows = [quantize_frequencies([5, 1, 3]), quantize_frequencies([1, 100])]
    tables = TableSet.from_rows([-1, 7], rows)
    for number, row in enumerate(rows):
        slot = 0
        for index, frequency in enumerate(int(f) for f in row):
            for offset in range(frequency):
                entry = int(tables.decode_entries[number, slot])
                assert (entry & 255, entry >> 8 & 4095, entry >> 20) == (index, frequency, offset)
                slot += 1
        assert slot == PROB_SCALE


def test_reciprocals_divide_exactly_up_to_the_largest_state() -> None:
    frequency = np.arange(1, PROB_SCALE, dtype=np.uint64)
    reciprocal = (np.uint64(1 << 44) + frequency - 1) // frequency
    rng = np.random.default_rng(0)
    limit = frequency << np.uint64(20)
    states = [limit - 1, limit - frequency, limit - frequency - 1, frequency, frequency - 1]
    states += [rng.integers(0, limit, dtype=np.uint64) for _ in range(200)]
    states += [
        rng.integers(1, 1 << 20, size=frequency.size, dtype=np.uint64) * frequency - 1
        for _ in range(200)
    ]
    for state in states:
        assert int((state.astype(object) * reciprocal.astype(object)).max()) < 2**64
        np.testing.assert_array_equal((state * reciprocal) >> np.uint64(44), state // frequency)


def _set(**changes: object) -> None:
    fields: dict[str, object] = {
        "lows": np.asarray([0], np.int32),
        "starts": np.asarray([0, 2], np.int64),
        "frequencies": np.asarray([4000, 96], np.uint16),
    }
    TableSet(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"lows": np.asarray([], np.int32), "starts": np.asarray([0], np.int64)},
        {"starts": np.asarray([0, 3], np.int64)},
        {"starts": np.asarray([1, 2], np.int64)},
        {"starts": np.asarray([0, 1], np.int64), "frequencies": np.asarray([4096], np.uint16)},
        {"frequencies": np.asarray([4096, 0], np.uint16)},
        {"frequencies": np.asarray([4000, 95], np.uint16)},
        {"lows": np.asarray([70000], np.int32)},
        {"lows": np.asarray([0, 0], np.int32), "starts": np.asarray([0, 2, 2], np.int64)},
    ],
)
def test_numbers_that_make_no_tables_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptBitstream):
        _set(**changes)
