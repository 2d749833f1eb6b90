"""The two level sets without statistics: `fp16` (rounded values) and `int8` (absmax per token and head).

Both write blocks of known size, so their offset table is checked, not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import native
from codec.bitstream import Bitstream
from codec.errors import CodecError, CorruptBitstream
from codec.geometry import BLOCK_TOKENS, BlockGrid, FloatArray, Geometry
from codec.levels import LevelSet
from codec.transform import EncodedBlocks, LayerZero

__all__ = ["BaselineTransform"]


@dataclass(frozen=True, slots=True)
class BaselineTransform:
    """`fp16` or `int8` for one geometry."""

    geometry: Geometry
    level_set: LevelSet
    num_threads: int

    @staticmethod
    def block_bytes(geometry: Geometry, level_set: LevelSet, num_tokens: int) -> int:
        """Return the size of a block of `num_tokens` tokens."""
        if level_set is LevelSet.FP16:
            return 2 * num_tokens * geometry.head_dim
        return num_tokens * (2 + geometry.head_dim)

    @classmethod
    def payload_bytes(cls, geometry: Geometry, level_set: LevelSet, num_tokens: int) -> int:
        """Return the payload's size, which is also its bound."""
        return int(cls._offsets(BlockGrid(geometry, num_tokens, BLOCK_TOKENS), level_set)[-1])

    def encode(
        self, kv: FloatArray, *, level_index: int, token_start: int, layer0: LayerZero
    ) -> EncodedBlocks:
        """Encode a checked chunk, kv [layer, 2, token, head, dim]."""
        grid = BlockGrid(self.geometry, kv.shape[2], BLOCK_TOKENS)
        ends = self._offsets(grid, self.level_set)
        if ends[-1] >= 2**32:
            raise CodecError(f"the chunk needs {ends[-1]} bytes; use shorter chunks (limit 4 GiB)")
        offsets = ends.astype(np.uint32)
        payload = np.empty(int(ends[-1]), np.uint8)
        shape = native.Shape.of(
            self.geometry, kv, block_tokens=BLOCK_TOKENS, threads=self.num_threads
        )
        name = "kv_fp16_encode" if self.level_set is LevelSet.FP16 else "kv_int8_encode"
        native.call(name, shape, kv, offsets, payload)
        return EncodedBlocks(BLOCK_TOKENS, offsets, payload)

    def decode(self, stream: Bitstream, *, out: FloatArray, layer0: LayerZero) -> None:
        """Decode into `out`, [layer, 2, token, head, dim]."""
        grid = stream.grid
        if not np.array_equal(stream.offsets, self._offsets(grid, self.level_set)):
            raise CorruptBitstream(f"the block sizes are not those of level {stream.level}")
        shape = native.Shape.of(
            self.geometry, out, block_tokens=stream.block_tokens, threads=self.num_threads
        )
        if self.level_set is LevelSet.FP16:
            bad = native.find_bad(stream.payload.view(np.float16), np.inf)
            if bad is not None:
                raise CorruptBitstream(f"value {bad} of the payload is not finite")
            native.call("kv_fp16_decode", shape, stream.payload, stream.offsets, out)
            return
        status = np.zeros(grid.num_blocks, np.int32)
        native.call("kv_int8_decode", shape, stream.payload, stream.offsets, out, status)
        native.check_status(status)

    @classmethod
    def _offsets(cls, grid: BlockGrid, level_set: LevelSet) -> npt.NDArray[np.int64]:
        sizes = [cls.block_bytes(grid.geometry, level_set, int(n)) for n in grid.span_tokens()]
        ends = np.cumsum(np.tile(np.asarray(sizes, np.int64), grid.num_blocks // grid.num_spans))
        return np.concatenate((np.zeros(1, np.int64), ends))
