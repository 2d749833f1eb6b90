"""The programs as processes, as an operator starts them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05


class ProgramError(AssertionError):
    """A program did not do what it should; the message has the end of its output."""


class Program:
    """One process of ours: started, asked for its port, stopped or killed."""

    def __init__(self, module: str, flags: dict[str, object], *, env: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", module]
        for name, value in flags.items():
            self._command += ["--" + name.replace("_", "-"), str(value)]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.lines: list[str] = []
        self.port = 0

    def start(self) -> Self:
        """Start the process and wait for the port of its HTTP API."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            cwd=Path(__file__).parents[2],
        )
        self.port = 0
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self._wait(lambda: self.port != 0, "announce its port")
        return self

    def wait_ready(self) -> Self:
        """Wait until the program says that it is ready."""
        self._wait(self._is_ready, "become ready")
        return self

    def kill(self) -> None:
        """Kill it as ``kill -9`` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._join()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
            self._join()
            return code
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise ProgramError(f"did not stop within {STOP_TIMEOUT_S} s\n{self.tail()}") from None

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.lines[-40:])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of this event."""
        found = []
        for line in list(self.lines):
            if line.startswith("{"):
                entry = json.loads(line)
                if entry.get("event") == name:
                    found.append(entry)
        return found

    def _join(self) -> None:
        """Let the reader come to the end of the output, and close it."""
        assert self._process is not None
        if self._reader is not None:
            self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            if '"listening"' in line and "port" in line:
                self.port = json.loads(line)["port"]

    def _is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/readyz")
            status = connection.getresponse().status
            connection.close()
        except OSError:
            return False
        return status == 200

    def _wait(self, is_done: Any, what: str) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not is_done():
            if not self.is_running:
                raise ProgramError(
                    f"{self._command[2]} ended before it could {what}\n{self.tail()}"
                )
            if time.monotonic() > give_up_at:
                raise ProgramError(f"{self._command[2]} did not {what} in time\n{self.tail()}")
            time.sleep(POLL_S)


@dataclass
class Reply:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def text(self) -> str:
        """The answer's text."""
        return str(self.body["choices"][0]["message"]["content"])


@dataclass
class Client:
    """Speaks to one agent."""

    program: Program
    timeout_s: float = 120.0
    _headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    def call(self, method: str, path: str, body: object | None = None, **headers: str) -> Reply:
        """One request, one JSON answer."""
        connection = self._open(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return Reply(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            json.loads(data) if data else None,
        )

    def ingest(self, context_id: str, text: str) -> dict[str, Any]:
        """Store a context and return what is said about it."""
        reply = self.call(
            "POST", "/v1/contexts", {"id": context_id, "text": text}, Accept="application/json"
        )
        assert reply.status == 201, (reply.body, self.program.tail())
        return dict(reply.body)

    def ask(self, question: str, **fields: Any) -> Reply:
        """Ask without streaming."""
        return self.call("POST", "/v1/chat/completions", question_body(question, **fields))

    def stream(self, question: str, **fields: Any) -> Iterator[Any]:
        """Ask with streaming; yields each event, the last one is ``[DONE]``."""
        body = question_body(question, stream=True, **fields)
        connection = self._open("POST", "/v1/chat/completions", body, {})
        response = connection.getresponse()
        try:
            assert response.status == 200, response.read()
            for raw in response:
                line = raw.decode().strip()
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)
        finally:
            response.close()
            connection.close()

    def _open(
        self, method: str, path: str, body: object | None, headers: dict[str, str]
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.program.port, timeout=self.timeout_s
        )
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {**self._headers, **headers})
        return connection


def question_body(question: str, **fields: Any) -> dict[str, Any]:
    """Build the body of a chat request."""
    return {"messages": [{"role": "user", "content": question}], **fields}
