"""A broker, a worker and an agent as real processes with the real small model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Client, Program
from wire.aio import NatsServer

MODEL = "smollm2-135m"
CHUNK_TOKENS = 200


@pytest.fixture(scope="session")
def broker() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def start_worker(broker: NatsServer, smollm2: object) -> Iterator[Callable[..., Program]]:
    """Start a worker; ``smollm2`` makes sure that the weights are there."""
    started: list[Program] = []

    def start(**flags: Any) -> Program:
        program = Program(
            "cloud_worker",
            {
                "http_port": 0,
                "nats_url": f"nats://127.0.0.1:{broker.port}",
                "model": MODEL,
                "num_threads": 1,
                "codec_threads": 1,
                **flags,
            },
            env={"KVTIDE_WORKER_NATS_TOKEN": broker.token},
        )
        started.append(program)
        return program.start()

    yield start
    for program in started:
        if program.is_running:
            program.kill()


@pytest.fixture(scope="session")
def start_agent(
    broker: NatsServer, smollm2: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(**flags: Any) -> Program:
        program = Program(
            "edge_agent",
            {
                "http_port": 0,
                "nats_url": f"nats://127.0.0.1:{broker.port}",
                "store_dir": tmp_path_factory.mktemp("store"),
                "model": MODEL,
                "num_threads": 1,
                "codec_threads": 1,
                "chunk_tokens": CHUNK_TOKENS,
                **flags,
            },
            env={"KVTIDE_EDGE_NATS_TOKEN": broker.token},
        )
        started.append(program)
        return program.start()

    yield start
    for program in started:
        if program.is_running:
            program.kill()


@pytest.fixture(scope="module")
def worker(start_worker: Callable[..., Program]) -> Program:
    return start_worker()


@pytest.fixture(scope="module")
def agent(start_agent: Callable[..., Program], worker: Program) -> Program:
    # Both load at the same time.
    program = start_agent()
    worker.wait_ready()
    return program.wait_ready()


@pytest.fixture(scope="session")
def context_text() -> str:
    """A few pages of our own: long enough for several chunks, short enough for two cores."""
    repo = Path(__file__).parents[2]
    words = (repo / "docs" / "glossary.md").read_text().split()
    note = (
        "Maintenance note. The boiler in hall four was inspected by Maria Keller on 14 May."
        " She replaced the pressure valve. The next inspection is due in November."
    )
    return note + "\n\n" + " ".join(words[:450]) + "\n\n" + note


@pytest.fixture(scope="module")
def client(agent: Program, context_text: str) -> Client:
    """An agent that has the context ``doc``."""
    client = Client(agent)
    client.ingest("doc", context_text)
    return client
