from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from telemetry import (
    SettingsReader,
    check_broker_url,
    check_settings,
    check_subject_token,
    field_docs,
    read_secret,
)


class BadSetting(Exception):
    """The program's own error."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a program that has one of each kind."""

    http_port: int = 80
    """Port; 100 % free text."""
    deadline_s: float = 5.0
    """Deadline. Unit: seconds."""
    model: str = "default"
    """Model."""
    token: str = field(default="", repr=False)
    """Secret."""
    store_dir: Path = Path("/store")
    """Folder."""
    cache_dir: Path | None = None
    """Folder, or none."""
    levels: tuple[str, ...] = ("a",)
    """Names."""

    def __post_init__(self) -> None:
        check_settings(
            self,
            ranges=[("http_port", 0, 65535), ("deadline_s", 0.001, 86400)],
            choices={"model": ("default", "file", "env", "flag")},
            error=BadSetting,
        )


READER = SettingsReader(
    Settings,
    env_prefix="KVTIDE_TEST_",
    program="kvtide-test",
    description="Test.",
    error=BadSetting,
)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_when_nothing_is_said() -> None:
    assert READER.load([], {"OTHER": "x", "KVTIDE_OTHER": "x"}) == Settings()


@pytest.mark.parametrize(
    ("argv", "environ", "model"),
    [
        (["--model", "flag"], {"KVTIDE_TEST_MODEL": "env"}, "flag"),
        ([], {"KVTIDE_TEST_MODEL": "env"}, "env"),
        ([], {}, "file"),
    ],
)
def test_the_command_line_beats_the_environment_beats_the_file(
    tmp_path: Path, argv: list[str], environ: dict[str, str], model: str
) -> None:
    path = write(tmp_path, 'model = "file"\nhttp_port = 1\n')
    settings = READER.load(["--config", path, *argv], environ)
    assert (settings.model, settings.http_port, settings.deadline_s) == (model, 1, 5.0)


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "http_port = 0\nlevels = ['a', 'b']\ndeadline_s = 2\n")
    settings = READER.load([], {"KVTIDE_TEST_CONFIG": path})
    assert settings.http_port == 0
    assert settings.levels == ("a", "b")
    assert (settings.deadline_s, type(settings.deadline_s)) == (2.0, float)


def test_each_kind_is_converted_from_text() -> None:
    settings = READER.load(
        ["--levels", "fp16, cachegen:*", "--cache-dir", "~/c", "--deadline-s", "0.5"],
        {"HOME": "/x"},
    )
    assert settings.levels == ("fp16", "cachegen:*")
    assert settings.cache_dir == Path("~/c").expanduser()
    assert settings.deadline_s == 0.5


@pytest.mark.parametrize(
    ("argv", "environ", "toml", "named"),
    [
        ([], {}, "htp_port = 1", "htp_port"),
        ([], {"KVTIDE_TEST_HTP_PORT": "1"}, "", "KVTIDE_TEST_HTP_PORT"),
        (["--htp-port", "1"], {}, "", "--htp-port"),
        (["--http", "1"], {}, "", "--http"),
        (["--http-port", "many"], {}, "", "http_port"),
        (["--http-port", "70000"], {}, "", "http_port is 70000, must be from 0 to 65535"),
        ([], {}, "http_port = true", r"http_port.*settings\.toml"),
        ([], {}, 'deadline_s = "soon"', r"deadline_s.*settings\.toml"),
        ([], {}, "deadline_s = nan", "deadline_s is nan"),
        ([], {}, "levels = 3", "levels"),
        ([], {}, "model = 3", "model"),
        ([], {}, 'model = "other"', "model is 'other', must be one of default, file"),
        ([], {}, "store_dir = 3", "store_dir"),
        ([], {}, 'store_dir = ""', "store_dir"),
        ([], {}, "this is not toml", r"settings\.toml is not valid TOML"),
        (["--config", "/nowhere.toml"], {}, "", r"/nowhere\.toml"),
    ],
)
def test_a_bad_setting_is_named(
    tmp_path: Path, argv: list[str], environ: dict[str, str], toml: str, named: str
) -> None:
    arguments = [*argv, "--config", write(tmp_path, toml)] if toml else argv
    with pytest.raises(BadSetting, match=named):
        READER.load(arguments, environ)


def test_a_bad_value_is_not_repeated() -> None:
    with pytest.raises(BadSetting) as caught:
        READER.load([], {"KVTIDE_TEST_HTTP_PORT": "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_help_shows_every_flag_its_description_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        READER.load(["--help"], {})
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for name, text in field_docs(Settings).items():
        assert "--" + name.replace("_", "-") in shown
        assert text.split()[0] in shown
    assert "100 % free text. [default: 80]" in " ".join(shown.split())


def test_a_secret_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret \nmore\n")
    assert read_secret(tmp_path / "token", "nats_token_file", error=BadSetting) == "s3cret"


def test_an_empty_or_missing_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BadSetting, match=r"nats_token_file: .* is empty"):
        read_secret(tmp_path / "empty", "nats_token_file", error=BadSetting)
    with pytest.raises(BadSetting, match="nats_token_file: cannot read"):
        read_secret(tmp_path / "missing", "nats_token_file", error=BadSetting)


@pytest.mark.parametrize("value", ["", "a.b", "a>", "*", "a b", "a" * 65, "a\n"])
def test_a_name_that_would_leave_its_subject_is_refused(value: str) -> None:
    with pytest.raises(BadSetting, match="tenant is"):
        check_subject_token(value, "tenant", error=BadSetting)
    check_subject_token("A-z_9", "tenant", error=BadSetting)


def test_a_brokers_url_has_a_scheme_of_nats() -> None:
    for url in ("nats://a:1", "tls://a", "ws://a", "wss://a"):
        check_broker_url(url, "nats_url", error=BadSetting)
    for url in ("http://a", "localhost", ""):
        with pytest.raises(BadSetting, match="nats_url is"):
            check_broker_url(url, "nats_url", error=BadSetting)
