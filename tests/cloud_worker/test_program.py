"""The worker as a process: start, serve, drain, and every way to fail at start."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from cloud_worker.cli import main
from wire.aio import NatsServer

pytestmark = pytest.mark.nats

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Keep the program's logging set-up out of other tests."""
    root = logging.getLogger()
    handlers, level, own = root.handlers, root.level, logging.getLogger("kvtide").level
    yield
    root.handlers, root.level = handlers, level
    logging.getLogger("kvtide").setLevel(own)
    structlog.reset_defaults()


@pytest.fixture
def settings(server: NatsServer, tiny_model_dir: Path, tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text(server.token)
    return {
        "model": str(tiny_model_dir),
        "nats_url": server.url,
        "nats_token_file": str(token),
        "http_port": "0",
        "num_threads": "1",
        "cache_dir": str(tmp_path / "cache"),
        "connect_timeout_s": "5",
    }


@asynccontextmanager
async def program(settings: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVTIDE_")}
    environ |= {f"KVTIDE_WORKER_{key.upper()}": value for key, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cloud_worker",
        cwd=REPO,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def event(process: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    """Read log lines until an event comes."""
    assert process.stdout is not None
    async with asyncio.timeout(90):
        while line := await process.stdout.readline():
            record: dict[str, Any] = json.loads(line)
            if record["event"] == name:
                return record
    raise AssertionError(f"the worker ended without {name}")


async def status(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as response,
    ):
        return response.status, await response.text()


async def test_the_worker_becomes_ready_and_sigterm_ends_it_with_0(
    settings: dict[str, str],
) -> None:
    async with program(settings) as process:
        port = (await event(process, "listening"))["port"]
        assert (await status(port, "/healthz"))[0] == 200
        ready = await event(process, "ready")
        assert {"fp16", "int8"} <= set(ready["levels"])
        assert (await status(port, "/readyz"))[0] == 200
        assert "kvtide_worker_memory_budget_bytes" in (await status(port, "/metrics"))[1]
        process.send_signal(signal.SIGTERM)
        await event(process, "stopped")
        assert await process.wait() == 0


async def test_a_stop_while_the_model_loads_ends_with_0(settings: dict[str, str]) -> None:
    async with program(settings) as process:
        await event(process, "listening")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0


def run_here(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the program in this process: it fails at start, so nothing of it stays."""
    for key, value in settings.items():
        monkeypatch.setenv(f"KVTIDE_WORKER_{key.upper()}", value)
    return main([])


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"tennant": "x"}, 2, "KVTIDE_WORKER_TENNANT"),
        ({"nats_url": "nats://127.0.0.1:9", "connect_timeout_s": "0.5"}, 4, "127.0.0.1:9"),
        ({"model": "/no/such/folder"}, 5, "/no/such/folder"),
        ({"profiles": "/no/such/file.kvprofile"}, 5, "/no/such/file.kvprofile"),
        ({"device": "abacus"}, 5, "abacus"),
    ],
)
def test_a_worker_that_cannot_start_says_why_and_exits(
    settings: dict[str, str],
    change: dict[str, str],
    code: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(settings | change, monkeypatch) == code
    errors = capsys.readouterr().err
    assert named in errors
    assert "Traceback" not in errors


def test_a_busy_port_is_named_and_exits_with_3(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_here(settings | {"http_port": port}, monkeypatch) == 3
    assert port in capsys.readouterr().err


def test_a_wrong_broker_token_exits_with_4_and_is_not_shown(
    settings: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    assert run_here(settings | {"nats_token_file": str(wrong)}, monkeypatch) == 4
    shown = capsys.readouterr()
    assert "guess" not in shown.err + shown.out
