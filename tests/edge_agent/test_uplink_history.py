from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_agent.uplink_history import FILE_NAME, UplinkHistory


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    history = UplinkHistory(tmp_path)
    assert history.site.long_run_log is None
    history.site.observe_rate(14.0, 1.0)
    history.site.last_log = 13.5
    history.write(history.snapshot())
    again = UplinkHistory(tmp_path).site
    assert (again.long_run_log, again.last_log) == (14.0, 13.5)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}'])
def test_a_file_that_cannot_be_read_costs_only_what_it_knew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    history = UplinkHistory(tmp_path)
    assert history.site.long_run_log is None
    history.write(history.snapshot())
    assert json.loads((tmp_path / FILE_NAME).read_text())["format"] == 1


def test_a_folder_that_cannot_be_written_fails_nobody(tmp_path: Path) -> None:
    history = UplinkHistory(tmp_path / "gone")
    history.write(history.snapshot())
    assert not (tmp_path / "gone").exists()


def test_requests_that_end_at_once_leave_one_whole_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = UplinkHistory(tmp_path)
    history.site.observe_rate(14.0, 1.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(history.write, [history.snapshot()] * 200))
    assert "forgotten" not in capsys.readouterr().out
    assert UplinkHistory(tmp_path).site.long_run_log == 14.0
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
