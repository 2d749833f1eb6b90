"""Rotary tables and turning keys back and forth, in numpy float32.

Tables come from the model's own `rotary_emb`, never from a formula of ours, so scaled, partial and
per-layer-type RoPE need no code here. A key in the cache is `s * R(position) * k`, where `s` is the model's
attention scaling (1 for most); un-rotating divides by `s` squared after the inverse turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosines and sines of every distinct RoPE of one model."""

    cos: F32Array
    """[table, position, rotary_dim / 2], attention scaling included."""
    sin: F32Array
    """[table, position, rotary_dim / 2], attention scaling included."""
    table_of_layer: NDArray[np.int32]
    """[layer]: index of the layer's table."""
    interleaved: bool
    """True: element 2i is turned with 2i+1. False: element i with i + rotary_dim / 2."""
    scaling: F32Array
    """[table]: attention scaling `s` that is in `cos` and `sin`."""

    @property
    def rotary_dim(self) -> int:
        """Leading elements of each head that are turned."""
        return 2 * int(self.cos.shape[2])

    @property
    def num_positions(self) -> int:
        """Positions that the tables cover, from 0."""
        return int(self.cos.shape[1])

    def first(self, num_positions: int) -> RotaryTables:
        """Return the tables of the first positions; shares memory."""
        return replace(self, cos=self.cos[:, :num_positions], sin=self.sin[:, :num_positions])


def rotate(
    keys: F32Array, tables: RotaryTables, *, token_start: int, layer_start: int = 0
) -> F32Array:
    """Turn pre-RoPE keys into what the model caches.

    Args:
        keys: float32 [layer, token, head, dim].
        tables: the model's tables, covering the tokens.
        token_start: position of the first token.
        layer_start: model layer of the first row of `keys`.

    Returns:
        A new array of the same shape.
    """
    return _turn(keys, tables, token_start, layer_start, inverse=False)


def unrotate(
    keys: F32Array, tables: RotaryTables, *, token_start: int, layer_start: int = 0
) -> F32Array:
    """Turn cached keys back to before RoPE; the inverse of `rotate` with the same arguments."""
    return _turn(keys, tables, token_start, layer_start, inverse=True)


def _turn(
    keys: F32Array, tables: RotaryTables, token_start: int, layer_start: int, *, inverse: bool
) -> F32Array:
    num_layers, num_tokens = keys.shape[0], keys.shape[1]
    if not 0 <= token_start <= tables.num_positions - num_tokens:
        raise ValueError(
            f"tokens {token_start} to {token_start + num_tokens} are outside the rotary tables"
            f" of {tables.num_positions} positions"
        )
    chosen = tables.table_of_layer[layer_start : layer_start + num_layers]
    if chosen.shape[0] != num_layers:
        raise ValueError(
            f"layers {layer_start} to {layer_start + num_layers} are outside the model"
        )
    span = slice(token_start, token_start + num_tokens)
    # [layer, token, 1, half]
    cos = tables.cos[chosen, span][:, :, None, :]
    sin = tables.sin[chosen, span][:, :, None, :]
    if inverse:
        square = tables.scaling[chosen][:, None, None, None] ** 2
        cos, sin = cos / square, -sin / square
    out = np.array(keys, dtype=np.float32)
    width = tables.rotary_dim
    half = width // 2
    first = slice(0, width, 2) if tables.interleaved else slice(0, half)
    second = slice(1, width, 2) if tables.interleaved else slice(half, width)
    a = np.asarray(keys[..., first], dtype=np.float32)
    b = np.asarray(keys[..., second], dtype=np.float32)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out
