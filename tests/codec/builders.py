"""Small models, arrays and profiles for the codec's tests, all from seeds."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from codec import Codec, Geometry, Profile
from codec.calibrate import CachegenCalibration
from codec.reference import OracleChannel
from codec.tables import TableSet

GEOMETRY = Geometry(num_layers=3, num_kv_heads=2, head_dim=8)
MODEL_DIGEST = bytes(range(32))
LEVELS = ("fp16", "int8", *(f"cachegen:{i}" for i in range(6)))


def make_kv(
    num_tokens: int, *, seed: int, geometry: Geometry = GEOMETRY
) -> npt.NDArray[np.float32]:
    """KV-like numbers: channels of different size and mean, neighbours in time alike."""
    rng = np.random.default_rng(seed)
    channels = np.random.default_rng(99)  # the same model for every seed
    shape = geometry.kv_shape(num_tokens)
    scale = np.exp(channels.normal(size=(shape[0], 2, 1, *shape[3:])))
    mean = channels.normal(size=scale.shape) * 2 * scale
    noise = rng.normal(size=shape)
    drift = np.cumsum(rng.normal(size=shape) * 0.2, axis=2)
    return np.asarray(mean + scale * (noise + drift), np.float32)


@functools.cache
def make_profile(geometry: Geometry = GEOMETRY) -> Profile:
    """A profile calibrated on made-up arrays."""
    calibration = CachegenCalibration(geometry)
    arrays = [make_kv(200, seed=seed, geometry=geometry) for seed in range(100, 104)]
    for kv in arrays:
        calibration.add_scales(kv)
    for kv in arrays:
        calibration.add_counts(kv)
    return calibration.build(model_digest=MODEL_DIGEST, notes={"model": "made up"})


def make_codec(*, num_threads: int = 1, geometry: Geometry = GEOMETRY) -> Codec:
    """A codec with that profile."""
    return Codec(
        geometry,
        model_digest=MODEL_DIGEST,
        profiles=[make_profile(geometry)],
        num_threads=num_threads,
    )


def table_row(tables: TableSet, number: int) -> list[int]:
    """One table's frequencies as Python integers."""
    return [int(f) for f in tables.frequencies[tables.starts[number] : tables.starts[number + 1]]]


def oracle_channels(
    profile: Profile, *, level: int, layer: int, side: int, head: int
) -> list[OracleChannel]:
    """A block's statistics for the oracle, straight from the profile's arrays."""
    geometry = profile.geometry
    arrays = profile.arrays
    tables = TableSet(arrays["table_low"], arrays["table_start"], arrays["table_frequency"])
    bins = arrays["bins"][level][arrays["layer_group"][layer]]
    channels = []
    for channel in range(head * geometry.head_dim, (head + 1) * geometry.head_dim):
        at = (layer, side, channel)
        anchor, delta = int(arrays["anchor_table"][at]), int(arrays["delta_table"][(level, *at)])
        channels.append(
            OracleChannel(
                anchor_step=arrays["anchor_step"][at],
                delta_step=np.float32(arrays["delta_scale"][at] * bins),
                anchor_low=int(tables.lows[anchor]),
                anchor_shift=int(arrays["anchor_shift"][at]),
                anchor_frequencies=table_row(tables, anchor),
                delta_low=int(tables.lows[delta]),
                delta_frequencies=table_row(tables, delta),
            )
        )
    return channels
