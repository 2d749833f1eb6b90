"""The GPU path of level set `klt`: upload, entropy decode, matrix product, rotate and write, on one stream.

Needs CuPy, and imports it only when used. Symbols and bytes equal the CPU's; values differ by the rounding of
the matrix products (docs/bitstream.md states the tolerance).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from codec import reference
from codec.bitstream import Bitstream
from codec.entropy import gather_blocks
from codec.errors import CodecError, ShapeMismatch
from codec.geometry import Rotary
from codec.kernels.build import KERNELS
from codec.klt import BLOCK_TOKENS, SINK_TOKENS, KltTransform
from codec.klt_plan import Group
from codec.native import check_status

__all__ = ["NVRTC_OPTIONS", "CudaKlt", "klt_cuda_source"]

NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", f"-I{KERNELS}")
WARPS_PER_GROUP = 4
THREADS = 256

SHAPE_DTYPE = np.dtype([(n, "<i8") for n in ("num_groups", "num_tokens", "block_tokens")])
ROWS_DTYPE = np.dtype(
    [
        *(
            (name, "<i8")
            for name in ("first_layer", "num_layers", "num_heads", "head_dim", "num_tokens", "half")
        ),
        ("interleaved", "<i4"),
        ("is_half", "<i4"),
    ]
)


def klt_cuda_source() -> str:
    """Return the text of entry_klt.cu."""
    return (KERNELS / "entry_klt.cu").read_text(encoding="utf-8")


class CudaKlt:
    """`klt` on the current CUDA device. Arrays are CuPy's, shape [layer, kv, token, head, dim]."""

    def __init__(self, transform: KltTransform) -> None:
        """Compile the kernels (CuPy caches them on disk) and upload tables and bases.

        Raises:
            CodecError: there is no CuPy.
            ShapeMismatch: the transform has no rotary tables.
        """
        if transform.rotary is None:
            raise ShapeMismatch("level set klt needs the model's rotary tables")
        self._cupy = _cupy()
        self._module = self._cupy.RawModule(code=klt_cuda_source(), options=NVRTC_OPTIONS)
        self._transform = transform
        self._rotary: Rotary = transform.rotary
        upload = self._cupy.asarray
        plan = transform.plan
        self._tables = upload(plan.tables.tables.view(np.uint8))
        self._entries = upload(plan.tables.decode_entries)
        self._components = [upload(level.components.view(np.uint8)) for level in plan.levels]
        self._bases = [upload(group.basis) for group in plan.groups]
        self._predictors = [
            None if group.predictor is None else upload(group.predictor) for group in plan.groups
        ]
        self._mean, self._weight = upload(plan.mean), upload(plan.weight)
        self._inverse = upload(np.asarray(1 / plan.weight, np.float32))
        scale = self._rotary.cos[:, :1, :1]
        self._cosine = upload(np.asarray(self._rotary.cos / scale, np.float32))
        self._sine = upload(np.asarray(self._rotary.sin / scale, np.float32))
        self._table_of_layer = upload(np.asarray(self._rotary.table_of_layer, np.int32))
        self._scale0 = float(scale[int(self._rotary.table_of_layer[0]), 0, 0])

    def decode(self, stream: Bitstream, *, layer0: npt.NDArray[np.float32], out: Any) -> Any:
        """Decode a parsed bitstream into a CuPy array, all on the current stream.

        Nothing waits for the device: the caller passes what comes back to `check` once it needs to know.

        Args:
            stream: of this model and profile; the caller checks both digests, as `Codec.decode` does.
            layer0: float32 [2, token, head, dim], keys before rotation and values.
            out: float16 or float32, contiguous; every element is written.

        Returns:
            A CuPy array of status codes.

        Raises:
            CorruptBitstream: blocks of another count or size than the profile makes.
        """
        cupy, plan, num_tokens = self._cupy, self._transform.plan, stream.num_tokens
        sink, loud = self._transform.beside(stream)
        offsets = self._transform.blocks.check(stream)
        level = plan.levels[stream.level_index]
        coefficients = cupy.empty((level.num_components, num_tokens), cupy.float32)
        num_blocks = len(offsets) - 1
        status = cupy.zeros(num_blocks, cupy.int32)
        self._launch_warps(
            "kv_klt_decode_blocks",
            num_blocks,
            (
                self._shape(num_tokens),
                np.int64(num_blocks),
                cupy.asarray(level.placed(num_tokens).view(np.uint8)),
                self._components[stream.level_index],
                self._tables,
                self._entries,
                cupy.asarray(stream.payload),
                cupy.asarray(offsets),
                np.float32(level.step),
                coefficients,
                status,
            ),
        )
        keys = np.array(layer0, np.float32)
        keys[0] *= np.float32(self._scale0)
        flat = cupy.asarray(keys).reshape(2, num_tokens, -1)
        rows0 = ((flat - self._mean[0][:, None]) * self._weight[0][:, None]).transpose(1, 0, 2)
        rows0 = cupy.ascontiguousarray(rows0).reshape(num_tokens, -1)
        span = slice(stream.token_start, stream.token_stop)
        turn = (
            cupy.ascontiguousarray(self._cosine[:, span]),
            cupy.ascontiguousarray(self._sine[:, span]),
        )
        self._scatter(rows0, 0, 1, turn, out)
        for index, group in enumerate(plan.groups):
            rows = self._rows(level.groups[index], group, index, coefficients, rows0)
            if loud[index].tokens.size:
                rows[cupy.asarray(loud[index].tokens)] = cupy.asarray(
                    self._transform.rows.weighted(loud[index].values, group)
                )
            self._scatter(rows, group.first_layer, group.num_layers, turn, out)
        if sink is not None:
            out[1:, :, :SINK_TOKENS] = cupy.asarray(
                reference.to_half(sink) if out.dtype == np.float16 else sink
            )
        return status

    def check(self, status: Any) -> None:
        """Wait for a decode and raise if a block was bad.

        Raises:
            CorruptBitstream: naming the first bad block.
        """
        check_status(self._cupy.asnumpy(status))

    def encode_symbols(
        self, symbols: Any, classes: Any, *, level_index: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Entropy-encode int16 symbols [component, token] and uint8 classes [group, token].

        Returns:
            payload and offsets in host memory, as the CPU makes them, the sink's block not included.
        """
        cupy, plan, num_tokens = self._cupy, self._transform.plan, symbols.shape[1]
        level = plan.levels[level_index]
        most = int(level.groups["num_components"].max())
        num_blocks = self._transform.blocks.num_blocks(num_tokens) - 1
        space = 4 * 32 + 4 * min(BLOCK_TOKENS, num_tokens) * (most + 1)
        output = cupy.empty(num_blocks * space, cupy.uint8)
        sizes = cupy.zeros(num_blocks, cupy.uint32)
        self._launch_warps(
            "kv_klt_encode_blocks",
            num_blocks,
            (
                self._shape(num_tokens),
                np.int64(num_blocks),
                cupy.asarray(level.placed(num_tokens).view(np.uint8)),
                self._components[level_index],
                self._tables,
                cupy.asarray(plan.tables.encode_symbols.view(np.uint8)),
                symbols,
                classes,
                cupy.empty(num_blocks * most * 32, cupy.uint16),
                np.int64(most),
                output,
                np.int64(space),
                sizes,
            ),
        )
        ends = np.arange(1, num_blocks + 1, dtype=np.int64) * space
        return gather_blocks(cupy.asnumpy(output), ends, cupy.asnumpy(sizes))

    def _rows(self, row: Any, group: Group, index: int, coefficients: Any, rows0: Any) -> Any:
        first, count = int(row["first_component"]), int(row["num_components"])
        rows = self._cupy.matmul(coefficients[first : first + count].T, self._bases[index][:count])
        if self._predictors[index] is not None:
            rows += self._cupy.matmul(rows0, self._predictors[index])
        return self._cupy.ascontiguousarray(rows)

    def _scatter(
        self, rows: Any, first_layer: int, num_layers: int, turn: tuple[Any, Any], out: Any
    ) -> None:
        geometry = self._transform.geometry
        packed = np.zeros(1, ROWS_DTYPE)
        packed[0] = (
            first_layer,
            num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            out.shape[2],
            turn[0].shape[2],
            int(self._rotary.interleaved),
            int(out.dtype == np.float16),
        )
        kernel = self._module.get_function("kv_klt_scatter_rows")
        kernel(
            (-(-rows.size // THREADS),),
            (THREADS,),
            (packed[0], rows, self._mean, self._inverse, *turn, self._table_of_layer, out),
        )

    def _shape(self, num_tokens: int) -> Any:
        packed = np.zeros(1, SHAPE_DTYPE)
        packed[0] = (len(self._transform.plan.groups), num_tokens, BLOCK_TOKENS)
        return packed[0]  # a structured scalar is passed to the kernel by value

    def _launch_warps(self, name: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        groups = -(-num_blocks // WARPS_PER_GROUP)
        self._module.get_function(name)((groups,), (32 * WARPS_PER_GROUP,), arguments)


@functools.cache
def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise CodecError("the GPU path needs CuPy; install kvtide[cuda]") from error
