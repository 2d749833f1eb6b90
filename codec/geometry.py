"""The shapes of a model's KV cache and of its blocks; nothing here knows about bytes or levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec.errors import ShapeMismatch

__all__ = [
    "BLOCK_TOKENS",
    "MAX_CHUNK_TOKENS",
    "BlockGrid",
    "FloatArray",
    "Geometry",
    "Rotary",
    "check_kv",
]

FloatArray = npt.NDArray[np.float16] | npt.NDArray[np.float32]

BLOCK_TOKENS = 2560
"""Most tokens in a block: longer chunks are cut, so that blocks stay sized for one warp. A multiple of the group of 10."""

MAX_CHUNK_TOKENS = 65_536
"""Most tokens in a chunk: bounds what a header can make the decoder allocate."""

_MAX_AXIS = 65_535


@dataclass(frozen=True, slots=True)
class Geometry:
    """Axes of a model's KV cache. A kv array has shape [layer, kv=2, token, head, dim]."""

    num_layers: int
    """Layers that keep a KV cache, 1 to 65535."""

    num_kv_heads: int
    """KV heads per layer, 1 to 65535."""

    head_dim: int
    """Numbers per head and token, 1 to 65535."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 1 <= value <= _MAX_AXIS:
                raise ShapeMismatch(f"{name} is {value}, outside 1 to {_MAX_AXIS}")

    @property
    def num_channels(self) -> int:
        """Numbers per layer, token and K or V."""
        return self.num_kv_heads * self.head_dim

    @property
    def elements_per_token(self) -> int:
        """Numbers per token over all layers, K and V."""
        return self.num_layers * 2 * self.num_channels

    def kv_shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of a kv array of `num_tokens` tokens."""
        return (self.num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary tables of a model, for level sets that code keys before rotation."""

    cos: npt.NDArray[np.float32]
    """float32, shape [table, position, half_rotary_dim]."""

    sin: npt.NDArray[np.float32]
    """float32, shape [table, position, half_rotary_dim]."""

    table_of_layer: npt.NDArray[np.int64]
    """int, shape [layer]: which table a layer uses."""

    interleaved: bool
    """True where pairs are (0, 1), (2, 3), ...; False where they are (i, i + half)."""


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """How a chunk is cut into independently decodable blocks: one per (layer, kv, head, token span).

    Block index = ((layer * 2 + kv) * num_kv_heads + head) * num_spans + span.
    """

    geometry: Geometry
    num_tokens: int
    block_tokens: int

    @property
    def num_spans(self) -> int:
        """Token spans per (layer, kv, head)."""
        return -(-self.num_tokens // self.block_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks in the chunk."""
        return self.geometry.num_layers * 2 * self.geometry.num_kv_heads * self.num_spans

    def span(self, index: int) -> slice:
        """Return the tokens of span `index`, relative to the chunk."""
        start = index * self.block_tokens
        return slice(start, min(start + self.block_tokens, self.num_tokens))

    def span_tokens(self) -> npt.NDArray[np.int64]:
        """Return int64 [num_spans]: tokens in each span."""
        stops = np.minimum(np.arange(1, self.num_spans + 1) * self.block_tokens, self.num_tokens)
        return np.asarray(np.diff(stops, prepend=0), dtype=np.int64)


def check_kv(kv: object, geometry: Geometry) -> FloatArray:
    """Return `kv` as a C-contiguous array after checking dtype and axes.

    Args:
        kv: float16 or float32, shape [layer, kv=2, token, head, dim], 1 to MAX_CHUNK_TOKENS tokens.
        geometry: what the axes must be.

    Raises:
        ShapeMismatch: not an array, another dtype, other axes, or too few or too many tokens.
    """
    if not isinstance(kv, np.ndarray):
        raise ShapeMismatch(f"kv is a {type(kv).__name__}, not a numpy array")
    if kv.dtype not in (np.float16, np.float32):
        raise ShapeMismatch(f"kv has dtype {kv.dtype}; the codec takes float16 and float32")
    num_tokens = kv.shape[2] if kv.ndim == 5 else 0
    if kv.shape != geometry.kv_shape(num_tokens):
        wanted = geometry.kv_shape(0)
        raise ShapeMismatch(
            f"kv has shape {kv.shape}; the model needs [layer={wanted[0]}, kv=2, token, "
            f"head={wanted[3]}, dim={wanted[4]}]"
        )
    if not 1 <= num_tokens <= MAX_CHUNK_TOKENS:
        raise ShapeMismatch(f"a chunk holds 1 to {MAX_CHUNK_TOKENS} tokens, not {num_tokens}")
    return np.ascontiguousarray(kv)
