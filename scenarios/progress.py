"""Progress on the terminal: one bar per ingest stage, one over all requests.

Must not know: what a scenario does.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

from scenarios.client import Ask
from scenarios.results import RequestRecord

_STAGE_NAMES = {
    "tokenize": "tokenizing",
    "prefill": "prefilling at the edge",
    "encode": "encoding",
    "store": "storing",
}


class TerminalProgress:
    """Bars on a stream; where it is no terminal, a line per step."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm[Any] | None = None
        self._bar_name = ""
        self._requests: tqdm[Any] | None = None
        self._said: set[str] = set()

    def stage(self, name: str) -> None:
        """Say what begins."""
        self._close_bar()
        self._close_requests()
        self._write(name)

    def ingest(self, context: str, stage: str, done: int, total: int) -> None:
        """Move the bar of an ingest's stage."""
        name = f"{context}: {_STAGE_NAMES.get(stage, stage)}"
        if name != self._bar_name:
            self._close_bar()
            self._bar_name = name
            self._bar = self._new_bar(name, total)
            # Chunks pass through the stages in turn: without a terminal each is said once.
            if not self._stream.isatty() and name not in self._said:
                self._said.add(name)
                self._write(name)
        if self._bar is not None:
            self._bar.total = total
            self._bar.n = min(done, total)
            self._bar.refresh()

    def requests(self, total: int) -> None:
        """Open the bar over all requests."""
        self._close_bar()
        self._requests = self._new_bar("requests", total)

    def asking(self, request: Ask) -> None:
        """Show which request runs."""
        if self._requests is not None:
            self._requests.set_postfix_str(f"{request.policy} runs")

    def answered(self, record: RequestRecord) -> None:
        """Count a request and say how it went."""
        if record.ttft_s is None:
            outcome = f"no first token: {record.error}"
        else:
            outcome = (
                f"first token after {record.ttft_s:.2f} s, {record.bytes_sent / 1e6:.1f} MB sent"
            )
        self._write(f"  {record.policy}: {outcome}")
        if self._requests is not None:
            self._requests.update()

    def close(self) -> None:
        """Take the bars away."""
        self._close_bar()
        self._close_requests()

    def _new_bar(self, name: str, total: int) -> tqdm[Any]:
        bar: tqdm[Any] = tqdm(
            desc=name,
            total=total,
            file=self._stream,
            leave=False,
            mininterval=0.5,
            disable=not self._stream.isatty(),
            bar_format="{desc} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {postfix}",
        )
        return bar

    def _write(self, line: str) -> None:
        tqdm.write(line, file=self._stream)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._bar_name = None, ""

    def _close_requests(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None


class SilentProgress:
    """Says nothing."""

    def stage(self, name: str) -> None: ...

    def ingest(self, context: str, stage: str, done: int, total: int) -> None: ...

    def requests(self, total: int) -> None: ...

    def asking(self, request: Ask) -> None: ...

    def answered(self, record: RequestRecord) -> None: ...

    def close(self) -> None: ...
