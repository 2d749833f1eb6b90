"""A tiny random model with a byte-level tokenizer: the real engine, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from codec import Codec
from edge_agent.ingest import Ingestor
from edge_agent.model import build_codec
from edge_agent.store import ContextStore
from engine import TorchEngine, load_engine
from telemetry import MetricSet, names

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 512


def write_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Save a random two-layer Llama with one token a byte."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=257,
        bos_token_id=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return load_engine(str(tiny_model), num_threads=1, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def codec(engine: TorchEngine) -> Codec:
    return build_codec(engine, (), 1)


@pytest.fixture
def metrics() -> MetricSet:
    return MetricSet(names.EDGE_METRICS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ContextStore]:
    with ContextStore(tmp_path / "store", quota_bytes=10**9) as opened:
        yield opened


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def ingestor(
    engine: TorchEngine,
    codec: Codec,
    store: ContextStore,
    metrics: MetricSet,
    pool: ThreadPoolExecutor,
) -> Ingestor:
    return Ingestor(
        engine=engine,
        codec=codec,
        store=store,
        metrics=metrics,
        tenant="t",
        levels=("fp16", "int8", "cachegen:*"),
        chunk_tokens=100,
        compute=pool,
        disk=pool,
    )
