from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from engine import UnsupportedModel
from engine.geometry import geometry_of
from tests.engine.conftest import FAMILIES, config_of

# (layers, KV heads, head dim, rotary dim, interleaved, sliding layers, q/k norm)
EXPECTED = {
    "llama": (4, 2, 16, 16, False, 0, False),
    "llama-yarn": (4, 2, 16, 16, False, 0, False),
    "qwen2-half-sliding": (4, 2, 16, 16, False, 2, False),
    "qwen3-qk-norm": (4, 2, 32, 32, False, 0, True),
    "mistral-sliding": (4, 2, 16, 16, False, 4, False),
    "mistral-full": (4, 2, 16, 16, False, 0, False),
    "gemma-mqa": (4, 1, 32, 32, False, 0, False),
    "gemma2-softcap": (4, 2, 32, 32, False, 2, False),
    "gemma3-two-ropes": (7, 1, 32, 32, False, 6, True),
    "phi-partial-rotary": (4, 2, 16, 8, False, 0, False),
    "glm-interleaved": (4, 2, 16, 8, True, 0, False),
    "cohere-interleaved": (4, 2, 16, 16, True, 0, False),
    "olmo2": (4, 2, 16, 16, False, 0, True),
    "smollm3-no-rope-layers": (4, 2, 16, 16, False, 0, False),
    "granite": (4, 2, 16, 16, False, 0, False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_comes_out_of_the_config(family: str) -> None:
    g = geometry_of(config_of(family), name=family)
    actual = (
        g.num_layers, g.num_kv_heads, g.head_dim, g.rotary_dim, g.rotary_interleaved,
        sum(g.sliding_layers), g.has_qk_norm,
    )  # fmt: skip
    assert actual == EXPECTED[family]
    assert g.context_tokens == 512
    assert g.vocab_size == 512
    assert len(g.sliding_layers) == g.num_layers


def test_bytes_per_token_of_the_bundled_model() -> None:
    config = transformers.LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )
    assert geometry_of(config, name="smollm2").num_bytes_per_token(2) == 23_040


def test_longrope_stops_at_the_original_window() -> None:
    factors = [1.0] * 8
    config = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 512,
        },
    )
    assert geometry_of(config, name="phi").context_tokens == 512


def small(cls: str, **changes: Any) -> Any:
    return getattr(transformers, cls)(**changes)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DeepseekV2Config", {}, "latent attention"),
    ("DeepseekV3Config", {}, "latent attention"),
    ("Qwen3NextConfig", {}, "linear-attention"),
    ("MambaConfig", {}, "recurrent state"),
    ("JambaConfig", {}, "recurrent state"),
    ("FalconH1Config", {}, "recurrent state"),
    ("MiniMaxConfig", {}, "linear_attention"),
    ("Gemma3nTextConfig", {}, "share one another's KV"),
    ("Llama4TextConfig", {}, "chunked-attention"),
    ("T5Config", {}, "encoder-decoder"),
]


@pytest.mark.parametrize(("cls", "changes", "why"), REFUSED)
def test_state_that_is_not_k_and_v_is_refused_with_the_reason(
    cls: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"model 'm' is not supported: .*{why}"):
        geometry_of(small(cls, **changes), name="m")


def bare(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model_type": "odd",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "max_position_embeddings": 128,
        "vocab_size": 10,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_key_value_heads": 3}, "4 query heads do not divide over 3 KV heads"),
        ({"hidden_size": 66}, "hidden size 66 does not divide"),
        ({"num_hidden_layers": 0}, "no positive 'num_hidden_layers'"),
        ({"max_position_embeddings": None}, "no positive 'max_position_embeddings'"),
        ({"head_dim": 16, "global_head_dim": 32}, "different widths"),
        ({"layer_types": ["conv", "full_attention"]}, "'conv' layers"),
    ],
)
def test_odd_configs_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        geometry_of(bare(**changes), name="m")


def test_without_kv_heads_or_rope_every_query_head_has_its_own() -> None:
    g = geometry_of(bare(), name="m")
    assert (g.num_kv_heads, g.head_dim, g.rotary_dim, g.rope_kinds) == (4, 16, 0, ())
