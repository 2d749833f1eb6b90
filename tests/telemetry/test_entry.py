from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from telemetry import run_program


class ProgramError(Exception):
    """Any error of the program."""


class BadSetting(ProgramError):
    """One with a code of its own."""


CODES: list[tuple[type[Exception], int]] = [(BadSetting, 2), (ProgramError, 1)]


def load(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    assert "PATH" in environ
    return " ".join(argv)


def run_raising(error: BaseException) -> int:
    def run(settings: str) -> None:
        raise error

    return run_program("kvtide-test", [], load=load, run=run, exit_codes=CODES)


def test_a_clean_stop_is_0_and_the_settings_reach_the_program() -> None:
    seen: list[str] = []
    assert run_program("p", ["a", "b"], load=load, run=seen.append, exit_codes=CODES) == 0
    assert seen == ["a b"]


def test_each_error_has_its_code_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(BadSetting("x is bad")) == 2
    assert capsys.readouterr().err == "kvtide-test: x is bad\n"
    assert run_raising(ProgramError("no")) == 1
    assert run_raising(KeyboardInterrupt()) == 130


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_raising(ZeroDivisionError())
