"""The GPU path of level set `cachegen`: the same kernels, compiled by NVRTC through CuPy, in GPU memory.

The only module that touches CuPy, and only when it is used. Bytes and values equal the CPU's, by test.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from codec.bitstream import Bitstream
from codec.cachegen import GROUP_TOKENS, CachegenTransform
from codec.entropy import gather_blocks
from codec.errors import CodecError, CorruptBitstream
from codec.geometry import BLOCK_TOKENS, BlockGrid
from codec.kernels.build import KERNELS
from codec.native import check_status
from codec.transform import EncodedBlocks

__all__ = ["NVRTC_OPTIONS", "CudaCachegen", "cuda_source"]

NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", f"-I{KERNELS}")
"""--fmad=false: CPU and GPU must round alike."""

WARPS_PER_GROUP = 4
THREADS = 128


def cuda_source() -> str:
    """Return the text of entry_cuda.cu."""
    return (KERNELS / "entry_cuda.cu").read_text(encoding="utf-8")


class CudaCachegen:
    """`cachegen` on the current CUDA device. Arrays are CuPy's, shape [layer, kv, token, head, dim]."""

    def __init__(self, transform: CachegenTransform) -> None:
        """Compile the kernels (CuPy caches them on disk) and upload the tables.

        Raises:
            CodecError: there is no CuPy.
        """
        self._cupy = _cupy()
        self._module = self._cupy.RawModule(code=cuda_source(), options=NVRTC_OPTIONS)
        self._geometry = transform.geometry
        tables = transform.statistics.tables
        upload = self._cupy.asarray
        self._tables = upload(tables.tables.view(np.uint8))
        self._encode_symbols = upload(tables.encode_symbols.view(np.uint8))
        self._entries = upload(tables.decode_entries)
        self._levels = [
            {
                name: upload(getattr(level, name))
                for name in (
                    "anchor_step",
                    "delta_step",
                    "anchor_shift",
                    "anchor_table",
                    "delta_table",
                )
            }
            for level in transform.statistics.levels
        ]

    def decode(self, stream: Bitstream, *, out: Any) -> None:
        """Decode a parsed bitstream of level set `cachegen` into a CuPy array, on the current stream.

        Args:
            stream: of this model and profile; the caller checks both digests, as `Codec.decode` does.
            out: float16 or float32, contiguous; every element is written.

        Raises:
            CorruptBitstream: a block is cut, too long, or does not end in its initial state.
        """
        if stream.block_tokens % GROUP_TOKENS:
            raise CorruptBitstream(f"a block of {stream.block_tokens} tokens cuts a group")
        cupy, grid = self._cupy, stream.grid
        level = self._levels[stream.level_index]
        symbols = self._symbols(grid)
        status = cupy.zeros(grid.num_blocks, cupy.int32)
        shape = self._shape(out, stream.block_tokens)
        self._launch_warps(
            "kv_cachegen_decode_symbols",
            grid.num_blocks,
            (
                shape,
                np.int64(grid.num_blocks),
                cupy.asarray(stream.payload),
                cupy.asarray(stream.offsets),
                self._tables,
                self._entries,
                level["anchor_table"],
                level["anchor_shift"],
                level["delta_table"],
                symbols,
                status,
            ),
        )
        check_status(cupy.asnumpy(status))
        self._launch_groups(
            "kv_cachegen_dequantize",
            grid,
            (shape, symbols, level["anchor_step"], level["delta_step"], out),
        )

    def encode(self, kv: Any, *, level_index: int) -> EncodedBlocks:
        """Encode a CuPy array of finite values; the blocks come back in host memory."""
        cupy = self._cupy
        grid = BlockGrid(self._geometry, kv.shape[2], BLOCK_TOKENS)
        level = self._levels[level_index]
        symbols = self._symbols(grid)
        shape = self._shape(kv, BLOCK_TOKENS)
        self._launch_groups(
            "kv_cachegen_quantize",
            grid,
            (shape, kv, level["anchor_step"], level["delta_step"], symbols),
        )
        space = CachegenTransform.max_block_bytes(self._geometry, int(grid.span_tokens().max()))
        output = cupy.empty(grid.num_blocks * space, cupy.uint8)
        sizes = cupy.zeros(grid.num_blocks, cupy.uint32)
        self._launch_warps(
            "kv_cachegen_encode_symbols",
            grid.num_blocks,
            (
                shape,
                np.int64(grid.num_blocks),
                symbols,
                self._tables,
                self._encode_symbols,
                level["anchor_table"],
                level["anchor_shift"],
                level["delta_table"],
                output,
                np.int64(space),
                sizes,
            ),
        )
        ends = np.arange(1, grid.num_blocks + 1, dtype=np.int64) * space
        payload, offsets = gather_blocks(cupy.asnumpy(output), ends, cupy.asnumpy(sizes))
        return EncodedBlocks(BLOCK_TOKENS, offsets, payload)

    def _symbols(self, grid: BlockGrid) -> Any:
        count = grid.num_blocks * self._geometry.head_dim * grid.block_tokens
        return self._cupy.empty(count, self._cupy.int16)

    def _shape(self, kv: Any, block_tokens: int) -> Any:
        geometry = self._geometry
        fields = (
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            kv.shape[2],
            block_tokens,
            int(kv.dtype == np.float16),
        )
        packed = np.zeros(1, np.dtype([(f"f{i}", "<i4") for i in range(len(fields))]))
        packed[0] = fields
        return packed[0]  # a structured scalar is passed to the kernel by value

    def _launch_warps(self, name: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        groups = -(-num_blocks // WARPS_PER_GROUP)
        self._module.get_function(name)((groups,), (32 * WARPS_PER_GROUP,), arguments)

    def _launch_groups(self, name: str, grid: BlockGrid, arguments: tuple[Any, ...]) -> None:
        most = int(grid.span_tokens().max())
        items = -(-most // GROUP_TOKENS) * self._geometry.head_dim
        self._module.get_function(name)(
            (grid.num_blocks, -(-items // THREADS)), (THREADS,), arguments
        )


@functools.cache
def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise CodecError("the GPU path needs CuPy; install kvtide[cuda]") from error
