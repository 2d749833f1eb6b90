from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine import WeightsError, identity
from engine.identity import ModelIdentity, config_digest, identify, weights_digest

TENSORS: dict[str, np.ndarray] = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.ones(5, dtype=np.float16),
    "empty": np.zeros((0, 3), dtype=np.float32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    save_file(TENSORS, str(model / "model.safetensors"))
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    return model


def test_weights_digest_is_pinned(folder: Path) -> None:
    # A change here makes every stored chunk of every user foreign: raise the version in the hash instead.
    assert weights_digest(folder).hex() == (
        "69e76c9edc9793511dafd23862b4343d99051d649a2e556869abee0949b30880"
    )


def test_splitting_files_and_metadata_do_not_change_the_weights_digest(
    folder: Path, tmp_path: Path
) -> None:
    split = tmp_path / "split"
    split.mkdir()
    for index, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, str(split / f"part-{index}.safetensors"), metadata={"x": "y"})
    assert weights_digest(split) == weights_digest(folder)


@pytest.mark.parametrize(
    "changed",
    [
        TENSORS | {"a.weight": TENSORS["a.weight"] + 1},
        TENSORS | {"a.weight": TENSORS["a.weight"].reshape(4, 3)},
        TENSORS | {"a.weight": TENSORS["a.weight"].view(np.int32)},
        TENSORS | {"c.weight": np.ones(1, np.float32)},
        {
            "a.weight": TENSORS["a.weight"],
            "b.weights": TENSORS["b.weight"],
            "empty": TENSORS["empty"],
        },
    ],
    ids=["value", "shape", "dtype", "more", "name"],
)
def test_any_change_of_a_tensor_changes_the_digest(
    folder: Path, tmp_path: Path, changed: dict[str, np.ndarray]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file(changed, str(other / "model.safetensors"))
    assert weights_digest(other) != weights_digest(folder)


def test_every_truncation_of_a_weights_file_is_a_typed_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            weights_digest(folder)


def test_a_huge_header_length_is_refused_without_allocating(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(WeightsError, match="not a safetensors file"):
        weights_digest(folder)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    hashed: list[Path] = []
    original: Callable[[Path], bytes] = identity.weights_digest

    def spy(folder: Path) -> bytes:
        hashed.append(folder)
        return original(folder)

    monkeypatch.setattr(identity, "weights_digest", spy)
    return hashed


def test_weights_are_hashed_once_and_again_after_a_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = counting(monkeypatch)
    sidecars = tmp_path / "digests"

    def digest(*, rehash: bool = False) -> bytes:
        return identity.remembered_weights_digest(folder, sidecar_dir=sidecars, rehash=rehash)

    first = digest()
    assert digest() == first
    assert len(hashed) == 1
    assert digest(rehash=True) == first
    assert len(hashed) == 2
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))  # a time that differs from the remembered one for sure
    assert digest() != first
    assert len(hashed) == 3


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"files": {}, "weights_digest": "00"}', "null"]
)
def test_a_damaged_sidecar_only_costs_hashing_again(
    folder: Path, tmp_path: Path, content: str
) -> None:
    sidecars = tmp_path / "digests"
    first = identity.remembered_weights_digest(folder, sidecar_dir=sidecars)
    [sidecar] = sidecars.glob("*.json")
    sidecar.write_text(content)
    assert identity.remembered_weights_digest(folder, sidecar_dir=sidecars) == first


def test_a_copied_folder_has_the_same_identity(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    first, second = (
        identify(f, tokenizer_json="{}", dtype="float32", sidecar_dir=tmp_path / "digests")
        for f in (folder, copy)
    )
    assert first == second


def test_a_sidecar_folder_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    found = identity.remembered_weights_digest(folder, sidecar_dir=blocker / "digests")
    assert found == weights_digest(folder)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"transformers_version": "9"}, True),
        ({"dtype": "bfloat16", "use_cache": False, "eos_token_id": 7}, True),
        ({"rope_theta": 1e5}, False),
        ({"rms_norm_eps": 1e-5}, False),
        ({"rope_parameters": {"rope_type": "yarn"}}, False),
    ],
)
def test_only_what_changes_kv_changes_the_config_digest(
    tmp_path: Path, change: dict[str, object], is_same: bool
) -> None:
    base = {"rope_theta": 1e4, "hidden_size": 8}
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    one.write_text(json.dumps(base))
    two.write_text(json.dumps(dict(reversed(list((base | change).items())))))
    assert (config_digest(one) == config_digest(two)) is is_same


def test_an_unreadable_config_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(WeightsError, match="cannot read"):
        config_digest(path)
    path.write_text("{")
    with pytest.raises(WeightsError, match="cannot read"):
        config_digest(path)


def test_every_field_changes_the_digest() -> None:
    base = ModelIdentity(bytes(32), bytes(32), bytes(32), bytes(32), "float32")
    one = b"\1" * 32
    variants = [
        base,
        ModelIdentity(one, bytes(32), bytes(32), bytes(32), "float32"),
        ModelIdentity(bytes(32), one, bytes(32), bytes(32), "float32"),
        ModelIdentity(bytes(32), bytes(32), one, bytes(32), "float32"),
        ModelIdentity(bytes(32), bytes(32), bytes(32), one, "float32"),
        ModelIdentity(bytes(32), bytes(32), bytes(32), bytes(32), "bfloat16"),
    ]
    assert len({v.digest for v in variants}) == len(variants)
    assert all(len(v.digest) == 32 for v in variants)
    # a profile's digest leaves out the tokenizer and the dtype
    assert len({v.model_digest for v in variants}) == len(variants) - 2
    assert variants[1].to_json()["weights"] == "01" * 32
