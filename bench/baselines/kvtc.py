"""KVTC-like: one PCA over all layers of keys before rotation and one of values, bits by component, DEFLATE.

Our implementation of the scheme's outline (PCA calibrated off line, a budget of bits shared out over components
by their variance, DEFLATE of the packed symbols, the first tokens kept exact). The bits are shared out one at a
time to where the squared error falls most: that is optimal, because each further bit of a component buys less
than the one before, and the same as dynamic programming finds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.baselines.scheme import Coded, Prepared, Scheme, turned_keys

__all__ = ["KvtcBasis", "allocate_bits", "cached_basis", "calibrate", "kvtc", "pack_symbols"]

EXACT_TOKENS = 4
"""Attention sinks, sent in fp16."""

MOST_BITS = 8

# Uniform quantizers of 2^bits levels for a normal distribution of deviation 1: step and mean squared error.
# Source: J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6 (1960), table II.
_STEP = np.asarray([0.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308])
_ERROR = np.asarray([1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000877])

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class KvtcBasis:
    """Keys' PCA, then values'."""

    mean: F32
    """float32 [2, row]; a row is a token's numbers of all layers, [layer, head, dim]."""

    vectors: F32
    """float32 [2, row, component], largest variance first."""

    variance: F64
    """float64 [2, component]."""


def calibrate(contexts: Iterable[F32]) -> KvtcBasis:
    """Return the PCA of contexts.

    Args:
        contexts: each float32 [layer, 2, token, head, dim], keys before rotation.
    """
    count = 0
    total: list[F64] = []
    second: list[F64] = []
    for kv in contexts:
        rows = [_rows(kv[:, :, EXACT_TOKENS:], side) for side in range(2)]
        if not total:
            total = [np.zeros(row.shape[1]) for row in rows]
            second = [np.zeros((row.shape[1], row.shape[1])) for row in rows]
        for side, row in enumerate(rows):
            total[side] += row.sum(axis=0, dtype=np.float64)
            second[side] += row.T @ row
        count += len(rows[0])
    means, vectors, variances = [], [], []
    for side in range(2):
        mean = total[side] / count
        covariance = second[side] / count - np.outer(mean, mean)
        values, directions = np.linalg.eigh(covariance.astype(np.float32))
        means.append(mean.astype(np.float32))
        vectors.append(np.ascontiguousarray(directions[:, ::-1]))
        variances.append(np.maximum(values[::-1].astype(np.float64), 1e-9))
    return KvtcBasis(np.stack(means), np.stack(vectors), np.stack(variances))


def cached_basis(
    model: Any,
    plans: Sequence[Sequence[int]],
    path: Path,
    *,
    track: Callable[[Sequence[Sequence[int]]], Iterable[Sequence[int]]] = iter,
) -> KvtcBasis:
    """Return the basis in a file, or calibrate it and write the file.

    Args:
        model: `engine.TorchEngine`.
        plans: token ids of the calibration contexts.
        path: where it is kept; its name must say what it depends on.
        track: wraps the contexts to show progress.
    """
    if path.exists():
        with np.load(path, allow_pickle=False) as arrays:
            return KvtcBasis(arrays["mean"], arrays["vectors"], arrays["variance"])
    basis = calibrate(_plain(model, ids) for ids in track(plans))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, mean=basis.mean, vectors=basis.vectors, variance=basis.variance)
    partial.replace(path)
    return basis


def _plain(model: Any, token_ids: Sequence[int]) -> F32:
    cache = model.new_cache(len(token_ids))
    model.fill(cache, token_ids, 0)
    kv = np.asarray(cache.read(0, len(token_ids)), np.float32)
    where = np.arange(len(token_ids))
    tables = model.rotary_tables(len(token_ids))
    kv[:, 0] = turned_keys(kv[:, 0], tables, where, inverse=True)
    return kv


def allocate_bits(variance: F64, bits_per_element: float) -> I64:
    """Share out bits over components so that the summed squared error is least.

    Args:
        variance: float64 [...]; normal distributions are assumed.
        bits_per_element: mean number of bits.

    Returns:
        int64 of the same shape, 0 to MOST_BITS.
    """
    gains = variance[..., None] * (_ERROR[:-1] - _ERROR[1:])  # [..., bit], falling
    budget = min(round(bits_per_element * variance.size), gains.size)
    if budget <= 0:
        return np.zeros(variance.shape, np.int64)
    chosen = np.argpartition(-gains.ravel(), budget - 1)[:budget]
    return np.bincount(chosen // MOST_BITS, minlength=variance.size).reshape(variance.shape)


def pack_symbols(symbols: npt.NDArray[np.uint8], bits: I64) -> bytes:
    """Return symbols [component, token] in `bits` [component] bits each, component by component, deflated."""
    planes = np.unpackbits(symbols[..., None], axis=-1)  # [component, token, 8], highest bit first
    parts = [
        np.packbits(planes[component, :, 8 - int(count) :]).tobytes()
        for component, count in enumerate(bits)
        if count
    ]
    return zlib.compress(b"".join(parts), 9)


def kvtc(basis: KvtcBasis, bits_per_element: float) -> Scheme:
    """Return the scheme with a budget of bits before DEFLATE."""
    bits = allocate_bits(basis.variance, bits_per_element)
    step = np.asarray(_STEP[bits] * np.sqrt(basis.variance), np.float32)

    def run(context: Prepared) -> Coded:
        plain = context.plain()
        coefficients = context.once("kvtc", lambda: _analysis(plain, basis))
        out = plain.copy()
        num_bytes = 2 * plain[:, :, :EXACT_TOKENS].size
        for side in range(2):
            used = np.flatnonzero(bits[side])
            half = (1 << (bits[side, used] - 1))[:, None]
            scaled = coefficients[side][used] / step[side, used, None]
            symbols = np.clip(np.floor(scaled), -half, half - 1)
            num_bytes += len(pack_symbols((symbols + half).astype(np.uint8), bits[side, used]))
            values = ((symbols + 0.5) * step[side, used, None]).astype(np.float32)
            rows = values.T @ basis.vectors[side][:, used].T + basis.mean[side]
            shape = (len(rows), plain.shape[0], *plain.shape[3:])
            out[:, side, EXACT_TOKENS:] = rows.reshape(shape).transpose(1, 0, 2, 3)
        tables = context.model.rotary_tables(context.num_tokens)
        where = np.arange(context.num_tokens)
        out[:, 0] = turned_keys(out[:, 0], tables, where, inverse=False)
        return Coded(num_bytes, out)

    return Scheme(f"KVTC-like: PCA, {bits_per_element:g} bits, DEFLATE", run)


def _analysis(plain: F32, basis: KvtcBasis) -> list[F32]:
    """float32 [component, token] of keys, and of values."""
    return [
        np.ascontiguousarray(
            ((_rows(plain[:, :, EXACT_TOKENS:], side) - basis.mean[side]) @ basis.vectors[side]).T
        )
        for side in range(2)
    ]


def _rows(kv: F32, side: int) -> F32:
    part = kv[:, side]  # [layer, token, head, dim]
    return np.ascontiguousarray(part.transpose(1, 0, 2, 3)).reshape(part.shape[1], -1)
