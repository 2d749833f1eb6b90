"""Blocks of runs of symbols through the entropy coder, on the CPU: the part that transforms share.

A run is a stretch of symbols with one table and one shift; a block is a list of runs with its own lanes,
decodable without any other block. docs/bitstream.md, "The coder".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import native
from codec.tables import TableSet

__all__ = ["BlockLayout", "decode_blocks", "encode_blocks", "max_block_bytes", "num_lanes"]

MAX_LANES = 32
RUN_DTYPE = np.dtype([("table", "<u4"), ("shift", "<i4"), ("length", "<u4")])
BLOCK_DTYPE = np.dtype(
    [
        ("first_run", "<u8"),
        ("first_symbol", "<u8"),
        ("space", "<u8"),
        ("num_runs", "<u4"),
        ("num_lanes", "<u4"),
    ]
)

I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


def num_lanes(longest_run: int) -> int:
    """Return the lanes of a block: a power of two up to 32, fewer for short runs. `kv_num_lanes`."""
    lanes = 1
    while lanes < MAX_LANES and lanes * 16 <= longest_run:
        lanes *= 2
    return lanes


def max_block_bytes(num_symbols: int, lanes: int) -> int:
    """Return a bound on a block: a state per lane, a word per symbol and one per escape."""
    return 4 * lanes + 4 * num_symbols


@dataclass(frozen=True, eq=False, slots=True)
class BlockLayout:
    """Which symbols with which tables make which block."""

    runs: npt.NDArray[np.void]
    """RUN_DTYPE: table, shift and length, all blocks' runs one after the other."""

    runs_per_block: npt.NDArray[np.int64]
    """int64 [block]."""

    def __post_init__(self) -> None:
        assert int(self.runs_per_block.sum()) == len(self.runs)
        assert self.runs_per_block.min() >= 1

    @property
    def num_symbols(self) -> int:
        """Symbols in all blocks."""
        return int(self.runs["length"].sum(dtype=np.int64))

    def blocks(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """Return BLOCK_DTYPE [block] without spaces, and int64 [block]: symbols of each."""
        first = np.cumsum(self.runs_per_block) - self.runs_per_block
        symbols = np.add.reduceat(self.runs["length"].astype(np.int64), first)
        longest = np.maximum.reduceat(self.runs["length"], first)
        out = np.zeros(len(first), BLOCK_DTYPE)
        out["first_run"] = first
        out["first_symbol"] = np.cumsum(symbols) - symbols
        out["num_runs"] = self.runs_per_block
        out["num_lanes"] = [num_lanes(int(n)) for n in longest]
        return out, symbols


def encode_blocks(
    layout: BlockLayout, tables: TableSet, symbols: I16, *, num_threads: int
) -> tuple[U8, U32]:
    """Encode symbols.

    Args:
        layout: runs and blocks; table numbers below tables.num_tables.
        tables: frequencies.
        symbols: int16 [layout.num_symbols], block after block, run after run.
        num_threads: at least 1.

    Returns:
        payload: uint8, the blocks one after the other.
        offsets: uint32 [block + 1] into it.
    """
    assert symbols.shape == (layout.num_symbols,)
    assert int(layout.runs["table"].max()) < tables.num_tables
    blocks, counts = layout.blocks()
    spaces = (4 * blocks["num_lanes"].astype(np.int64) + 4 * counts).astype(np.uint64)
    blocks["space"] = np.cumsum(spaces) - spaces
    output = np.empty(int(spaces.sum()), np.uint8)
    sizes = np.zeros(len(blocks), np.uint32)
    native.call(
        "kv_encode_blocks",
        native.Tables.of(tables, decode=False),
        blocks,
        len(blocks),
        layout.runs,
        np.ascontiguousarray(symbols),
        output,
        spaces,
        sizes,
        num_threads,
    )
    return gather_blocks(output, (blocks["space"] + spaces).astype(np.int64), sizes)


def gather_blocks(output: U8, ends: npt.NDArray[np.int64], sizes: U32) -> tuple[U8, U32]:
    """Close the gaps between blocks that were written against the ends of their spaces."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
    payload = np.empty(int(offsets[-1]), np.uint8)
    for start, stop, end, size in zip(offsets[:-1], offsets[1:], ends, sizes, strict=True):
        payload[start:stop] = output[end - size : end]
    return payload, offsets.astype(np.uint32)


def decode_blocks(
    layout: BlockLayout, tables: TableSet, payload: U8, offsets: U32, *, num_threads: int
) -> I16:
    """Undo `encode_blocks`.

    Returns:
        int16 [layout.num_symbols].

    Raises:
        CorruptBitstream: a block is cut, too long, or does not end in its initial state.
    """
    assert int(layout.runs["table"].max()) < tables.num_tables
    blocks, _ = layout.blocks()
    blocks["space"] = offsets[:-1]
    symbols = np.empty(layout.num_symbols, np.int16)
    status = np.zeros(len(blocks), np.int32)
    native.call(
        "kv_decode_blocks",
        native.Tables.of(tables, decode=True),
        blocks,
        len(blocks),
        layout.runs,
        np.ascontiguousarray(payload),
        np.diff(offsets).astype(np.uint32),
        symbols,
        status,
        num_threads,
    )
    native.check_status(status)
    return symbols
