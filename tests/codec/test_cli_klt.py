"""`kvtide codec profile --level-set klt`, from texts to a measured profile, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from codec import LevelSet, Profile
from codec.bitstream import parse
from codec.cli import main
from codec.klt_builder import CONTEXT_TOKENS, CONTINUATION_TOKENS
from codec.texts import machine_texts
from tests.codec.klt_builders import make_codec, make_plain, make_profile, make_rotary, rotated


def test_a_klt_profile_is_built_measured_and_usable(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    texts = machine_texts(held_out=False)
    names = []
    for text in texts[:3]:
        names.append(tmp_path / f"{text.name}.txt")
        names[-1].write_text(text.text[: 3 * (CONTEXT_TOKENS + CONTINUATION_TOKENS)], "utf-8")
    (tmp_path / "held-out.txt").write_text(texts[3].text[:6000], encoding="utf-8")
    out = tmp_path / "new" / "tiny.klt.kvprofile"
    out.parent.mkdir()
    options = [
        "profile", "--level-set", "klt", "--model", str(tiny_model_dir), "--out", str(out), "--resume",
        "--text", *map(str, names), "--held-out", str(tmp_path / "held-out.txt"),
    ]  # fmt: skip
    assert main(options) == 0
    captured = capsys.readouterr()
    assert "warning: " in captured.err
    profile = Profile.load(out)
    assert profile.level_set is LevelSet.KLT
    figures = {info.name: info for info in profile.levels}
    assert set(figures) >= {"klt:0", "klt:5"}
    assert all(info.kl is not None and info.top1 is not None for info in figures.values())
    fine, coarse = figures["klt:0"], figures["klt:5"]
    assert (fine.bits_per_element or 0) >= (coarse.bits_per_element or 99)
    assert not out.with_name(out.name + ".work").exists()


def test_inspect_prints_what_each_group_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_plain(300, seed=3)
    data = make_codec().encode(
        rotated(plain, make_rotary(), 0), level="klt:2", token_start=0, layer0=plain[0]
    )
    (tmp_path / "chunk.kvtb").write_bytes(data)
    (tmp_path / "small.kvprofile").write_bytes(make_profile().to_bytes())
    assert main(["inspect", str(tmp_path / "chunk.kvtb")]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [
        float(line.split()[1 if line.split()[0] == "beside" else 2])
        for line in lines
        if line.split()[0] in ("beside", "group")
    ]
    overhead = 128 + 4 * len(parse(data).offsets)
    assert sum(parts) == pytest.approx(8 * (len(data) - overhead) / plain.size, abs=1e-3)
    assert main(["inspect", str(tmp_path / "small.kvprofile")]) == 0
    assert "layers 1 to" in capsys.readouterr().out
