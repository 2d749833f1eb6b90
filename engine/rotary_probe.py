"""Reading a model's rotary tables, and proving on the running model that they are right for every layer.

Families turn keys in their own ways: halves or pairs, part of a head, another table per layer kind, no turn
at all in some layers. Configs do not say all of it, so the tables are checked against keys that the model
made: at layer 0 against the keys before RoPE, and at every layer by moving all tokens along.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import UnsupportedModel
from engine.geometry import KvGeometry, layer_kinds
from engine.rope import RotaryTables, rotate, unrotate

F32Array = NDArray[np.float32]

PROBE_TOKENS = 16
PROBE_SHIFT = 48
"""Tokens by which the second pass of the probe is moved along."""

# Relative errors (Frobenius norm). bfloat16 rounds keys at 2^-9 and some dozens of layers add up; a wrong
# table misses by the size of the keys.
_LAYER0_TOLERANCE = 0.02
_SHIFT_TOLERANCE = 0.1


def read_tables(
    decoder: Any,
    config: Any,
    geometry: KvGeometry,
    num_positions: int,
    *,
    device: torch.device,
    name: str,
) -> RotaryTables:
    """Take the tables from a decoder's own `rotary_emb`.

    Raises:
        UnsupportedModel: it has none, or of another width than its config says.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or not geometry.rotary_dim:
        raise UnsupportedModel(name, "it has no rotary position embedding")
    kinds = layer_kinds(config, geometry.num_layers)
    has_kinds = "layer_type" in inspect.signature(rotary.forward).parameters
    table_kinds = tuple(sorted(set(kinds))) if has_kinds else ("all",)
    positions = torch.arange(num_positions, device=device)[None]
    like = torch.zeros(1, dtype=torch.float32, device=device)
    pairs = []
    with torch.inference_mode():
        for kind in table_kinds:
            cos, sin = rotary(like, positions, kind) if has_kinds else rotary(like, positions)
            pairs.append((_half(cos, geometry, name), _half(sin, geometry, name)))
    cosines = np.stack([cos for cos, _ in pairs])
    return RotaryTables(
        cos=cosines,
        sin=np.stack([sin for _, sin in pairs]),
        table_of_layer=np.array(
            [table_kinds.index(kind) if has_kinds else 0 for kind in kinds], dtype=np.int32
        ),
        interleaved=geometry.rotary_interleaved,
        scaling=cosines[:, 0, 0].copy(),  # at position 0 every cosine is the scaling itself
    )


def prove_rotation(
    tables: RotaryTables, layer0: F32Array, keys: F32Array, shifted: F32Array, *, name: str
) -> tuple[bool, ...]:
    """Check tables against the model's keys and find the layers that are not turned.

    Args:
        tables: cover `PROBE_TOKENS + PROBE_SHIFT` positions.
        layer0: keys of layer 0 at position 0, before any turn but scaled, [token, head, dim].
        keys: cached keys of tokens at positions 0 and up, [layer, token, head, dim].
        shifted: the same tokens' keys at positions `PROBE_SHIFT` and up.
        name: the model's name.

    Returns:
        Per layer: True when its keys carry no RoPE.

    Raises:
        UnsupportedModel: keys are turned in a way that the tables do not describe.
    """
    unturned = []
    for layer in range(keys.shape[0]):
        span = slice(layer, layer + 1)
        plain = unrotate(keys[span], tables, token_start=0, layer_start=layer)
        again = unrotate(shifted[span], tables, token_start=PROBE_SHIFT, layer_start=layer)
        turned_error = _relative_error(again, plain)
        same_error = _relative_error(shifted[span], keys[span])
        is_unturned = same_error < turned_error
        if min(same_error, turned_error) > _SHIFT_TOLERANCE:
            raise UnsupportedModel(
                name,
                f"layer {layer} turns its keys in a way that its rotary tables do not describe",
            )
        unturned.append(is_unturned)
        if layer == 0:
            width, scale = tables.rotary_dim, tables.scaling[tables.table_of_layer[0]]
            before = layer0.copy()
            before[..., :width] /= scale
            turned = rotate(before[None], tables, token_start=0)[0]
            expected = layer0 if is_unturned else turned
            if _relative_error(keys[0], expected) > _LAYER0_TOLERANCE:
                raise UnsupportedModel(name, "its keys are not rotated the way its config says")
    return tuple(unturned)


def with_identity(tables: RotaryTables, unturned: tuple[bool, ...]) -> RotaryTables:
    """Give the layers without RoPE a table that turns nothing."""
    if not any(unturned):
        return tables
    ones = np.ones_like(tables.cos[:1])
    return replace(
        tables,
        cos=np.concatenate([tables.cos, ones]),
        sin=np.concatenate([tables.sin, np.zeros_like(ones)]),
        scaling=np.append(tables.scaling, np.float32(1.0)),
        table_of_layer=np.where(unturned, tables.cos.shape[0], tables.table_of_layer).astype(
            np.int32
        ),
    )


def _relative_error(actual: F32Array, expected: F32Array) -> float:
    return float(np.linalg.norm(actual - expected) / (np.linalg.norm(expected) + 1e-30))


def _half(table: torch.Tensor, geometry: KvGeometry, name: str) -> F32Array:
    full = table[0].detach().to(device="cpu", dtype=torch.float32).numpy()
    width = full.shape[1]
    if width == geometry.rotary_dim // 2:
        return np.ascontiguousarray(full)
    if width != geometry.rotary_dim:
        raise UnsupportedModel(
            name, f"its RoPE turns {width} elements, its config says {geometry.rotary_dim}"
        )
    is_doubled_in_place = width > 2 and np.array_equal(full[:, 0::2], full[:, 1::2])
    return np.ascontiguousarray(full[:, 0::2] if is_doubled_in_place else full[:, : width // 2])
