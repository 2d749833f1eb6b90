"""Every supported family: our cache and pieces against transformers' own full forward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine import TorchEngine, torch_engine
from engine.rope import rotate, unrotate
from tests.engine.conftest import FAMILIES

NUM_TOKENS = 200
IDS = [(37 * i + i * i) % 500 + 3 for i in range(NUM_TOKENS)]
TOLERANCE = 2e-3  # logits of these models are tens; float32 pieces differ in the last bits only


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "PREFILL_PIECE_TOKENS", 64)


def full_forward(engine: TorchEngine) -> np.ndarray:
    """Logits of one forward pass without any cache, by the model's own default attention."""
    implementation = engine.model.config._attn_implementation
    engine.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = engine.model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    finally:
        engine.model.set_attn_implementation(implementation)
    return np.asarray(logits.float().numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_pieces_equals_a_full_forward(
    family: str, family_engine: Callable[[str], TorchEngine]
) -> None:
    engine = family_engine(family)
    expected = full_forward(engine)
    cache = engine.new_cache(NUM_TOKENS)
    actual = engine.prefill_logits(cache, IDS)
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).max() < TOLERANCE * scale
    np.testing.assert_allclose(
        engine.prefill(engine.new_cache(NUM_TOKENS), IDS), actual[-1], atol=TOLERANCE * scale
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_written_in_any_order_around_a_recomputed_one_give_the_same_logits(
    family: str, family_engine: Callable[[str], TorchEngine]
) -> None:
    engine = family_engine(family)
    source = engine.new_cache(NUM_TOKENS)
    expected = engine.prefill_logits(source, IDS)[-20:]
    target = engine.new_cache(NUM_TOKENS)
    target.write(130, source.read(130, 180))
    target.write(0, source.read(0, 70))
    engine.fill(target, IDS[70:130], 70)
    actual = engine.prefill_logits(target, IDS[180:], 180)
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).max() < TOLERANCE * scale
    # and the comparison can fail: without the chunk in the middle the answer is another
    target.write(100, np.zeros_like(source.read(100, 180)))
    wrong = engine.prefill_logits(target, IDS[180:], 180)
    assert np.abs(wrong - expected).max() > 20 * TOLERANCE * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_0_keys_rotate_to_what_is_cached_and_back(
    family: str, family_engine: Callable[[str], TorchEngine]
) -> None:
    engine = family_engine(family)
    cache = engine.new_cache(NUM_TOKENS)
    engine.fill(cache, IDS)
    cached = cache.read(0, NUM_TOKENS)
    layer0 = engine.layer0_kv(IDS)
    tables = engine.rotary_tables(NUM_TOKENS)
    scale = np.abs(cached[0, 0]).max()
    turned = rotate(layer0[:1], tables, token_start=0)[0]
    assert np.abs(turned - cached[0, 0]).max() < 1e-4 * scale
    back = unrotate(cached[:1, 0].astype(np.float32), tables, token_start=0)[0]
    assert np.abs(back - layer0[0]).max() < 1e-4 * scale
    assert np.abs(cached[0, 0] - layer0[0]).max() > 0.05 * scale  # RoPE does turn something
    np.testing.assert_allclose(layer0[1], cached[0, 1], atol=1e-4 * np.abs(layer0[1]).max())


@pytest.mark.parametrize(
    "family", ["llama", "llama-yarn", "gemma3-two-ropes", "smollm3-no-rope-layers"]
)
def test_every_layers_keys_unrotate_to_what_its_projection_made(
    family: str, family_engine: Callable[[str], TorchEngine]
) -> None:
    engine = family_engine(family)
    g = engine.geometry
    made: dict[int, np.ndarray] = {}
    hooks = []
    for index, layer in enumerate(engine.model.model.layers):
        attention = layer.self_attn
        module = getattr(attention, "k_norm", None) or attention.k_proj

        def keep(
            _module: object, _inputs: object, output: torch.Tensor, index: int = index
        ) -> None:
            made[index] = output.reshape(-1, g.num_kv_heads, g.head_dim).numpy().copy()

        hooks.append(module.register_forward_hook(keep))
    cache = engine.new_cache(60)
    engine.fill(cache, IDS[:60])
    for hook in hooks:
        hook.remove()
    tables = engine.rotary_tables(60)
    before = unrotate(cache.read(0, 60)[:, 0].astype(np.float32), tables, token_start=0)
    for index in range(g.num_layers):
        scale = np.abs(made[index]).max()
        assert np.abs(before[index] - made[index]).max() < 1e-4 * scale, f"layer {index}"


def test_sliding_layers_keep_all_tokens(family_engine: Callable[[str], TorchEngine]) -> None:
    engine = family_engine("gemma3-two-ropes")
    assert engine.geometry.sliding_window_tokens == 48
    assert engine.geometry.sliding_layers == (True,) * 5 + (False, True)
    cache = engine.new_cache(NUM_TOKENS)
    engine.fill(cache, IDS)
    assert np.abs(cache.read(0, 10)).min(axis=(1, 2, 3, 4)).shape == (7,)
    assert (np.abs(cache.read(0, 10)).max(axis=(1, 2, 3, 4)) > 0).all()
