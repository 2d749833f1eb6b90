"""Tiny random models of every supported family, saved as folders and loaded like real ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import TorchEngine, load_engine

# Large weights: with the usual 0.02 a tiny model attends to nothing and every wrong KV passes.
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": None}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "qwen2-half-sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2},
    ),
    "qwen3-qk-norm": ("Qwen3Config", {"head_dim": 32}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 48}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "gemma-mqa": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2-softcap": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 48, "query_pre_attn_scalar": 32},
    ),
    "gemma3-two-ropes": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "sliding_window": 48,
            "query_pre_attn_scalar": 32,
        },
    ),
    "phi-partial-rotary": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "glm-interleaved": (
        "GlmConfig",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                             "partial_rotary_factor": 0.5}},
    ),
    "cohere-interleaved": ("CohereConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3-no-rope-layers": ("SmolLM3Config", {}),
    "granite": ("GraniteConfig", {}),
}  # fmt: skip


def config_of(family: str) -> Any:
    """Return the transformers config of a family's tiny model."""
    import transformers

    class_name, changes = FAMILIES[family]
    return getattr(transformers, class_name)(**(_COMMON | changes))


@pytest.fixture(scope="session")
def family_engine(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> Callable[[str], TorchEngine]:
    """Builds and loads the tiny model of a family once."""
    loaded: dict[str, TorchEngine] = {}
    root = tmp_path_factory.mktemp("families")

    def build(family: str) -> TorchEngine:
        if family not in loaded:
            import torch
            from transformers import AutoModelForCausalLM

            folder = root / family
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                model: Any = AutoModelForCausalLM.from_config(config_of(family))  # type: ignore[no-untyped-call]
                model.save_pretrained(str(folder))
            shutil.copytree(tiny_tokenizer_dir, folder, dirs_exist_ok=True)
            loaded[family] = load_engine(str(folder), cache_dir=root / "cache", progress=False)
        return loaded[family]

    return build
