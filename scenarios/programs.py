"""Starting and stopping the programs of a scenario.

Invariants: a program that was started is ended when its block is left, however it is left (SIGTERM, then
SIGKILL for its whole group); one that does not come up ends in a `ReplayError` with the last lines of
its log. Must not know: what the programs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from scenarios.errors import ReplayError

TAIL_LINES = 8
"""Lines of a log in an error message."""
_HOME = Path(__file__).resolve().parent.parent
"""Programs are started here, so that a checkout that is not installed finds its own rooms."""
_OWN_SETTINGS = ("KVTIDE_EDGE_", "KVTIDE_WORKER_")
"""Settings of the surrounding shell must not reach a scenario's programs."""


@dataclass(frozen=True, slots=True)
class Commands:
    """How the two programs are started; tests put others in their place."""

    agent: tuple[str, ...] = (sys.executable, "-m", "edge_agent")
    worker: tuple[str, ...] = (sys.executable, "-m", "cloud_worker")


@dataclass(eq=False, slots=True)
class Program:
    """One running program."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path
    listening: asyncio.Future[int]
    """The port that it chose."""
    port: int = 0
    tail: list[str] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        """Address of its HTTP server."""
        return f"http://127.0.0.1:{self.port}"

    def last_words(self) -> str:
        """Return what it said last, for an error message."""
        return "; ".join(_readable(line) for line in self.tail[-TAIL_LINES:]) or "it wrote nothing"


@contextlib.asynccontextmanager
async def running(
    name: str,
    command: Sequence[str],
    settings: Mapping[str, Any],
    *,
    folder: Path,
    ready_timeout_s: float,
    stop_timeout_s: float = 10.0,
) -> AsyncIterator[Program]:
    """Run a program with a settings file, from when it listens until the block is left.

    Args:
        name: names its files and messages.
        command: how it is started; `--config FILE` is appended.
        settings: written as TOML.
        folder: where settings file and log go.
        ready_timeout_s: time to print the line that says which port it listens on.
        stop_timeout_s: time to end after SIGTERM.

    Raises:
        ReplayError: it ended or did not listen in time.
    """
    config_path = folder / f"{name}.toml"
    config_path.write_text(
        "".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()), encoding="utf-8"
    )
    log_path = folder / f"{name}.log"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_OWN_SETTINGS)}
    environ["PYTHONUNBUFFERED"] = "1"
    process = await asyncio.create_subprocess_exec(
        *command,
        "--config",
        str(config_path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environ,
        cwd=_HOME,
        start_new_session=True,  # Ctrl-C reaches us alone; we end the programs in order
        limit=2**20,
    )
    loop = asyncio.get_running_loop()
    program = Program(name, process, log_path, loop.create_future())
    reader = asyncio.create_task(_read_log(program))
    try:
        try:
            async with asyncio.timeout(ready_timeout_s):
                program.port = await program.listening
        except TimeoutError:
            problem = f"{name} did not listen within {ready_timeout_s:g} s"
            raise ReplayError(f"{problem}: {program.last_words()}") from None
        yield program
    finally:
        await end(program, timeout_s=stop_timeout_s)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def end(program: Program, *, timeout_s: float, number: int = signal.SIGTERM) -> None:
    """End a program and everything that it started; does nothing to one that has ended."""
    if program.process.returncode is not None:
        return
    _signal_group(program, number)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(program.process.wait())
    except (TimeoutError, asyncio.CancelledError) as error:
        _signal_group(program, signal.SIGKILL)
        await asyncio.shield(program.process.wait())
        if isinstance(error, asyncio.CancelledError):
            raise


async def has_ended(program: Program, *, grace_s: float = 1.0) -> bool:
    """Return whether a program has ended, or ends within a moment: its connections break first."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(program.process.wait(), grace_s)
    return program.process.returncode is not None


def _signal_group(program: Program, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.process.pid, number)


async def wait_ready(
    program: Program, http: aiohttp.ClientSession, *, timeout_s: float, want: str | None = None
) -> None:
    """Wait until a program's `/readyz` says 200.

    Args:
        program: the program.
        http: a client.
        timeout_s: how long.
        want: a condition in the answer that must be true besides.

    Raises:
        ReplayError: it ended, or was not ready in time.
    """
    said = "nothing"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if program.process.returncode is not None:
                    code = program.process.returncode
                    raise ReplayError(
                        f"{program.name} ended with exit code {code}: {program.last_words()}"
                    )
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{program.base_url}/readyz") as response:
                        said = (await response.text())[:200]
                        if response.status == 200 and (
                            want is None or json.loads(said).get(want, True)
                        ):
                            return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ReplayError(
            f"{program.name} was not ready within {timeout_s:g} s; it said {said}; {program.last_words()}"
        ) from None


async def _read_log(program: Program) -> None:
    """Copy the program's output to its log file and look for the line with the port."""
    assert program.process.stdout is not None
    with program.log_path.open("wb") as log:
        while True:
            try:
                line = await program.process.stdout.readline()
            except ValueError:  # longer than the limit; its rest follows as further lines
                continue
            if not line:
                break
            log.write(line)
            log.flush()
            text = line.decode("utf-8", "replace").rstrip()
            program.tail = [*program.tail[-(TAIL_LINES * 2) :], text]
            if not program.listening.done():
                port = _listening_port(text)
                if port is not None:
                    program.listening.set_result(port)
    code = await program.process.wait()
    if not program.listening.done():
        program.listening.set_exception(
            ReplayError(f"{program.name} ended with exit code {code}: {program.last_words()}")
        )


def _listening_port(line: str) -> int | None:
    if '"port"' not in line:
        return None
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return None
    if isinstance(fields, dict) and str(fields.get("event", "")).endswith("listening"):
        port = fields.get("port")
        return port if isinstance(port, int) else None
    return None


def _readable(line: str) -> str:
    """Shorten a JSON log line to its event and error."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return line[:300]
    if not isinstance(fields, dict):
        return line[:300]
    kept = {k: v for k, v in fields.items() if k in ("event", "error", "message", "exception")}
    return json.dumps(kept, ensure_ascii=False)[:600]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Path | str):
        return json.dumps(str(value))  # JSON's escapes are TOML's
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} cannot be a setting")
