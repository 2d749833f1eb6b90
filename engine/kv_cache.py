"""A preallocated KV cache that is written in place, in any order, and read by the model without copies.

One tensor holds everything, in the canonical axis order [layer, kv, token, head, dim], so that a decoded
chunk is one straight copy per layer and K/V. Attention sees transposed slices of it: no concatenation and
no copy per decode step. Sliding-window layers keep all their tokens too: the mask does the windowing, so
that chunks may arrive in any order and every layer has the same token axis (docs/adr/0002).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.errors import CacheRangeError, ContextTooLong
from engine.geometry import KvGeometry

FloatArray = NDArray[np.float16] | NDArray[np.float32]


class KvCache:
    """KV of one sequence, batch size 1.

    Not thread-safe: one thread at a time per cache. Different caches may be used from different threads.
    """

    __slots__ = ("_geometry", "_storage")

    def __init__(
        self,
        geometry: KvGeometry,
        capacity_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the cache.

        Args:
            geometry: the model's KV geometry.
            capacity_tokens: tokens to make room for, at least 1.
            dtype: element type, the engine's compute dtype.
            device: where the cache lives.
        """
        if capacity_tokens < 1:
            raise CacheRangeError(f"a cache needs room for at least 1 token, not {capacity_tokens}")
        if capacity_tokens > geometry.context_tokens:
            raise ContextTooLong(num_tokens=capacity_tokens, limit_tokens=geometry.context_tokens)
        self._geometry = geometry
        shape = (geometry.num_layers, 2, capacity_tokens, geometry.num_kv_heads, geometry.head_dim)
        # zeros, not empty: a masked position still enters the product, and 0 * NaN is NaN.
        self._storage = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def geometry(self) -> KvGeometry:
        """Geometry of the model that the cache belongs to."""
        return self._geometry

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit."""
        return int(self._storage.shape[2])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the cache holds."""
        return int(self._storage.numel() * self._storage.element_size())

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._storage.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache lives."""
        return self._storage.device

    @property
    def storage(self) -> torch.Tensor:
        """The whole cache: [layer, kv=2, token, head, dim]. Writing to it writes the cache."""
        return self._storage

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of every layer as views, each [token, head, dim]."""
        return [(layer[0], layer[1]) for layer in self._storage]

    def write(self, token_start: int, kv: FloatArray) -> None:
        """Put a chunk in its place.

        Args:
            token_start: position of the chunk's first token.
            kv: float16 or float32, [layer, 2, token, head, dim], keys post-RoPE.

        Raises:
            CacheRangeError: wrong axes or dtype, or tokens beyond the capacity.
        """
        expected = self._axes(kv.shape[2] if kv.ndim == 5 else 0)
        if kv.shape != expected:
            raise CacheRangeError(f"KV has shape {kv.shape}, the model needs {expected}")
        if kv.dtype not in (np.float16, np.float32):
            raise CacheRangeError(f"KV has dtype {kv.dtype}, not float16 or float32")
        self._check_range(token_start, token_start + kv.shape[2])
        if (
            not kv.flags.writeable
        ):  # torch warns about read-only memory although it is only read here
            kv = kv.copy()
        self._storage[:, :, token_start : token_start + kv.shape[2]].copy_(torch.from_numpy(kv))

    def read(
        self, token_start: int, token_stop: int, *, dtype: type[np.floating[Any]] = np.float32
    ) -> FloatArray:
        """Copy a token range out.

        Args:
            token_start: first token.
            token_stop: one past the last token.
            dtype: numpy float16 or float32.

        Returns:
            [layer, 2, token, head, dim], contiguous, keys post-RoPE.

        Raises:
            CacheRangeError: the range is empty or outside the cache.
        """
        self._check_range(token_start, token_stop)
        target = torch.float16 if dtype == np.float16 else torch.float32
        part = self._storage[:, :, token_start:token_stop]
        out = torch.empty(part.shape, dtype=target)
        out.copy_(part)
        array: FloatArray = out.numpy()
        return array

    def view(self, num_tokens: int) -> TransformersView:
        """Return the cache as transformers sees it, holding the first `num_tokens` tokens."""
        if not 0 <= num_tokens <= self.capacity_tokens:
            raise CacheRangeError(
                f"{num_tokens} tokens are outside the cache of {self.capacity_tokens} tokens"
            )
        return TransformersView([_Layer(layer, num_tokens) for layer in self._storage])

    def _axes(self, num_tokens: int) -> tuple[int, ...]:
        g = self._geometry
        return (g.num_layers, 2, num_tokens, g.num_kv_heads, g.head_dim)

    def _check_range(self, token_start: int, token_stop: int) -> None:
        if not 0 <= token_start < token_stop <= self.capacity_tokens:
            raise CacheRangeError(
                f"tokens {token_start} to {token_stop} are outside the cache of {self.capacity_tokens} tokens"
            )


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call] # transformers' own __init_subclass__
    """One layer of a `TransformersView`: writes in place, returns slices."""

    is_sliding = (
        False  # for transformers: full length is kept, so masks are made for the full length
    )

    def __init__(self, storage: torch.Tensor, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers' own
        # [token, head, dim] -> [batch=1, head, token, dim], both views of the same memory.
        self._k = storage[0].transpose(0, 1).unsqueeze(0)
        self._v = storage[1].transpose(0, 1).unsqueeze(0)
        self.keys = self._k
        self.values = self._v
        self.is_initialized = True
        self.num_tokens = num_tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a preallocated layer is always initialised")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = self.num_tokens, self.num_tokens + key_states.shape[2]
        # copy_ would broadcast a single head over all of them
        if key_states.shape[1::2] != self._k.shape[1::2] or key_states.shape != value_states.shape:
            raise CacheRangeError(
                f"the model makes K {tuple(key_states.shape)} and V {tuple(value_states.shape)},"
                f" the cache holds heads and widths {tuple(self._k.shape[1::2])}"
            )
        self._k[:, :, start:stop].copy_(key_states)
        self._v[:, :, start:stop].copy_(value_states)
        self.num_tokens = stop
        return self._k[:, :, :stop], self._v[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return int(self._k.shape[2])

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()  # its name before transformers 5.20


class TransformersView(Cache):
    """A `KvCache` in the shape that transformers' models want."""

    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__(layers=[*layers])
