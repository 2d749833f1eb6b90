from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from edge_agent.cli import main
from edge_agent.config import EdgeConfig, load_config
from edge_agent.errors import ConfigError
from telemetry import field_docs


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "edge.toml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_when_nothing_is_said() -> None:
    assert load_config([], {}) == EdgeConfig()


def test_every_field_has_a_docstring_and_times_and_sizes_name_their_unit() -> None:
    docs = field_docs(EdgeConfig)
    for item in fields(EdgeConfig):
        assert docs[item.name].strip(), item.name
        if item.name.endswith(("_s", "_bytes", "_tokens")):
            assert "Unit:" in docs[item.name], item.name


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config_file = write(tmp_path, 'http_port = 1\nmodel = "file"\ntenant = "file"\n')
    config = load_config(
        ["--config", config_file, "--http-port", "3"],
        {"KVTIDE_EDGE_HTTP_PORT": "2", "KVTIDE_EDGE_MODEL": "env", "OTHER": "x"},
    )
    assert (config.http_port, config.model, config.tenant) == (3, "env", "file")
    assert config.chunk_tokens == EdgeConfig().chunk_tokens


@pytest.mark.parametrize(
    ("argv", "environ", "toml", "named"),
    [
        ([], {}, "htp_port = 1", "htp_port"),
        ([], {"KVTIDE_EDGE_HTP_PORT": "1"}, "", "KVTIDE_EDGE_HTP_PORT"),
        (["--htp-port", "1"], {}, "", "--htp-port"),
        (["--http-port", "many"], {}, "", "http_port"),
        (["--http-port", "70000"], {}, "", "http_port"),
        ([], {}, "http_port = true", "http_port"),
        ([], {}, 'deadline_s = "soon"', "deadline_s"),
        ([], {}, "deadline_s = nan", "deadline_s"),
        ([], {}, "levels = 3", "levels"),
        ([], {}, "levels = []", "levels"),
        ([], {}, "model = 3", "model"),
        ([], {}, "store_dir = 3", "store_dir"),
        ([], {}, 'tenant = "a.b"', "tenant"),
        ([], {}, 'dtype = "int3"', "dtype"),
        ([], {}, 'agent_id = "a.b"', "agent_id"),
        ([], {}, 'nats_url = "http://x"', "nats_url"),
        ([], {}, "this is not toml", "TOML"),
    ],
)
def test_bad_setting_is_named(
    tmp_path: Path, argv: list[str], environ: dict[str, str], toml: str, named: str
) -> None:
    arguments = [*argv, "--config", write(tmp_path, toml)] if toml else argv
    with pytest.raises(ConfigError, match=named):
        load_config(arguments, environ)


def test_bad_setting_ends_the_program_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-such-flag", "1"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(["--help"], {})
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for item in fields(EdgeConfig):
        assert "--" + item.name.replace("_", "-") in printed


def test_token_is_never_shown(tmp_path: Path) -> None:
    assert "s3cret" not in repr(EdgeConfig(nats_token="s3cret"))
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    assert EdgeConfig(nats_token_file=path).broker_token() == "s3cret"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="nats_token_file"):
        EdgeConfig(nats_token_file=path).broker_token()
    with pytest.raises(ConfigError, match="nats_token_file"):
        EdgeConfig(nats_token_file=tmp_path / "none").broker_token()
    assert EdgeConfig().broker_token() is None


def test_every_setting_is_in_the_documentation() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "".join(path.read_text() for path in docs.glob("config*.md"))
    missing = [item.name for item in fields(EdgeConfig) if f"`{item.name}`" not in text]
    assert not missing
