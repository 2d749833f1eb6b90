from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from cloud_worker.cli import main
from cloud_worker.config import WorkerConfig, load_config
from cloud_worker.errors import ConfigError
from telemetry import field_docs


def test_defaults_are_valid() -> None:
    assert load_config([], {}) == WorkerConfig()


def test_every_field_has_a_description_and_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    docs = field_docs(WorkerConfig)
    with pytest.raises(SystemExit):
        load_config(["--help"], {})
    shown = capsys.readouterr().out
    for item in fields(WorkerConfig):
        assert docs[item.name]
        assert "--" + item.name.replace("_", "-") in shown


def test_the_command_line_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    toml = tmp_path / "worker.toml"
    toml.write_text('tenant = "file"\nmodel = "file"\ndtype = "bfloat16"\n')
    config = load_config(
        ["--config", str(toml), "--tenant", "flag"],
        {"KVTIDE_WORKER_TENANT": "env", "KVTIDE_WORKER_MODEL": "env", "HOME": "/x"},
    )
    assert (config.tenant, config.model, config.dtype) == ("flag", "env", "bfloat16")


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--tennant", "x"], {}, "--tennant"),
        ([], {"KVTIDE_WORKER_TENNANT": "x"}, "KVTIDE_WORKER_TENNANT"),
        (["--http-port", "eighty"], {}, "http_port"),
        (["--http-port", "70000"], {}, "http_port is 70000"),
        (["--tenant", "a.b"], {}, "tenant is 'a.b'"),
        (["--worker-id", "a>"], {}, "worker_id is 'a>'"),
        (["--calibrate", "often"], {}, "calibrate is 'often'"),
        (["--nats-url", "localhost"], {}, "nats_url is 'localhost'"),
        (["--slo-s", "nan"], {}, "slo_s is nan"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(argv, environ)


def test_the_program_exits_with_2_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tennant", "x"]) == 2
    assert "--tennant" in capsys.readouterr().err


def test_the_broker_token_comes_from_its_file_and_is_never_shown(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    config = load_config(["--nats-token-file", str(secret)], {})
    assert config.broker_token() == "s3cret"
    assert "s3cret" not in repr(WorkerConfig(nats_token="s3cret"))
    assert WorkerConfig().broker_token() is None


def test_every_setting_is_documented_with_its_default() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "config-worker.md").read_text()
    for item in fields(WorkerConfig):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{item.name}` |")]
        default = row.split("|")[2].strip().strip("`")
        shown = {"none": None, "empty": item.default}.get(default, default)
        assert str(shown) == str(item.default), item.name
