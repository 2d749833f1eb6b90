from __future__ import annotations

import io

from scenarios.progress import TerminalProgress


def test_without_a_terminal_each_stage_of_an_ingest_is_said_once() -> None:
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    for chunk in range(3):
        for stage in ("encode", "store"):
            progress.ingest("doc", stage, chunk, 3)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert len(set(lines)) == 2
