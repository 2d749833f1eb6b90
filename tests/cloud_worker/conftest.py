from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cloud_worker.executors import Executors
from codec import Codec, Geometry
from engine import ModelIdentity, Tokenizer, TorchEngine
from engine.geometry import geometry_of

VOCAB = 256


@pytest.fixture(scope="session")
def engine() -> TorchEngine:
    """A tiny random Llama: big enough to disagree with itself when its cache is wrong."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    raw = RawTokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = Whitespace()  # type: ignore[assignment, unused-ignore]
    fast: Any = PreTrainedTokenizerFast
    backend = fast(tokenizer_object=raw, eos_token="w2", unk_token="w0")
    identity = ModelIdentity(
        weights_digest=b"w" * 32,
        tokenizer_digest=b"t" * 32,
        config_digest=b"c" * 32,
        adapter_digest=bytes(32),
        dtype="float32",
    )
    return TorchEngine(
        model,
        Tokenizer(backend),
        geometry=geometry_of(config, name="tiny"),
        identity=identity,
        name="tiny",
    )


@pytest.fixture(scope="session")
def codec(engine: TorchEngine) -> Codec:
    geometry = engine.geometry
    return Codec(
        Geometry(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim),
        model_digest=engine.identity.model_digest,
        num_threads=1,
    )


@pytest.fixture
def executors() -> Iterator[Executors]:
    executors = Executors()
    yield executors
    executors.close()
