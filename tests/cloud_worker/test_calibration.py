from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloud_worker.calibration import calibrate, measure
from codec import Codec
from engine import TorchEngine


def test_prefill_and_every_level_set_are_measured(engine: TorchEngine, codec: Codec) -> None:
    prefill, decode = measure(engine, codec, step_tokens=64)
    assert len({sample.token_start for sample in prefill}) == 2
    assert len({sample.num_tokens for sample in prefill}) == 2
    assert all(sample.seconds > 0 for sample in prefill)
    assert {"fp16", "int8"} <= {sample.level_set for sample in decode}
    assert all(sample.kv_bytes == 64 * 3 * 2 * 2 * 16 * 2 for sample in decode)


def test_measurements_are_kept_and_used_again(
    engine: TorchEngine, codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_worker.calibration.MAX_DRIFT", 1e9)
    first = calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=tmp_path)
    (kept,) = (tmp_path / "calibration").iterdir()
    again = calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=tmp_path)
    assert again.prefill == first.prefill
    assert list((tmp_path / "calibration").iterdir()) == [kept]


def test_measurements_of_a_machine_that_was_slower_are_made_anew(
    engine: TorchEngine, codec: Codec, tmp_path: Path
) -> None:
    calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=tmp_path)
    (kept,) = (tmp_path / "calibration").iterdir()
    record = json.loads(kept.read_text())
    for sample in record["prefill"]:
        sample["seconds"] = 100.0
    kept.write_text(json.dumps(record))
    model = calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=tmp_path)
    assert model.prefill_seconds(0, 64) < 50.0


def test_another_step_size_is_measured_on_its_own(
    engine: TorchEngine, codec: Codec, tmp_path: Path
) -> None:
    for step_tokens in (32, 64):
        calibrate(engine, codec, step_tokens=step_tokens, mode="cached", cache_dir=tmp_path)
    assert len(list((tmp_path / "calibration").iterdir())) == 2


def test_a_damaged_file_is_measured_again(
    engine: TorchEngine, codec: Codec, tmp_path: Path
) -> None:
    calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=tmp_path)
    (kept,) = (tmp_path / "calibration").iterdir()
    kept.write_text("{}")
    model = calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=tmp_path)
    assert model.prefill is not None
    assert kept.read_text() != "{}"


def test_none_measures_nothing(engine: TorchEngine, codec: Codec, tmp_path: Path) -> None:
    model = calibrate(engine, codec, step_tokens=64, mode="none", cache_dir=tmp_path)
    assert model.prefill is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(
    engine: TorchEngine, codec: Codec, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    model = calibrate(engine, codec, step_tokens=64, mode="cached", cache_dir=blocker)
    assert model.prefill is not None
