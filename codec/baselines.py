"""The two level sets without statistics: `fp16` (rounded values) and `int8` (absmax per token and head).

Both write blocks of known size, so their offset table is checked, not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import reference
from codec.bitstream import Bitstream
from codec.errors import CorruptBitstream
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

    def block_bytes(self, num_tokens: int) -> int:
        """Return the size of a block of `num_tokens` tokens."""
        if self.level_set is LevelSet.FP16:
            return 2 * num_tokens * self.geometry.head_dim
        return num_tokens * (2 + self.geometry.head_dim)

    def max_payload_bytes(self, num_tokens: int) -> int:
        """Return the payload's size, which is also its bound."""
        return int(self._offsets(BlockGrid(self.geometry, num_tokens, BLOCK_TOKENS))[-1])

    def encode(
        self, kv: FloatArray, *, level_index: int, token_start: int, layer0: LayerZero
    ) -> EncodedBlocks:
        """Encode a checked chunk, kv [layer, 2, token, head, dim]."""
        grid = BlockGrid(self.geometry, kv.shape[2], BLOCK_TOKENS)
        encode = (
            reference.encode_fp16_block
            if self.level_set is LevelSet.FP16
            else reference.encode_int8_block
        )
        blocks = [
            encode(kv[layer, side, grid.span(span), head])
            for layer in range(self.geometry.num_layers)
            for side in range(2)
            for head in range(self.geometry.num_kv_heads)
            for span in range(grid.num_spans)
        ]
        payload = np.frombuffer(b"".join(blocks), np.uint8)
        return EncodedBlocks(BLOCK_TOKENS, self._offsets(grid).astype(np.uint32), payload)

    def decode(self, stream: Bitstream, *, out: FloatArray, layer0: LayerZero) -> None:
        """Decode into `out`, [layer, 2, token, head, dim]."""
        grid = stream.grid
        if not np.array_equal(stream.offsets, self._offsets(grid)):
            raise CorruptBitstream(f"the block sizes are not those of level {stream.level}")
        decode = (
            reference.decode_fp16_block
            if self.level_set is LevelSet.FP16
            else reference.decode_int8_block
        )
        block = 0
        for layer in range(self.geometry.num_layers):
            for side in range(2):
                for head in range(self.geometry.num_kv_heads):
                    for span in range(grid.num_spans):
                        data = stream.payload[stream.offsets[block] : stream.offsets[block + 1]]
                        tokens = grid.span(span)
                        values = decode(
                            data.tobytes(), tokens.stop - tokens.start, self.geometry.head_dim
                        )
                        if out.dtype == np.float16:
                            out[layer, side, tokens, head] = reference.to_half(values)
                        else:
                            out[layer, side, tokens, head] = values
                        block += 1

    def _offsets(self, grid: BlockGrid) -> npt.NDArray[np.int64]:
        sizes = np.asarray([self.block_bytes(int(n)) for n in grid.span_tokens()], np.int64)
        ends = np.cumsum(np.tile(sizes, grid.num_blocks // grid.num_spans))
        return np.concatenate((np.zeros(1, np.int64), ends))
