from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from codec.entropy import (
    RUN_DTYPE,
    BlockLayout,
    decode_blocks,
    encode_blocks,
    max_block_bytes,
    num_lanes,
)
from codec.errors import CorruptBitstream
from codec.reference import OracleRun, decode_symbols, encode_symbols
from codec.tables import TableSet, quantize_frequencies
from tests.codec.builders import table_row

TABLES = TableSet.from_rows(
    [-3, 0, -100],
    [
        quantize_frequencies([1, 5, 40, 400, 40, 5, 1, 0.01]),
        quantize_frequencies([1, 1e-9]),
        quantize_frequencies(np.ones(256)),
    ],
)

symbol = st.one_of(st.integers(-4, 4), st.integers(-110, 170), st.integers(-32768, 32767))
run = st.tuples(
    st.integers(0, 2), st.integers(-500, 500), st.lists(symbol, min_size=1, max_size=150)
)
block = st.lists(run, min_size=1, max_size=4)
Block = list[tuple[int, int, list[int]]]


def _arrays(blocks: list[Block]) -> tuple[BlockLayout, np.ndarray]:
    runs = np.asarray(
        [(table, shift, len(values)) for runs in blocks for table, shift, values in runs], RUN_DTYPE
    )
    symbols = np.asarray([v for runs in blocks for _, _, values in runs for v in values], np.int16)
    return BlockLayout(runs, np.asarray([len(runs) for runs in blocks])), symbols


def _oracle(runs: Block) -> tuple[list[OracleRun], int]:
    longest = max(len(values) for _, _, values in runs)
    return [
        OracleRun(table_row(TABLES, table), int(TABLES.lows[table]) + shift, shift, values)
        for table, shift, values in runs
    ], num_lanes(longest)


@settings(deadline=None)
@given(st.lists(block, min_size=1, max_size=3), st.integers(1, 3))
def test_kernel_bytes_equal_the_oracles_and_decode_to_the_symbols(
    blocks: list[Block], threads: int
) -> None:
    layout, symbols = _arrays(blocks)
    payload, offsets = encode_blocks(layout, TABLES, symbols, num_threads=threads)
    for index, runs in enumerate(blocks):
        data = payload[offsets[index] : offsets[index + 1]].tobytes()
        oracle_runs, lanes = _oracle(runs)
        assert data == encode_symbols(oracle_runs, lanes)
        assert decode_symbols(data, oracle_runs, lanes) == [values for _, _, values in runs]
        assert len(data) <= max_block_bytes(sum(len(v) for _, _, v in runs), lanes)
    decoded = decode_blocks(layout, TABLES, payload, offsets, num_threads=threads)
    np.testing.assert_array_equal(decoded, symbols)


def test_long_runs_use_all_lanes_and_equal_the_oracle() -> None:
    rng = np.random.default_rng(5)
    values = [int(v) for v in np.rint(rng.normal(size=3000) * 1.2)]
    values[700] = 30000
    runs: Block = [(0, 0, values), (2, 40, values[:1000])]
    layout, symbols = _arrays([runs])
    payload, offsets = encode_blocks(layout, TABLES, symbols, num_threads=1)
    oracle_runs, lanes = _oracle(runs)
    assert lanes == 32
    assert payload.tobytes() == encode_symbols(oracle_runs, lanes)
    decoded = decode_blocks(layout, TABLES, payload, offsets, num_threads=1)
    np.testing.assert_array_equal(decoded, symbols)


def test_rate_is_the_tables_cross_entropy_plus_three_bytes_a_lane() -> None:
    rng = np.random.default_rng(6)
    row = table_row(TABLES, 0)
    values = rng.choice(7, size=200_000, p=np.asarray(row[:-1]) / sum(row[:-1])) - 3
    layout, symbols = _arrays([[(0, 0, [int(v) for v in values])]])
    payload, _ = encode_blocks(layout, TABLES, symbols, num_threads=1)
    ideal = TABLES.bits(0)[values + 3].sum()
    assert ideal <= 8 * len(payload) <= ideal * 1.001 + 32 * 8 * 4


@pytest.mark.parametrize("worst", [-32768, 32767, 4, -3])
def test_worst_case_stays_within_the_bound(worst: int) -> None:
    layout, symbols = _arrays([[(1, 0, [worst] * 1000)]])
    payload, offsets = encode_blocks(layout, TABLES, symbols, num_threads=1)
    assert payload.nbytes <= max_block_bytes(1000, 32)
    decoded = decode_blocks(layout, TABLES, payload, offsets, num_threads=1)
    np.testing.assert_array_equal(decoded, symbols)


def test_every_truncation_of_a_block_is_noticed() -> None:
    values = [int(v) for v in np.rint(np.random.default_rng(7).normal(size=600) * 2)]
    layout, symbols = _arrays([[(0, 0, values)]])
    payload, _ = encode_blocks(layout, TABLES, symbols, num_threads=1)
    for size in range(payload.nbytes):
        cut = payload[:size]
        with pytest.raises(CorruptBitstream, match="block 0"):
            decode_blocks(layout, TABLES, cut, np.asarray([0, size], np.uint32), num_threads=1)


def test_words_after_the_last_symbol_are_noticed() -> None:
    layout, symbols = _arrays([[(0, 0, [0] * 100)]])
    payload, _ = encode_blocks(layout, TABLES, symbols, num_threads=1)
    longer = np.append(payload, np.zeros(2, np.uint8))
    with pytest.raises(CorruptBitstream, match="left after"):
        decode_blocks(
            layout, TABLES, longer, np.asarray([0, len(longer)], np.uint32), num_threads=1
        )


@settings(deadline=None)
@given(st.binary(min_size=0, max_size=400))
def test_any_bytes_decode_or_raise_but_never_crash(data: bytes) -> None:
    layout, _ = _arrays([[(0, 0, [0] * 200), (2, -7, [0] * 90)]])
    payload = np.frombuffer(data, np.uint8)
    with contextlib.suppress(CorruptBitstream):
        decode_blocks(layout, TABLES, payload, np.asarray([0, len(data)], np.uint32), num_threads=1)


@pytest.mark.parametrize(
    ("longest", "lanes"), [(1, 1), (15, 1), (16, 2), (255, 16), (256, 32), (9999, 32)]
)
def test_short_runs_get_few_lanes(longest: int, lanes: int) -> None:
    assert num_lanes(longest) == lanes
