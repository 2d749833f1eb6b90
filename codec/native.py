"""The CPU library's functions, with their argument types. Nothing here decides anything."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from codec.errors import CodecError, CorruptBitstream
from codec.geometry import FloatArray, Geometry
from codec.kernels.build import load_library
from codec.tables import TableSet

__all__ = ["STATUS", "Shape", "Tables", "check_status", "find_bad", "function", "pointer"]

STATUS = {
    1: "it ends before its last symbol",
    2: "data are left after its last symbol",
    3: "a lane of it does not end where every encoder starts",
    4: "it has a scale that no encoder writes",
    5: "it has a token class that no encoder writes",
}
"""`kv_status` in portable.h."""


class Shape(ctypes.Structure):
    """`kv_shape` in entry_cpu.cpp."""

    _fields_: ClassVar[Sequence[Any]] = [
        (name, ctypes.c_int32)
        for name in (
            "num_layers",
            "num_heads",
            "head_dim",
            "num_tokens",
            "block_tokens",
            "num_threads",
            "is_half",
        )
    ]

    @classmethod
    def of(cls, geometry: Geometry, kv: FloatArray, *, block_tokens: int, threads: int) -> Shape:
        """Return the shape of a checked kv array."""
        return cls(
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            kv.shape[2],
            block_tokens,
            threads,
            int(kv.dtype == np.float16),
        )


class Tables(ctypes.Structure):
    """`kv_tables` in entry_cpu.cpp; keeps the arrays that it points to alive."""

    _fields_: ClassVar[Sequence[Any]] = [
        (name, ctypes.c_void_p) for name in ("tables", "symbols", "entries")
    ]

    @classmethod
    def of(cls, tables: TableSet, *, decode: bool) -> Tables:
        """Return the kernels' view of a table set, for one direction."""
        made = cls(
            pointer(tables.tables),
            None if decode else pointer(tables.encode_symbols),
            pointer(tables.decode_entries) if decode else None,
        )
        made.owner = tables
        return made


class CachegenLevel(ctypes.Structure):
    """`kv_cachegen_level` in entry_cpu.cpp; keeps the arrays that it points to alive."""

    _fields_: ClassVar[Sequence[Any]] = [
        (name, ctypes.c_void_p)
        for name in ("anchor_step", "delta_step", "anchor_shift", "anchor_table", "delta_table")
    ]


def pointer(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array's first byte."""
    assert array.flags.c_contiguous
    return array.ctypes.data


@functools.cache
def function(name: str, *argtypes: Any, restype: Any = ctypes.c_int) -> Callable[..., Any]:
    """Return a function of the library; `argtypes` as ctypes needs them."""
    found = getattr(load_library(), name)
    found.argtypes = list(argtypes)
    found.restype = restype
    return found  # type: ignore[no-any-return]


def call(name: str, *arguments: Any) -> None:
    """Call a kernel that returns an overall status.

    Arguments are ctypes structures (passed by reference), arrays (by address), or ints (as int64).
    """
    types: list[Any] = []
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, ctypes.Structure):
            types.append(ctypes.c_void_p)
            values.append(ctypes.addressof(argument))
        elif isinstance(argument, np.ndarray):
            types.append(ctypes.c_void_p)
            values.append(pointer(argument))
        else:
            types.append(ctypes.c_int64)
            values.append(argument)
    if function(name, *types)(*values) != 0:
        raise CodecError("the codec's kernel ran out of memory")


def check_status(status: npt.NDArray[np.int32]) -> None:
    """Turn the blocks' status codes into an exception.

    Raises:
        CorruptBitstream: naming the first bad block.
    """
    bad = np.flatnonzero(status)
    if bad.size:
        block = int(bad[0])
        reason = STATUS.get(int(status[block]), f"status {int(status[block])}")
        raise CorruptBitstream(f"block {block} is corrupt: {reason}")


def find_bad(values: FloatArray, limit: float) -> int | None:
    """Return the flat index of the first NaN or magnitude above `limit`; None where all are good."""
    find = function(
        "kv_find_bad",
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_float,
        restype=ctypes.c_int64,
    )
    index = find(pointer(values), values.size, int(values.dtype == np.float16), limit)
    return None if index < 0 else int(index)
