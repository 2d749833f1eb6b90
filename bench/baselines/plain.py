"""Schemes without calibration or transform: int4, LMCache's public serializer, KIVI. Our implementations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.baselines.scheme import Coded, Prepared, Scheme
from codec.entropy import RUN_DTYPE, BlockLayout, encode_blocks
from codec.tables import TableSet, quantize_frequencies

__all__ = ["int4", "kivi", "lmcache"]

LMCACHE_CHUNK_TOKENS = 256
KIVI_GROUP = 32

F32 = npt.NDArray[np.float32]


def int4() -> Scheme:
    """Four bits per number, one fp16 scale per token and head."""

    def run(context: Prepared) -> Coded:
        kv = context.kv
        scale = np.abs(kv).max(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
        scale = np.maximum(scale, 1e-6)
        symbols = np.clip(np.rint(kv / scale * 7), -7, 7)
        return Coded(kv.size // 2 + 2 * scale.size, (symbols * scale / 7).astype(np.float32))

    return Scheme("int4, absmax per token and head", run)


def lmcache() -> Scheme:
    """Bins 32 or 16 over [-absmax, absmax] of a token's channels, a table per channel and 256 tokens in band.

    Source: LMCache's cachegen serializer (public kernels): keys 32 bins in the first 10 layers, values 32 in the
    first 2, else 16; each channel's cumulative table as 16-bit numbers.
    """
    return Scheme(
        "LMCache-like: absmax per token, tables in band", lambda context: _lmcache(context.kv)
    )


def _lmcache(kv: F32) -> Coded:
    num_layers, _, num_tokens, heads, dim = kv.shape
    flat = kv.reshape(num_layers, 2, num_tokens, heads * dim)
    out = np.empty_like(flat)
    num_bytes = 0
    for layer in range(num_layers):
        for side in range(2):
            half = 15 if layer < (10, 2)[side] else 7
            for start in range(0, num_tokens, LMCACHE_CHUNK_TOKENS):
                part = flat[layer, side, start : start + LMCACHE_CHUNK_TOKENS]
                scale = np.abs(part).max(axis=1, keepdims=True).astype(np.float16)
                scale = np.maximum(scale.astype(np.float32), 1e-6)
                symbols = np.clip(np.rint(part / scale * half), -half, half).astype(np.int16)
                out[layer, side, start : start + len(part)] = symbols * scale / half
                num_bytes += 2 * len(part) + 2 * part.shape[1] * (2 * half + 3)
                num_bytes += _coded_bytes(symbols.T, half)
    return Coded(num_bytes, out.reshape(kv.shape))


def kivi(bits: int) -> Scheme:
    """Asymmetric groups of 32: keys along tokens per channel, values along channels per token.

    Source: KIVI, arXiv:2402.02750. Its window of recent tokens in full precision is left out, and so are tokens
    after the last whole group: both are coded as one smaller group.
    """

    def run(context: Prepared) -> Coded:
        kv = context.kv
        keys, key_groups = _groups(np.moveaxis(kv[:, 0], 1, -1), bits)
        values, value_groups = _groups(kv[:, 1], bits)
        out = np.stack((np.moveaxis(keys, -1, 1), values), axis=1)
        num_bytes = -(-kv.size * bits // 8) + 4 * (key_groups + value_groups)
        return Coded(num_bytes, np.ascontiguousarray(out, np.float32))

    return Scheme(f"KIVI-like: keys per channel, {bits} bits", run)


def _groups(values: F32, bits: int) -> tuple[F32, int]:
    out = np.empty_like(values)
    count = 0
    for start in range(0, values.shape[-1], KIVI_GROUP):
        part = values[..., start : start + KIVI_GROUP]
        low = part.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
        step = (part.max(axis=-1, keepdims=True) - low) / (2**bits - 1)
        step = np.maximum(step.astype(np.float16).astype(np.float32), 1e-6)
        symbols = np.clip(np.rint((part - low) / step), 0, 2**bits - 1)
        out[..., start : start + KIVI_GROUP] = symbols * step + low
        count += low.size
    return out, count


def _coded_bytes(rows: npt.NDArray[np.int16], half: int) -> int:
    """Code each row with a table of its own symbols; the tables' bytes are the caller's."""
    tables = []
    for row in rows:
        counts = np.bincount(row + half, minlength=2 * half + 1).astype(np.float64)
        tables.append(quantize_frequencies(np.append(counts, 0.0)))
    runs = np.zeros(len(rows), RUN_DTYPE)
    runs["table"] = np.arange(len(rows))
    runs["length"] = rows.shape[1]
    layout = BlockLayout(runs, np.asarray([len(rows)]))
    table_set = TableSet.from_rows(np.full(len(rows), -half), tables)
    payload, _ = encode_blocks(layout, table_set, np.ascontiguousarray(rows).ravel(), num_threads=1)
    return len(payload)
