"""KV caches and `klt` profiles of models that are not here: drawn from seeds, with a real profile's statistics.

What a decoder does depends on the shapes, on how many components are kept and on how often symbols are zero;
spectrum, steps and tables therefore come from a measured profile, and the directions are random.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from codec import Geometry, Profile, Rotary
from codec.klt_native import CONTEXTS
from codec.klt_plan import KltPlan

__all__ = ["draw_plain", "llama_rotary", "rotated_half", "synthetic_profile"]

F32 = npt.NDArray[np.float32]


def synthetic_profile(measured: Profile, geometry: Geometry, *, layers_per_group: int) -> Profile:
    """Return a profile for another geometry.

    Args:
        measured: a bundled `klt` profile, from which spectrum, steps and tables come.
        geometry: of the model that is not here.
        layers_per_group: layers transformed together; the last group may have fewer.
    """
    rng = np.random.default_rng(1)
    given = measured.arrays
    firsts = np.arange(1, geometry.num_layers, layers_per_group, dtype=np.int32)
    sizes = np.minimum(layers_per_group, geometry.num_layers - firsts).astype(np.int32)
    num_classes = len(given["class_edges"]) + 1
    by_class = num_classes * CONTEXTS
    starts = given["table_start"]
    body = int(starts[by_class])
    class_table = given["table_frequency"][body : int(starts[by_class + 1])]
    extra = body + len(class_table) * np.arange(1, len(firsts) + 1, dtype=np.int64)
    shape = (geometry.num_layers, 2, geometry.num_channels)
    arrays = {
        "mean": np.zeros(shape, np.float32),
        "weight": np.ones(shape, np.float32),
        "group_first_layer": firsts,
        "group_num_layers": sizes,
        **{name: given[name] for name in ("steps", "loud_bits", "class_edges", "cutoff")},
        **{name: given[name] for name in ("expected", "context_ratios")},
        "table_low": np.concatenate(
            (given["table_low"][:by_class], np.zeros(len(firsts), np.int32))
        ),
        "table_start": np.concatenate((starts[: by_class + 1], extra)),
        "table_frequency": np.concatenate(
            (given["table_frequency"][:body], np.tile(class_table, len(firsts)))
        ),
    }
    bases: dict[int, npt.NDArray[np.int8]] = {}
    spectrum = given["deviation_0"]
    share = len(spectrum) / given["basis_0"].shape[1]
    for index, size in enumerate(sizes):
        num_rows = int(size) * 2 * geometry.num_channels
        kept = max(int(share * num_rows), 1)
        if num_rows not in bases:
            directions = np.linalg.qr(rng.normal(size=(num_rows, num_rows)).astype(np.float32))[0]
            scaled = directions[:kept] / np.abs(directions[:kept]).max(axis=1, keepdims=True)
            bases[num_rows] = np.rint(127 * scaled).astype(np.int8)
        basis = bases[num_rows][:, rng.permutation(num_rows)]
        places = np.linspace(0, len(spectrum) - 1, kept)
        arrays[f"basis_{index}"] = basis
        arrays[f"basis_scale_{index}"] = (
            1 / np.linalg.norm(basis.astype(np.float32), axis=1)
        ).astype(np.float32)
        arrays[f"deviation_{index}"] = np.interp(places, np.arange(len(spectrum)), spectrum).astype(
            np.float32
        )
        features = int(size) * 2 * geometry.num_kv_heads + 1
        arrays[f"sensitivity_{index}"] = np.zeros(features, np.float32)
        arrays[f"loudness_edges_{index}"] = np.asarray([-2, -1, 1, 2, 3], np.float32)
    levels = tuple(info for info in measured.levels if info.level_set is measured.level_set)
    return Profile.from_bytes(
        replace(
            measured,
            model_digest=bytes(32),
            geometry=geometry,
            levels=levels,
            arrays=arrays,
            notes={"model": "synthetic"},
        ).to_bytes()
    )


def draw_plain(profile: Profile, num_tokens: int, *, seed: int) -> npt.NDArray[np.float16]:
    """Draw keys before rotation and values: normal coefficients of the profile's spectrum, some tokens larger.

    Returns:
        float16 [layer, 2, token, head, dim].
    """
    rng = np.random.default_rng(seed)
    geometry = profile.geometry
    out = np.zeros(geometry.kv_shape(num_tokens), np.float16)
    size = np.exp(0.3 * rng.normal(size=(num_tokens, 1))).astype(np.float32)
    out[0] = rng.normal(size=out[0].shape).astype(np.float16)
    for group in KltPlan.from_profile(profile).groups:
        drawn = rng.standard_normal((num_tokens, len(group.deviation)), dtype=np.float32)
        rows = (drawn * group.deviation * size) @ group.basis
        shape = (num_tokens, group.num_layers, 2, geometry.num_kv_heads, geometry.head_dim)
        layers = slice(group.first_layer, group.first_layer + group.num_layers)
        out[layers] = rows.reshape(shape).transpose(1, 2, 0, 3, 4)
    return out


def llama_rotary(geometry: Geometry, num_positions: int) -> Rotary:
    """Return rotary tables as Llama 3 has them, its long-context scaling left out.

    Source: base 500000, halves; Llama 3 model configuration.
    """
    half = geometry.head_dim // 2
    angles = np.arange(num_positions)[:, None] / 500_000.0 ** (np.arange(half) / half)
    return Rotary(
        cos=np.cos(angles)[None].astype(np.float32),
        sin=np.sin(angles)[None].astype(np.float32),
        table_of_layer=np.zeros(geometry.num_layers, np.int64),
        interleaved=False,
    )


def rotated_half(plain: npt.NDArray[np.float16], rotary: Rotary) -> npt.NDArray[np.float16]:
    """Return the cache that a model with those tables holds, from position 0; halves only."""
    out = plain.copy()
    half = rotary.cos.shape[2]
    tokens = plain.shape[2]
    for layer, keys in enumerate(plain[:, 0]):
        table = int(rotary.table_of_layer[layer])
        cos, sin = rotary.cos[table, :tokens, None], rotary.sin[table, :tokens, None]
        a, b = keys[..., :half].astype(np.float32), keys[..., half : 2 * half].astype(np.float32)
        out[layer, 0, ..., :half] = a * cos - b * sin
        out[layer, 0, ..., half : 2 * half] = b * cos + a * sin
    return out
