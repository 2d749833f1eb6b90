"""Level set `cachegen`, the published codec: groups of 10 tokens, 8-bit anchors, deltas to the anchor.

Static statistics per (layer, K or V, channel) come from the profile. The profile keeps one table number
per channel instead of one table: channels whose distributions are alike share a table
(docs/adr/0003-range-coder-and-tables.md has what that costs).

Source: CacheGen, arXiv:2310.07240, sections 5.1.1 (deltas to the anchor of a group of ten tokens), 5.1.2
(coarser bins for deeper layers) and 5.1.3 (a distribution per layer and channel).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from codec import native
from codec.bitstream import Bitstream
from codec.entropy import gather_blocks, max_block_bytes, num_lanes
from codec.errors import CodecError, CorruptBitstream
from codec.geometry import BLOCK_TOKENS, BlockGrid, FloatArray, Geometry
from codec.levels import LevelSet
from codec.profile import Profile
from codec.tables import TableSet
from codec.transform import EncodedBlocks, LayerZero

__all__ = ["GROUP_TOKENS", "CachegenStatistics", "CachegenTransform", "LevelStatistics"]

GROUP_TOKENS = 10
"""Tokens per group, the anchor included."""

NUM_LAYER_GROUPS = 3

WORKSPACE_BYTES = 1 << 28
"""Most space for encoded blocks at a time: every block gets its worst case, of which it touches a fraction."""

_SMALLEST_STEP, _LARGEST_STEP = 2.0**-40, 2.0**40  # keeps 1 / step and symbol * step normal floats

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, eq=False, slots=True)
class LevelStatistics:
    """What the kernels need for one level; all arrays have shape [layer, kv, channel]."""

    anchor_step: F32
    delta_step: F32
    anchor_shift: npt.NDArray[np.int16]
    anchor_table: U16
    delta_table: U16

    def layers(self, start: int, stop: int) -> LevelStatistics:
        """Return the statistics of some consecutive layers, as views."""
        return LevelStatistics(
            self.anchor_step[start:stop],
            self.delta_step[start:stop],
            self.anchor_shift[start:stop],
            self.anchor_table[start:stop],
            self.delta_table[start:stop],
        )

    def native(self) -> native.CachegenLevel:
        """Return the kernels' view."""
        made = native.CachegenLevel(
            *(
                native.pointer(array)
                for array in (
                    self.anchor_step,
                    self.delta_step,
                    self.anchor_shift,
                    self.anchor_table,
                    self.delta_table,
                )
            )
        )
        made.owner = self
        return made


@dataclass(frozen=True, eq=False, slots=True)
class CachegenStatistics:
    """A profile's arrays, checked."""

    tables: TableSet
    levels: tuple[LevelStatistics, ...]

    @classmethod
    def from_profile(cls, profile: Profile) -> CachegenStatistics:
        """Check a profile's arrays.

        Raises:
            CorruptBitstream: an array is missing, of another shape, or out of range.
        """
        geometry = profile.geometry
        shape = (geometry.num_layers, 2, geometry.num_channels)
        num_levels = len(profile.level_indices())
        if sorted(profile.level_indices()) != list(range(num_levels)) or num_levels == 0:
            raise CorruptBitstream("the profile's levels are not numbered from 0")
        tables = TableSet(
            profile.array("table_low", np.int32, (None,)),
            profile.array("table_start", np.int64, (None,)),
            profile.array("table_frequency", np.uint16, (None,)),
        )
        anchor_step = profile.array("anchor_step", np.float32, shape)
        delta_scale = profile.array("delta_scale", np.float32, shape)
        anchor_shift = profile.array("anchor_shift", np.int16, shape)
        anchor_table = profile.array("anchor_table", np.uint16, shape)
        delta_table = profile.array("delta_table", np.uint16, (num_levels, *shape))
        bins = profile.array("bins", np.float32, (num_levels, NUM_LAYER_GROUPS))
        layer_group = profile.array("layer_group", np.uint8, (geometry.num_layers,))
        if layer_group.max() >= NUM_LAYER_GROUPS:
            raise CorruptBitstream("a layer belongs to no layer group")
        if max(anchor_table.max(), delta_table.max()) >= tables.num_tables:
            raise CorruptBitstream("a channel uses a table that is not there")
        if np.abs(anchor_shift.astype(np.int32)).max() > 1 << 14:
            raise CorruptBitstream("an anchor's shift is out of range")
        levels = []
        for index in range(num_levels):
            with np.errstate(all="ignore"):  # what overflows is refused below
                delta_step = delta_scale * bins[index][layer_group][:, None, None]
            for step in (anchor_step, delta_step):
                if not bool(np.all((step >= _SMALLEST_STEP) & (step <= _LARGEST_STEP))):
                    raise CorruptBitstream("a step is not a positive number of sane size")
            arrays = (anchor_step, delta_step, anchor_shift, anchor_table, delta_table[index])
            levels.append(LevelStatistics(*(np.ascontiguousarray(array) for array in arrays)))
        return cls(tables, tuple(levels))


class CachegenTransform:
    """`cachegen` for one geometry and profile."""

    level_set = LevelSet.CACHEGEN

    def __init__(self, profile: Profile, *, num_threads: int) -> None:
        """Check the profile.

        Raises:
            CorruptBitstream: its arrays make no statistics.
        """
        self.geometry = profile.geometry
        self.num_threads = num_threads
        self.statistics = CachegenStatistics.from_profile(profile)

    @staticmethod
    def max_block_bytes(geometry: Geometry, num_tokens: int) -> int:
        """Return a bound on a block of that many tokens."""
        return max_block_bytes(num_tokens * geometry.head_dim, num_lanes(num_tokens))

    @classmethod
    def max_payload_bytes(cls, geometry: Geometry, num_tokens: int) -> int:
        """Return a bound on the payload of any chunk of that many tokens."""
        grid = BlockGrid(geometry, num_tokens, BLOCK_TOKENS)
        spans = [cls.max_block_bytes(geometry, int(n)) for n in grid.span_tokens()]
        return sum(spans) * (grid.num_blocks // grid.num_spans)

    def encode(
        self, kv: FloatArray, *, level_index: int, token_start: int, layer0: LayerZero
    ) -> EncodedBlocks:
        """Encode a checked chunk, kv [layer, 2, token, head, dim]."""
        grid = BlockGrid(self.geometry, kv.shape[2], BLOCK_TOKENS)
        space = self.max_block_bytes(self.geometry, int(grid.span_tokens().max()))
        per_layer = grid.num_blocks // self.geometry.num_layers
        step = max(1, WORKSPACE_BYTES // (per_layer * space))
        parts = [
            self._encode_layers(kv[first : first + step], first, level_index, space)
            for first in range(0, self.geometry.num_layers, step)
        ]
        sizes = np.concatenate([np.diff(offsets) for _, offsets in parts]).astype(np.int64)
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        if ends[-1] >= 2**32:
            raise CodecError(f"the chunk needs {ends[-1]} bytes; use shorter chunks (limit 4 GiB)")
        payload = np.concatenate([payload for payload, _ in parts])
        return EncodedBlocks(BLOCK_TOKENS, ends.astype(np.uint32), payload)

    def _encode_layers(
        self, kv: FloatArray, first: int, level_index: int, space: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Encode some consecutive layers; returns payload and offsets of their blocks."""
        geometry = replace(self.geometry, num_layers=len(kv))
        grid = BlockGrid(geometry, kv.shape[2], BLOCK_TOKENS)
        output = np.empty(grid.num_blocks * space, np.uint8)  # mostly untouched pages
        sizes = np.zeros(grid.num_blocks, np.uint32)
        native.call(
            "kv_cachegen_encode",
            native.Shape.of(geometry, kv, block_tokens=BLOCK_TOKENS, threads=self.num_threads),
            self.statistics.levels[level_index].layers(first, first + len(kv)).native(),
            native.Tables.of(self.statistics.tables, decode=False),
            kv,
            output,
            space,
            sizes,
        )
        ends = np.arange(1, grid.num_blocks + 1, dtype=np.int64) * space
        return gather_blocks(output, ends, sizes)

    def decode(self, stream: Bitstream, *, out: FloatArray, layer0: LayerZero) -> None:
        """Decode into `out`, [layer, 2, token, head, dim]."""
        if stream.block_tokens % GROUP_TOKENS:
            raise CorruptBitstream(f"a block of {stream.block_tokens} tokens cuts a group")
        status = np.zeros(stream.grid.num_blocks, np.int32)
        native.call(
            "kv_cachegen_decode",
            native.Shape.of(
                self.geometry, out, block_tokens=stream.block_tokens, threads=self.num_threads
            ),
            self.statistics.levels[stream.level_index].native(),
            native.Tables.of(self.statistics.tables, decode=True),
            stream.payload,
            stream.offsets,
            out,
            status,
        )
        native.check_status(status)
