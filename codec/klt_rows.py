"""From a KV cache to the rows that level set `klt` transforms, and back: keys turned back, mean off, weighted.

A row is a token's numbers of some consecutive layers, ordered layer, K before V, channel. docs/bitstream-v2.md,
section 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import native
from codec.errors import ShapeMismatch
from codec.geometry import FloatArray, Geometry, Rotary
from codec.klt_native import KltRows
from codec.klt_plan import Group, KltPlan
from codec.transform import LayerZero

__all__ = ["Position", "RowPasses"]

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a chunk lies: the kernels' constants with the rotary tables of its tokens."""

    rows: KltRows
    layer0_rows: F32
    """float32 [token, 2 * channel], weighted."""


class RowPasses:
    """The passes over whole rows, for one geometry and profile."""

    def __init__(
        self, geometry: Geometry, plan: KltPlan, *, rotary: Rotary | None, num_threads: int
    ) -> None:
        self._geometry = geometry
        self._plan = plan
        self._rotary = rotary
        self._num_threads = num_threads
        self._inverse_weight = np.asarray(1 / plan.weight, np.float32)

    def position(self, kv: FloatArray, token_start: int, layer0: LayerZero) -> Position:
        """Return a chunk's constants; kv gives tokens and dtype, and layer 0 if need be.

        Raises:
            ShapeMismatch: there are no rotary tables, they are too short, or layer0 does not fit.
        """
        geometry = self._geometry
        num_tokens = kv.shape[2]
        if self._rotary is None:
            raise ShapeMismatch("level set klt needs the model's rotary tables")
        rotary = self._rotary
        num_tables, positions, half = rotary.cos.shape
        if token_start + num_tokens > positions:
            raise ShapeMismatch(
                f"rotary tables of {positions} positions; the chunk ends at {token_start + num_tokens}"
            )
        if 2 * half > geometry.head_dim or len(rotary.table_of_layer) != geometry.num_layers:
            raise ShapeMismatch("the rotary tables are not those of this geometry")
        span = slice(token_start, token_start + num_tokens)
        # Some models scale rotated keys; a table's first cosine is that scale. Here only the turn is undone.
        scale = rotary.cos[:, :1, :1]
        cosine = np.ascontiguousarray(rotary.cos[:, span] / scale, np.float32)
        sine = np.ascontiguousarray(rotary.sin[:, span] / scale, np.float32)
        table_of_layer = np.ascontiguousarray(rotary.table_of_layer, np.int32)
        if table_of_layer.min() < 0 or table_of_layer.max() >= num_tables:
            raise ShapeMismatch("a layer uses a rotary table that is not there")
        arrays = (
            self._plan.mean,
            self._plan.weight,
            self._inverse_weight,
            cosine,
            sine,
            table_of_layer,
        )
        numbers = {
            "num_tables": num_tables,
            "half": half,
            "interleaved": int(rotary.interleaved),
            "num_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "num_tokens": num_tokens,
            "num_threads": self._num_threads,
        }
        rows = KltRows.of(arrays, is_half=int(kv.dtype == np.float16), **numbers)
        layer0_rows = np.empty((num_tokens, 2 * geometry.num_channels), np.float32)
        if layer0 is None:
            native.call("kv_klt_gather", rows, kv, 0, 1, 1, layer0_rows)
        else:
            shape = (2, num_tokens, geometry.num_kv_heads, geometry.head_dim)
            if layer0.shape != shape or layer0.dtype != np.float32:
                raise ShapeMismatch(f"layer0 is {layer0.dtype} {layer0.shape}, not float32 {shape}")
            if not np.isfinite(layer0).all():
                raise ShapeMismatch("layer0 holds numbers that are not finite")
            scaled = np.array(layer0, np.float32)
            scaled[0] *= np.float32(scale[table_of_layer[0], 0, 0])
            plain = KltRows.of(arrays, is_half=0, **numbers)
            native.call("kv_klt_gather", plain, scaled, 0, 1, 0, layer0_rows)
        return Position(rows, layer0_rows)

    def gather(self, kv: FloatArray, group: Group, position: Position) -> F32:
        """Return a group's rows, float32 [token, row]."""
        rows = np.empty((kv.shape[2], group.num_rows), np.float32)
        native.call(
            "kv_klt_gather", position.rows, kv, group.first_layer, group.num_layers, 1, rows
        )
        return rows

    def scatter(
        self, out: FloatArray, rows: F32, first_layer: int, num_layers: int, position: Position
    ) -> None:
        """Write rows of some layers into `out` [layer, kv, token, head, dim]; changes `rows`."""
        native.call(
            "kv_klt_scatter",
            position.rows,
            np.ascontiguousarray(rows),
            first_layer,
            num_layers,
            out,
        )

    def pieces(self, group: Group) -> int:
        """Return the heads of a group's layers, K and V."""
        return 2 * group.num_layers * self._geometry.num_kv_heads

    def plain(self, rows: F32, group: Group) -> F32:
        """Return [token, piece, dim] without weight and with the mean."""
        layers = slice(group.first_layer, group.first_layer + group.num_layers)
        plain = rows * self._inverse_weight[layers].ravel() + self._plan.mean[layers].ravel()
        return np.asarray(
            plain.reshape(len(rows), self.pieces(group), self._geometry.head_dim), np.float32
        )

    def weighted(self, plain: F32, group: Group) -> F32:
        """Undo `plain`; returns float32 [token, row]."""
        layers = slice(group.first_layer, group.first_layer + group.num_layers)
        flat = plain.reshape(len(plain), group.num_rows) - self._plan.mean[layers].ravel()
        return np.asarray(flat * self._plan.weight[layers].ravel(), np.float32)
