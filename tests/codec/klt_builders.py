"""A small klt profile and what belongs to it, all from seeds."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from codec import Codec, Geometry, Profile, Rotary
from codec.calibrate_klt import Context, KltCalibration
from tests.codec.builders import MODEL_DIGEST

__all__ = [
    "GEOMETRY",
    "MODEL_DIGEST",
    "STEPS",
    "make_codec",
    "make_plain",
    "make_profile",
    "make_rotary",
    "rotated",
]

GEOMETRY = Geometry(num_layers=4, num_kv_heads=2, head_dim=8)
STEPS = tuple(0.02 * 3 ** (k / 2) for k in range(6))
F32 = npt.NDArray[np.float32]


def make_plain(num_tokens: int, *, seed: int, geometry: Geometry = GEOMETRY) -> F32:
    """Keys before rotation and values: low rank across layers, with a few loud tokens and a loud first one."""
    model = np.random.default_rng(7)
    rank, size = 12, geometry.elements_per_token
    mixing = model.normal(size=(rank, size)) * np.exp2(-np.arange(rank) / 2)[:, None]
    mean = model.normal(size=size)
    rng = np.random.default_rng(seed)
    loud = 1 + 6 * (rng.random((num_tokens, 1)) < 0.05)
    values = (
        rng.normal(size=(num_tokens, rank)) @ mixing + 0.1 * rng.normal(size=(num_tokens, size))
    ) * loud
    values[0] *= 9
    layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    shaped = (values + mean).reshape(num_tokens, layers, 2, heads, dim)
    return np.ascontiguousarray(shaped.transpose(1, 2, 0, 3, 4), np.float32)


def make_rotary(
    geometry: Geometry = GEOMETRY, *, positions: int = 4096, interleaved: bool = False
) -> Rotary:
    """Two tables, the second of other frequencies; all but the last pair of dims are turned."""
    half = geometry.head_dim // 2 - 1
    place = np.arange(positions)[:, None]
    angles = np.stack([place / base ** (np.arange(half) / half) for base in (100.0, 1000.0)])
    return Rotary(
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
        table_of_layer=np.arange(geometry.num_layers) % 2,
        interleaved=interleaved,
    )


def rotated(plain: F32, rotary: Rotary, token_start: int) -> F32:
    """The cache that a model with those tables would hold; the obvious way."""
    out = plain.copy()
    half = rotary.cos.shape[2]
    for layer in range(plain.shape[0]):
        table = int(rotary.table_of_layer[layer])
        for token in range(plain.shape[2]):
            cos, sin = (
                rotary.cos[table, token_start + token],
                rotary.sin[table, token_start + token],
            )
            for pair in range(half):
                a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + half)
                x, y = plain[layer, 0, token, :, a], plain[layer, 0, token, :, b]
                out[layer, 0, token, :, a] = x * cos[pair] - y * sin[pair]
                out[layer, 0, token, :, b] = y * cos[pair] + x * sin[pair]
    return out


@functools.cache
def make_profile(geometry: Geometry = GEOMETRY) -> Profile:
    """A profile calibrated on made-up contexts."""
    calibration = KltCalibration(geometry, steps=STEPS)
    contexts = []
    for seed in range(200, 208):
        plain = make_plain(300, seed=seed, geometry=geometry)
        flat = plain.reshape(*plain.shape[:3], -1)
        pull = np.random.default_rng(seed).normal(size=flat.shape) / (1 + np.abs(flat))
        contexts.append(Context(flat, pull.astype(np.float32), 1))
    for context in contexts:
        calibration.add_moments(context)
    for context in contexts:
        calibration.add_sensitivity(context)
    counter = calibration.start_counts()
    for context in contexts:
        counter.add_magnitudes(context)
    counter.finish_magnitudes()
    for context in contexts:
        counter.add_counts(context)
    return counter.build(model_digest=MODEL_DIGEST, notes={"model": "made up"})


def make_codec(*, rotary: Rotary | None = None, num_threads: int = 1) -> Codec:
    """A codec with that profile."""
    return Codec(
        GEOMETRY,
        model_digest=MODEL_DIGEST,
        profiles=[make_profile()],
        num_threads=num_threads,
        rotary=rotary or make_rotary(),
    )
