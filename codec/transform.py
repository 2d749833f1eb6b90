"""The seam between the envelope and the level sets: a transform turns a chunk into blocks and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from codec.bitstream import Bitstream
from codec.geometry import FloatArray, Geometry
from codec.levels import LevelSet

__all__ = ["EncodedBlocks", "LayerZero", "Transform"]

LayerZero = npt.NDArray[np.float32] | None
"""float32 [2, token, head, dim]: K before rotation and V of layer 0, for level sets that use it."""


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """What a transform makes of a chunk."""

    block_tokens: int
    """Most tokens in a block; goes into the header."""

    offsets: npt.NDArray[np.uint32]
    """uint32 [num_blocks + 1] into the payload."""

    payload: npt.NDArray[np.uint8]
    """uint8, the blocks one after the other."""


class Transform(Protocol):
    """A level set at work for one geometry. Arrays are checked before they get here."""

    @property
    def geometry(self) -> Geometry:
        """The model's axes."""
        ...

    @property
    def level_set(self) -> LevelSet:
        """Which level set this is."""
        ...

    def encode(
        self, kv: FloatArray, *, level_index: int, token_start: int, layer0: LayerZero
    ) -> EncodedBlocks:
        """Encode kv [layer, kv, token, head, dim], contiguous and finite."""
        ...

    def decode(self, stream: Bitstream, *, out: FloatArray, layer0: LayerZero) -> None:
        """Decode into `out` [layer, kv, token, head, dim], contiguous, every element written.

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes.
        """
        ...
