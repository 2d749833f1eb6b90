"""The program as an operator starts it: exit codes and sentences."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from edge_agent.store import ContextStore


def run(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "edge_agent", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    return done.returncode, done.stderr


def test_busy_port_is_one_sentence_and_code_3(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run("--http-port", port, "--store-dir", tmp_path)
    assert code == 3
    assert said == f"kvtide-edge: http_port: 127.0.0.1:{port} is in use by another program\n"


def test_store_in_use_is_one_sentence_and_code_4(tmp_path: Path) -> None:
    with ContextStore(tmp_path, quota_bytes=10):
        code, said = run("--http-port", 0, "--store-dir", tmp_path)
    assert code == 4
    assert said == f"kvtide-edge: the context store {tmp_path} is open in another process\n"


def test_model_that_does_not_exist_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    code, said = run("--http-port", 0, "--store-dir", tmp_path, "--model", tmp_path / "none")
    assert code == 2
    assert said.startswith("kvtide-edge: model: ")
    assert said.count("\n") == 1
