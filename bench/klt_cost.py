"""What a `klt` bitstream would take if its coder were perfect: the cross-entropy of its symbols against the tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codec import native
from codec.bitstream import parse
from codec.klt import KltTransform
from codec.klt_native import KltChunk
from codec.klt_plan import NUM_CLASSES
from codec.tables import PROB_SCALE, TableSet

__all__ = ["KltCost", "klt_cost"]

ESCAPE_BITS = 16
"""An escaped symbol's own bits, after its escape."""

COUNTED = 256
ZERO = 127
"""kv_klt_count's columns: value v at v + 127, all beyond in the last."""


@dataclass(frozen=True, slots=True)
class KltCost:
    """Bytes of one bitstream."""

    total_bytes: int
    symbol_bytes: float
    """-log2 of the probabilities that the tables in use give to symbols and classes, escapes' own bits included."""

    beside_bytes: int
    """Sink and loud tokens, which no table codes."""

    @property
    def over_ideal(self) -> float:
        """Everything, headers and offsets too, over symbols and what is beside them."""
        return self.total_bytes / (self.symbol_bytes + self.beside_bytes)

    @property
    def over_symbols(self) -> float:
        """Everything over the symbols alone."""
        return self.total_bytes / self.symbol_bytes


def klt_cost(transform: KltTransform, data: bytes) -> KltCost:
    """Count what the symbols of a bitstream of the transform's profile cost.

    Args:
        transform: with the profile that `data` was made with.
        data: a whole bitstream of a `klt` level.
    """
    stream = parse(data)
    level = transform.plan.levels[stream.level_index]
    decoded = transform.blocks.symbols(stream)
    num_tokens = stream.num_tokens
    tables = transform.plan.tables
    counts = np.zeros((tables.num_tables, COUNTED), np.int64)
    native.call(
        "kv_klt_count",
        KltChunk.of(
            level.placed(num_tokens),
            level.components,
            num_tokens=num_tokens,
            block_tokens=num_tokens,
            num_threads=1,
        ),
        np.ascontiguousarray(decoded.values, np.int16),
        decoded.classes,
        counts,
    )
    bits = sum(
        _table_bits(tables, table, counts[table])
        for table in range(tables.num_tables)
        if counts[table].any()
    )
    for group, row in zip(level.groups, decoded.classes, strict=True):
        if int(group["num_components"]):
            start = int(tables.starts[int(group["class_table"])])
            frequency = tables.frequencies[start : start + NUM_CLASSES].astype(np.float64)
            seen = np.bincount(row, minlength=NUM_CLASSES)
            bits += float(-(seen * np.log2(frequency / PROB_SCALE)).sum())
    return KltCost(len(data), bits / 8, int(stream.offsets[1]))


def _table_bits(
    tables: TableSet, table: int, counts: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> float:
    start, stop = int(tables.starts[table]), int(tables.starts[table + 1])
    frequency = tables.frequencies[start:stop].astype(np.float64)
    place = np.arange(COUNTED) - ZERO - int(tables.lows[table])
    escape = stop - start - 1
    escaped = (place < 0) | (place >= escape) | (np.arange(COUNTED) == COUNTED - 1)
    cost = -np.log2(frequency[np.where(escaped, escape, place)] / PROB_SCALE)
    return float((counts * (cost + ESCAPE_BITS * escaped)).sum())
