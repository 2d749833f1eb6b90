"""Fixtures shared by every room: a tiny model, the real small model, and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine import TorchEngine

# As engine._openmp does, for tests that load torch before the engine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_REPO = Path(__file__).resolve().parent.parent
_TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real traces and texts; the test is skipped where it is missing."""
    configured = os.environ.get("KVTIDE_DATA")
    folder = Path(configured) if configured else _REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set KVTIDE_DATA")
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 512 ids with a chat template, made here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers' own
        tokenizer_object=raw,
        bos_token=AddedToken("<|im_start|>", special=True),
        eos_token=AddedToken("<|im_end|>", special=True),
        pad_token=AddedToken("<|endoftext|>", special=True),
    )
    wrapped.chat_template = _TINY_TEMPLATE
    wrapped.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A random Llama: 4 layers, 4 query and 2 KV heads of 16, window 2048, with the tiny tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("tiny-model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        LlamaForCausalLM(config).save_pretrained(str(folder))
    shutil.copytree(tiny_tokenizer_dir, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """The tiny model, loaded in float32 on the CPU."""
    from engine import load_engine

    cache = tmp_path_factory.mktemp("tiny-cache")
    return load_engine(str(tiny_model_dir), cache_dir=cache, progress=False)


@pytest.fixture(scope="session")
def smollm2() -> TorchEngine:
    """The real SmolLM2-135M in float32; fetched and converted into the cache folder if it is not there."""
    from engine import load_engine

    return load_engine("smollm2-135m", progress=False)
