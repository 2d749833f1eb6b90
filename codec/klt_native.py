"""The kernels of level set `klt`, with their argument structures. Nothing here decides anything."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from codec.native import pointer

__all__ = [
    "COMPONENT_DTYPE",
    "CONTEXTS",
    "GROUP_DTYPE",
    "SPLIT_DTYPE",
    "SPLIT_LIMIT",
    "KltChunk",
    "KltRows",
]

CONTEXTS = 6
"""`KV_KLT_CONTEXTS` in klt.h."""

COMPONENT_DTYPE = np.dtype(
    [("first_table", "<u4"), ("low", "<i4"), ("escape", "<u4"), ("threshold", "<i4", CONTEXTS - 1)]
)
GROUP_DTYPE = np.dtype(
    [
        ("first_component", "<u4"),
        ("num_components", "<u4"),
        ("class_table", "<u4"),
        ("start_activity", "<i4"),
        ("coefficients", "<u8"),
        ("reserved", "<u8"),
    ]
)
SPLIT_DTYPE = np.dtype([("first", "<u2"), ("second", "<u2")])
SPLIT_LIMIT = 3
"""`KV_KLT_SPLIT_LIMIT` in klt.h."""


class KltChunk(ctypes.Structure):
    """`kv_klt_chunk` in klt_cpu.h; keeps the arrays that it points to alive."""

    _fields_: ClassVar[Sequence[Any]] = [
        ("groups", ctypes.c_void_p),
        ("components", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("num_groups", "num_tokens", "block_tokens", "num_threads")
        ),
    ]

    @classmethod
    def of(
        cls,
        groups: npt.NDArray[np.void],
        components: npt.NDArray[np.void],
        *,
        num_tokens: int,
        block_tokens: int,
        num_threads: int,
    ) -> KltChunk:
        """Return the kernels' view of a chunk at one level."""
        made = cls(
            pointer(groups),
            pointer(components),
            len(groups),
            num_tokens,
            block_tokens,
            num_threads,
        )
        made.owner = (groups, components)
        return made


class KltRows(ctypes.Structure):
    """`kv_klt_rows` in klt_cpu.h; keeps the arrays that it points to alive."""

    _fields_: ClassVar[Sequence[Any]] = [
        *(
            (name, ctypes.c_void_p)
            for name in ("mean", "weight", "inverse", "cosine", "sine", "table_of_layer")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_tables",
                "half",
                "interleaved",
                "num_heads",
                "head_dim",
                "num_tokens",
                "is_half",
                "num_threads",
            )
        ),
    ]

    @classmethod
    def of(cls, arrays: Sequence[npt.NDArray[Any]], **numbers: int) -> KltRows:
        """Return the kernels' view; `arrays` in the order of the fields, numbers by name."""
        made = cls(*(pointer(array) for array in arrays), **numbers)
        made.owner = tuple(arrays)
        return made
