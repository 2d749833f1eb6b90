"""The seam that every way of coding a KV cache has in the benchmarks: a context in, bytes and a cache out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Coded", "Prepared", "Scheme", "shifted_keys", "turned_keys"]

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Coded:
    """What a scheme made of a context."""

    num_bytes: int
    """What another machine needs for `kv`: everything counted, token ids aside."""

    kv: F32
    """float32 [layer, 2, token, head, dim]; fewer tokens than the context where the scheme drops some."""

    encode_s: float | None = None
    decode_s: float | None = None
    """CPU seconds; None where only the bytes are those of a product, not the speed."""


@dataclass(eq=False, slots=True)
class Prepared:
    """A context with its exact cache, from position 0."""

    model: Any
    """`engine.TorchEngine`."""

    token_ids: Sequence[int]
    kv: F32
    """float32 [layer, 2, token, head, dim]."""

    layer0: F32
    """float32 [2, token, head, dim], keys before rotation and values."""

    memo: dict[str, Any] = field(default_factory=dict)
    """What schemes share for this context: a transform, attention sums, surprisals."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the context."""
        return int(self.kv.shape[2])

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` made at the first call under that name."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    def plain(self) -> F32:
        """Return the cache with keys before rotation."""

        def make() -> F32:
            tables = self.model.rotary_tables(self.num_tokens)
            out = self.kv.copy()
            where = np.arange(self.num_tokens)
            out[:, 0] = turned_keys(out[:, 0], tables, where, inverse=True)
            return out

        made: F32 = self.once("plain", make)
        return made


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to code a cache."""

    name: str
    run: Callable[[Prepared], Coded]


def turned_keys(keys: F32, tables: Any, positions: I64, *, inverse: bool) -> F32:
    """Turn keys to explicit positions, or back from them.

    Args:
        keys: float32 [layer, token, head, dim].
        tables: `engine.rope.RotaryTables` that cover the positions.
        positions: int64 [token], or [layer, token, head] where each head keeps tokens of its own.
        inverse: back to before the rotation.

    Returns:
        A new array of the same shape.
    """
    num_layers = keys.shape[0]
    where = positions[None, :, None] if positions.ndim == 1 else positions
    layers = np.asarray(tables.table_of_layer)[:num_layers][:, None, None]
    cos, sin = tables.cos[layers, where], tables.sin[layers, where]
    if inverse:
        square = np.square(tables.scaling[layers])[..., None]
        cos, sin = cos / square, -sin / square
    width = tables.rotary_dim
    first = slice(0, width, 2) if tables.interleaved else slice(0, width // 2)
    second = slice(1, width, 2) if tables.interleaved else slice(width // 2, width)
    out = np.array(keys, np.float32)
    out[..., first] = keys[..., first] * cos - keys[..., second] * sin
    out[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return out


def shifted_keys(keys: F32, tables: Any, by: int) -> F32:
    """Move rotated keys `by` positions towards the start, all alike.

    Rotation is relative: a model that goes on at position n - by after n positions then sees every distance as
    it was. Scaled rotations keep their scale.
    """
    where = np.full(keys.shape[1], by, np.int64)
    back = turned_keys(keys, tables, where, inverse=True)
    scale = tables.scaling[np.asarray(tables.table_of_layer)[: len(keys)]][:, None, None, None]
    back[..., : tables.rotary_dim] *= scale
    return back
