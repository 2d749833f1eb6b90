"""Slow, obvious NumPy oracle: what the kernels must produce, byte for byte. Never optimised.

Arrays of one block have shape [token, dim]. All float arithmetic is float32, one operation at a time,
rounded to nearest even, which is what the kernels are compiled to do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from codec.geometry import FloatArray

__all__ = [
    "decode_fp16_block",
    "decode_int8_block",
    "encode_fp16_block",
    "encode_int8_block",
    "to_half",
]

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]

HALF_MAX = np.float32(65504.0)
INT8_MAX = np.float32(127.0)


def to_half(values: F32) -> F16:
    """Round float32 to float16, nearest even, saturating at the largest finite number."""
    return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16)


def encode_fp16_block(block: FloatArray) -> bytes:
    """Return the values as little-endian float16, token after token."""
    return to_half(block.astype(np.float32)).astype("<f2").tobytes()


def decode_fp16_block(data: bytes, num_tokens: int, head_dim: int) -> F32:
    """Undo `encode_fp16_block`; returns float32 [token, dim]."""
    return np.frombuffer(data, "<f2").reshape(num_tokens, head_dim).astype(np.float32)


def encode_int8_block(block: FloatArray) -> bytes:
    """Return float16 scales [token], then int8 symbols [token, dim].

    The scale is absmax / 127, rounded up where rounding to float16 would make the largest value clip.
    It is 0 for a row of zeros.
    """
    values = block.astype(np.float32)
    absmax = np.abs(values).max(axis=1)
    scale = to_half(absmax / INT8_MAX)
    too_small = scale.astype(np.float32) * INT8_MAX < absmax
    scale[too_small] = np.nextafter(scale[too_small], np.float16(np.inf))
    step = scale.astype(np.float32)[:, None]
    symbols = np.rint(np.divide(values, step, out=np.zeros_like(values), where=step > 0))
    symbols = np.clip(symbols, -INT8_MAX, INT8_MAX)
    return scale.astype("<f2").tobytes() + symbols.astype(np.int8).tobytes()


def decode_int8_block(data: bytes, num_tokens: int, head_dim: int) -> F32:
    """Undo `encode_int8_block`; returns float32 [token, dim]."""
    scale = np.frombuffer(data, "<f2", count=num_tokens).astype(np.float32)
    symbols = np.frombuffer(data, np.int8, offset=2 * num_tokens).reshape(num_tokens, head_dim)
    return symbols.astype(np.float32) * scale[:, None]
