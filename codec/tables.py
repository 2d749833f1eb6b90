"""Frequency tables of the entropy coder: from counts to what the kernels read.

A table gives each of a few consecutive integer values a frequency out of 4096, and one more to the
escape, behind which any other 16-bit value follows raw. Invariant: every frequency is at least 1 and a
table's frequencies sum to 4096, so that every symbol can be coded and every slot decodes to something.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec.errors import CorruptBitstream

__all__ = ["MAX_SYMBOLS", "PROB_BITS", "PROB_SCALE", "TableSet", "quantize_frequencies"]

PROB_BITS = 12
PROB_SCALE = 1 << PROB_BITS
MAX_SYMBOLS = 256
"""Symbols per table, the escape included: an index is a byte."""

MAX_TABLES = 4096
"""Tables per set: bounds what a profile can make the loader allocate (16 KiB of decode entries each)."""

RECIPROCAL_BITS = 44

ENCODE_DTYPE = np.dtype(
    [("reciprocal", "<u8"), ("frequency", "<u2"), ("cumulative", "<u2"), ("limit", "<u4")]
)
TABLE_DTYPE = np.dtype([("low", "<i4"), ("first", "<u4"), ("num_symbols", "<u4")])

F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class TableSet:
    """Tables that one level set shares. No slots: the kernels' forms are computed once, on demand."""

    lows: npt.NDArray[np.int32]
    """int32 [table]: the value of each table's first symbol."""

    starts: npt.NDArray[np.int64]
    """int64 [table + 1]: table t has frequencies[starts[t]:starts[t + 1]]; its last symbol is the escape."""

    frequencies: U16
    """uint16, all tables one after the other, each summing to 4096."""

    def __post_init__(self) -> None:
        """Check everything that the kernels trust.

        Raises:
            CorruptBitstream: the numbers make no tables.
        """
        num_tables = len(self.lows)
        sizes = np.diff(self.starts)
        if not 1 <= num_tables <= MAX_TABLES or len(self.starts) != num_tables + 1:
            raise CorruptBitstream(f"a table set has 1 to {MAX_TABLES} tables, not {num_tables}")
        if self.starts[0] != 0 or self.starts[-1] != len(self.frequencies):
            raise CorruptBitstream("the tables do not cover the frequencies")
        if sizes.min() < 2 or sizes.max() > MAX_SYMBOLS:
            raise CorruptBitstream(f"a table has 2 to {MAX_SYMBOLS} symbols, the escape included")
        if np.abs(self.lows).max() > 32768:
            raise CorruptBitstream("a table starts outside the 16-bit values")
        sums = np.add.reduceat(self.frequencies.astype(np.int64), self.starts[:-1])
        if self.frequencies.min() < 1 or bool(np.any(sums != PROB_SCALE)):
            raise CorruptBitstream(
                f"a table's frequencies are below 1 or do not sum to {PROB_SCALE}"
            )

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return len(self.lows)

    @functools.cached_property
    def tables(self) -> npt.NDArray[np.void]:
        """TABLE_DTYPE [table], `kv_table` in rangecoder.h."""
        out = np.zeros(self.num_tables, TABLE_DTYPE)
        out["low"] = self.lows
        out["first"] = self.starts[:-1]
        out["num_symbols"] = np.diff(self.starts)
        return out

    @functools.cached_property
    def cumulatives(self) -> npt.NDArray[np.int64]:
        """int64, like frequencies: sum of the frequencies before each symbol in its table."""
        running = np.cumsum(self.frequencies.astype(np.int64)) - self.frequencies
        return np.asarray(running % PROB_SCALE, np.int64)  # each table sums to one full scale

    @functools.cached_property
    def encode_symbols(self) -> npt.NDArray[np.void]:
        """ENCODE_DTYPE, like frequencies, `kv_encode_symbol` in rangecoder.h."""
        out = np.zeros(len(self.frequencies), ENCODE_DTYPE)
        frequency = self.frequencies.astype(np.uint64)
        out["reciprocal"] = ((1 << RECIPROCAL_BITS) + frequency - 1) // frequency
        out["frequency"] = self.frequencies
        out["cumulative"] = self.cumulatives
        out["limit"] = frequency << 20
        return out

    @functools.cached_property
    def decode_entries(self) -> npt.NDArray[np.uint32]:
        """uint32 [table, 4096]: per slot, offset in the symbol << 20 | frequency << 8 | index."""
        repeats = self.frequencies.astype(np.int64)
        index = np.arange(len(repeats)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        slots = np.arange(self.num_tables * PROB_SCALE) % PROB_SCALE
        offset = slots - np.repeat(self.cumulatives, repeats)
        packed = (offset << 20) | np.repeat((repeats << 8) | index, repeats)
        return packed.astype(np.uint32).reshape(self.num_tables, PROB_SCALE)

    def bits(self, table: int) -> F64:
        """Return float64 [symbol]: ideal cost of each symbol of a table, escape last, payload excluded."""
        part = self.frequencies[self.starts[table] : self.starts[table + 1]]
        return np.asarray(PROB_BITS - np.log2(part), np.float64)

    @staticmethod
    def from_rows(lows: npt.ArrayLike, rows: list[U16]) -> TableSet:
        """Build a set from one frequency array per table, escape last."""
        starts = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        return TableSet(np.asarray(lows, np.int32), starts, np.concatenate(rows).astype(np.uint16))


def quantize_frequencies(weights: npt.ArrayLike) -> U16:
    """Turn weights into frequencies of at least 1 that sum to 4096, losing the least code length.

    Args:
        weights: non-negative, 2 to 256 of them, not all zero.

    Returns:
        uint16, same length.

    Source: the code length is separable and convex in the frequencies, so that no move of one from one
    symbol to another that shortens it means that it is shortest; Fox, Operations Research 14 (1966).
    """
    weight = np.asarray(weights, np.float64)
    if not 2 <= len(weight) <= MAX_SYMBOLS or weight.min() < 0 or weight.sum() <= 0:
        raise ValueError("a table needs 2 to 256 non-negative weights, not all zero")
    weight = np.maximum(weight, 1e-12 * weight.sum())
    frequency = np.maximum(np.floor(weight / weight.sum() * PROB_SCALE), 1).astype(np.int64)
    while True:
        # What one more would save and one less would cost, in bits.
        gain = weight * np.log2((frequency + 1) / frequency)
        with np.errstate(divide="ignore"):
            loss = np.where(frequency > 1, weight * np.log2(frequency / (frequency - 1)), np.inf)
        missing = PROB_SCALE - int(frequency.sum())
        if missing > 0:
            frequency[gain.argmax()] += 1
        elif missing < 0:
            frequency[loss.argmin()] -= 1
        elif gain.max() > loss.min():
            frequency[gain.argmax()] += 1
            frequency[loss.argmin()] -= 1
        else:
            return np.asarray(frequency, np.uint16)
