from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from codec import Profile, inspect_bitstream
from codec.cli import main
from codec.texts import machine_texts
from tests.codec.builders import GEOMETRY, MODEL_DIGEST, make_codec, make_kv, make_profile

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def kv_file(tmp_path: Path) -> Path:
    path = tmp_path / "kv.npy"
    np.save(path, make_kv(45, seed=3))
    return path


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "p.kvprofile"
    path.write_bytes(make_profile().to_bytes())
    return path


def _run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_encode_inspect_and_decode_with_a_profile(
    tmp_path: Path, kv_file: Path, profile_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk, back = tmp_path / "chunk", tmp_path / "back"
    options = ("--level", "cachegen:1", "--profile", profile_file, "--token-start", 1536)
    assert _run("encode", kv_file, chunk, *options) == 0
    assert chunk.read_bytes() == make_codec().encode(
        make_kv(45, seed=3), level="cachegen:1", token_start=1536
    )
    assert "45 tokens" in capsys.readouterr().out
    assert _run("inspect", chunk, "--layers") == 0
    out = capsys.readouterr().out
    assert "level cachegen:1" in out
    assert "1536 to 1581" in out
    assert MODEL_DIGEST.hex() in out
    assert f"{inspect_bitstream(chunk.read_bytes()).bits_per_element:.4f} per element" in out
    assert out.count("\n") > 10 + GEOMETRY.num_layers
    assert _run("decode", chunk, back, "--profile", profile_file, "--dtype", "float32") == 0
    expected = make_codec().decode(chunk.read_bytes(), dtype=np.float32).kv
    np.testing.assert_array_equal(np.load(back), expected)


@pytest.mark.parametrize("level", ["fp16", "int8"])
def test_baselines_need_no_profile(tmp_path: Path, kv_file: Path, level: str) -> None:
    chunk, back = tmp_path / "chunk", tmp_path / "back.npy"
    digest = "ab" * 32
    assert _run("encode", kv_file, chunk, "--level", level, "--model-digest", digest) == 0
    assert inspect_bitstream(chunk.read_bytes()).model_digest.hex() == digest
    assert _run("decode", chunk, back) == 0
    np.testing.assert_allclose(np.load(back), make_kv(45, seed=3), atol=0.2)


def test_inspect_shows_a_profile(profile_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("inspect", profile_file) == 0
    out = capsys.readouterr().out
    assert make_profile().digest.hex() in out
    assert "cachegen:5" in out
    assert "delta_table: uint16" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/nothing"], "nothing"),
        (["inspect", "{kv}"], "not a kvtide profile"),
        (["decode", "{kv}", "{tmp}/x"], "not a kvtide bitstream"),
        (["encode", "{profile}", "{tmp}/x", "--level", "fp16"], "not a .npy file"),
        (["encode", "{kv}", "{tmp}/x", "--level", "cachegen:0"], "needs a profile"),
        (["encode", "{kv}", "{tmp}/x", "--level", "best"], "no level is named 'best'"),
        (["encode", "{kv}", "{tmp}/x", "--level", "fp16", "--model-digest", "xy"], "64 hex digits"),
        (["encode", "{flat}", "{tmp}/x", "--level", "fp16"], "has 1 axes"),
        (["encode", "{kv}", "{tmp}/no/folder", "--level", "fp16"], "folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_1(
    tmp_path: Path,
    kv_file: Path,
    profile_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(3, np.float32))
    places = {
        "tmp": tmp_path,
        "kv": kv_file,
        "profile": profile_file,
        "flat": tmp_path / "flat.npy",
    }
    assert main([argument.format(**places) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bad_arguments_are_exit_code_2() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(
        [sys.executable, "-m", "codec", "encode", "--nonsense"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 2
    assert "nonsense" in result.stderr or "required" in result.stderr


def test_profile_is_built_measured_and_usable(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    texts = machine_texts(held_out=False)
    for text in texts[:2]:
        (tmp_path / f"{text.name}.txt").write_text(text.text[:3000], encoding="utf-8")
    (tmp_path / "held-out.txt").write_text(texts[2].text[:6000], encoding="utf-8")
    out = tmp_path / "new" / "tiny.kvprofile"
    assert _run(
        "profile", "--model", tiny_model_dir, "--out", out, "--tokens", 400, "--text",
        *(tmp_path / f"{text.name}.txt" for text in texts[:2]),
        "--held-out", tmp_path / "held-out.txt",
    ) == 0  # fmt: skip
    captured = capsys.readouterr()
    assert "warning: 2 calibration texts" in captured.err
    assert "warning: " in captured.err
    profile = Profile.load(out)
    assert profile.geometry.num_layers == 4
    figures = {info.name: info for info in profile.levels}
    assert set(figures) >= {"fp16", "int8", "cachegen:0", "cachegen:5"}
    assert all(info.kl is not None and info.top1 is not None for info in figures.values())
    fine, coarse = figures["cachegen:0"], figures["cachegen:5"]
    assert (fine.bits_per_element or 0) > (coarse.bits_per_element or 99)
    assert [entry[0] for entry in profile.notes["texts"]] == [f"{t.name}.txt" for t in texts[:2]]
    assert profile.notes["texts"][0][1] == 400


def test_too_little_text_is_an_error_not_a_profile(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "short.txt").write_text("short")
    options = ("--text", tmp_path / "short.txt", "--held-out", tmp_path / "short.txt")
    assert _run("profile", "--model", tiny_model_dir, "--out", tmp_path / "p", *options) == 1
    assert "too short" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_an_unknown_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "no-such-model"
    assert _run("profile", "--model", missing, "--out", tmp_path / "p") == 1
    assert "no-such-model" in capsys.readouterr().err
