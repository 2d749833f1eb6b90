"""The entropy-coded blocks of level set `klt`: symbols and classes of a chunk to blocks and back.

A level's blocks code its symbols; a refinement's blocks code what turns the symbols of the level two coarser
into those of its own. docs/bitstream-v2.md, section 2, and docs/bitstream-v3.md.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import native
from codec.bitstream import Bitstream
from codec.entropy import gather_blocks
from codec.errors import CorruptBitstream
from codec.klt_native import SPLIT_DTYPE, SPLIT_LIMIT, KltChunk
from codec.klt_plan import KltPlan, LevelPlan
from codec.tables import PROB_SCALE, TableSet

__all__ = ["BLOCK_TOKENS", "KltBlocks", "KltSymbols", "split_frequencies"]

BLOCK_TOKENS = 128
"""Tokens per block: four tiles of a warp. A block's lanes cost 64 bytes, 0.4 % of a block at 0.5 bits."""

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False, slots=True)
class KltSymbols:
    """A chunk's symbols at one level."""

    values: I32
    """int32 [component, token], all groups' components one after the other."""

    classes: U8
    """uint8 [group, token]; the same at every level."""

    @property
    def checksum(self) -> int:
        """CRC-32 of values and classes: by it a refinement knows what it refines."""
        values = np.ascontiguousarray(self.values, "<i4").data
        return zlib.crc32(np.ascontiguousarray(self.classes).data, zlib.crc32(values))


class KltBlocks:
    """Codes blocks with a profile's tables."""

    def __init__(self, plan: KltPlan, *, num_threads: int) -> None:
        self.plan = plan
        self.num_threads = num_threads

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a chunk: what is beside the transform, then one per group and span."""
        return 1 + len(self.plan.groups) * -(-num_tokens // BLOCK_TOKENS)

    @functools.cached_property
    def _splits(self) -> npt.NDArray[np.void]:
        return split_frequencies(self.plan.tables)

    # ---- encode -----------------------------------------------------------------------------------------

    def encode(self, level: LevelPlan, symbols: I16, classes: U8) -> tuple[U8, U32]:
        """Encode a level.

        Args:
            level: whose tables are used.
            symbols: int16 [component, token].
            classes: uint8 [group, token], below LOUD_CLASS.

        Returns:
            payload: uint8, the groups' blocks one after the other.
            offsets: uint32 [block + 1] into it.
        """
        num_tokens = symbols.shape[1]
        output, space, sizes = self._space(level, num_tokens)
        native.call(
            "kv_klt_encode",
            self._chunk(level, num_tokens),
            native.Tables.of(self.plan.tables, decode=False),
            symbols,
            classes,
            output,
            space,
            sizes,
        )
        return _gathered(output, space, sizes)

    def encode_refinement(
        self, index: int, base_index: int, symbols: I16, base: I16, classes: U8
    ) -> tuple[U8, U32]:
        """Encode what makes `base`, int16 [component, token] of level `base_index`, into `symbols` of `index`.

        Returns:
            Like `encode`.
        """
        level, num_tokens = self.plan.levels[index], symbols.shape[1]
        output, space, sizes = self._space(level, num_tokens)
        native.call(
            "kv_klt_encode_refinement",
            self._chunk(level, num_tokens),
            self.plan.levels[base_index].placed(num_tokens),
            native.Tables.of(self.plan.tables, decode=False),
            self._splits,
            symbols,
            base,
            classes,
            output,
            space,
            sizes,
        )
        return _gathered(output, space, sizes)

    def _space(self, level: LevelPlan, num_tokens: int) -> tuple[U8, int, U32]:
        most = int(level.groups["num_components"].max())
        space = 4 * 32 + 4 * min(BLOCK_TOKENS, num_tokens) * (most + 1)
        num_blocks = self.num_blocks(num_tokens) - 1
        output = np.empty(num_blocks * space, np.uint8)  # mostly untouched pages
        return output, space, np.zeros(num_blocks, np.uint32)

    # ---- decode -----------------------------------------------------------------------------------------

    def coefficients(self, stream: Bitstream) -> F32:
        """Return float32 [component, token]: a level's coefficients.

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes.
        """
        level, num_tokens = self.plan.levels[stream.level_index], stream.num_tokens
        offsets = self.check(stream)
        out = np.empty((level.num_components, num_tokens), np.float32)
        status = np.zeros(len(offsets) - 1, np.int32)
        native.call(
            "kv_klt_decode",
            self._chunk(level, num_tokens),
            native.Tables.of(self.plan.tables, decode=True),
            np.ascontiguousarray(stream.payload),
            offsets,
            np.asarray([level.step]),
            out,
            status,
        )
        native.check_status(status)
        return out

    def symbols(self, stream: Bitstream) -> KltSymbols:
        """Return a level's symbols.

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes.
        """
        level, num_tokens = self.plan.levels[stream.level_index], stream.num_tokens
        offsets = self.check(stream)
        values = np.empty((level.num_components, num_tokens), np.int32)
        # Groups without components have empty blocks; their tokens are of any class.
        classes = np.zeros((len(self.plan.groups), num_tokens), np.uint8)
        status = np.zeros(len(offsets) - 1, np.int32)
        native.call(
            "kv_klt_decode_symbols",
            self._chunk(level, num_tokens),
            native.Tables.of(self.plan.tables, decode=True),
            np.ascontiguousarray(stream.payload),
            offsets,
            values,
            classes,
            status,
        )
        native.check_status(status)
        return KltSymbols(values, classes)

    def refined(self, base: KltSymbols, stream: Bitstream) -> KltSymbols:
        """Return the symbols of a refinement's level, from those of the level that it refines.

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes.
        """
        assert stream.base_index is not None
        level, num_tokens = self.plan.levels[stream.level_index], stream.num_tokens
        offsets = self.check(stream)
        values = np.empty((level.num_components, num_tokens), np.int32)
        status = np.zeros(len(offsets) - 1, np.int32)
        native.call(
            "kv_klt_decode_refinement",
            self._chunk(level, num_tokens),
            self.plan.levels[stream.base_index].placed(num_tokens),
            native.Tables.of(self.plan.tables, decode=True),
            self._splits,
            np.ascontiguousarray(stream.payload),
            offsets,
            base.values,
            base.classes,
            values,
            status,
        )
        native.check_status(status)
        return KltSymbols(values, base.classes)

    def dequantized(self, index: int, symbols: KltSymbols) -> F32:
        """Return float32 [component, token]: the coefficients that a level's symbols stand for."""
        level = self.plan.levels[index]
        out = np.empty(symbols.values.shape, np.float32)
        native.call(
            "kv_klt_dequantize",
            self._chunk(level, symbols.values.shape[1]),
            symbols.values,
            symbols.classes,
            np.asarray([level.step]),
            out,
        )
        return out

    def check(self, stream: Bitstream) -> U32:
        """Return the offsets of the groups' blocks, uint32 [block + 1].

        Raises:
            CorruptBitstream: blocks of another count or size than the profile makes.
        """
        num_tokens = stream.num_tokens
        if stream.block_tokens != BLOCK_TOKENS:
            raise CorruptBitstream(
                f"blocks of {stream.block_tokens} tokens; level set klt has {BLOCK_TOKENS}"
            )
        if len(stream.offsets) != self.num_blocks(num_tokens) + 1:
            raise CorruptBitstream(
                f"{len(stream.offsets) - 1} blocks where the profile makes {self.num_blocks(num_tokens)}"
            )
        if np.any(stream.offsets % 2):
            raise CorruptBitstream("a block starts between two words")
        return np.ascontiguousarray(stream.offsets[1:])

    def _chunk(self, level: LevelPlan, num_tokens: int) -> KltChunk:
        return KltChunk.of(
            level.placed(num_tokens),
            level.components,
            num_tokens=num_tokens,
            block_tokens=BLOCK_TOKENS,
            num_threads=self.num_threads,
        )


def split_frequencies(tables: TableSet) -> npt.NDArray[np.void]:
    """Return how each table splits among the three values that refine a coarser symbol.

    Returns:
        SPLIT_DTYPE [table, 2 * SPLIT_LIMIT + 1]: of coarser symbols -SPLIT_LIMIT or less to SPLIT_LIMIT or more.
        Of 4096 slots, 3 * coarser - 1 has those below `first`, 3 * coarser those below `second`, and
        3 * coarser + 1 the others; each at least one. docs/bitstream-v3.md, section 2.

    Source: a distribution given that the symbol lies in a set is the distribution's share of that set.
    """
    out = np.zeros((tables.num_tables, 2 * SPLIT_LIMIT + 1), SPLIT_DTYPE)
    for table in range(tables.num_tables):
        start, stop = int(tables.starts[table]), int(tables.starts[table + 1]) - 1
        low = int(tables.lows[table])
        frequency = {low + i: int(f) for i, f in enumerate(tables.frequencies[start:stop])}
        for sign in (1, -1):
            split = (1 + (PROB_SCALE - 3) // 3, 2 + 2 * ((PROB_SCALE - 3) // 3))
            for magnitude in range(SPLIT_LIMIT + 1):
                middle = 3 * sign * magnitude
                parts = [frequency.get(middle + rest, 0) for rest in (-1, 0, 1)]
                total = sum(parts)
                if total:  # else as the symbol nearer to zero, or evenly
                    first = 1 + parts[0] * (PROB_SCALE - 3) // total
                    split = (first, first + 1 + parts[1] * (PROB_SCALE - 3) // total)
                out[table, SPLIT_LIMIT + sign * magnitude] = split
    return out


def _gathered(output: U8, space: int, sizes: U32) -> tuple[U8, U32]:
    ends = np.arange(1, len(sizes) + 1, dtype=np.int64) * space
    return gather_blocks(output, ends, sizes)
