"""A three-node cluster of the template in ``infra/nats``, with nodes that die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.wire.aio.templates import (
    AGENT_LOGIN,
    WORKER_LOGIN,
    make_certificate,
    render_users,
    settings_of,
)
from tests.wire.shells import AgentShell, WorkerShell, expected_answer, make_payloads
from wire import Delivered, agent_inbox
from wire.aio import ConnectionChange, NatsServer, NatsTransport, NoResponders

pytestmark = pytest.mark.nats

WAIT_S = 20.0
PAYLOADS = make_payloads((4_000_000, 6_000_000, 3_000_000), seed=4)
ANSWER = expected_answer(PAYLOADS, range(30), (1, 2, 3), num_tokens=8)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NatsServer]]:
    values = make_certificate(tmp_path)
    with ExitStack() as stack:
        nodes: list[NatsServer] = []
        for index in range(3):
            routes = [f'"nats-route://127.0.0.1:{node.cluster_port}"' for node in nodes]
            settings = settings_of(
                "cluster.conf",
                values | {"CLUSTER_LISTEN": "127.0.0.1:-1", "ROUTES": ", ".join(routes)},
                users=render_users("clinic"),
            )
            nodes.append(
                stack.enter_context(NatsServer(settings=settings, token="", name=f"n{index}"))
            )
        yield nodes


@pytest.fixture
def ca_file(tmp_path: Path, nodes: list[NatsServer]) -> Path:
    assert nodes
    return tmp_path / "cert.pem"


async def connect(
    node: NatsServer, ca_file: Path, login: tuple[str, str], *, inbox: str = ""
) -> NatsTransport:
    """Connect to one node; the others become known through it, and the login holds there too."""
    user, password = login
    url = f"nats://{user}-clinic:{password}@127.0.0.1:{node.port}"
    return await NatsTransport.connect(url, inbox=inbox, ca_file=ca_file, timeout_s=WAIT_S)


@pytest.mark.parametrize("victims", ["the agent's", "the worker's", "both, one after the other"])
async def test_a_request_outlives_a_node(
    nodes: list[NatsServer], ca_file: Path, victims: str
) -> None:
    left, right, _ = nodes
    inbox = agent_inbox("clinic", "a")
    data = await connect(left, ca_file, AGENT_LOGIN, inbox=inbox)
    control = await connect(left, ca_file, AGENT_LOGIN, inbox=inbox)
    worker_data = await connect(right, ca_file, WORKER_LOGIN)
    worker_control = await connect(right, ca_file, WORKER_LOGIN)
    worker = WorkerShell(worker_data, worker_control, window_bytes=7 << 20)
    await worker.start()
    agent = AgentShell(data, control, PAYLOADS, claim_timeout_s=0.5, num_claims=20)
    to_kill = {"the agent's": [left], "the worker's": [right]}.get(victims, [left, right])
    killing: list[asyncio.Task[None]] = []
    stalls_s: list[float] = []
    last_s = time.monotonic()

    async def kill(node: NatsServer) -> None:
        node.kill()

    def watch(event: object) -> None:
        nonlocal last_s
        if not isinstance(event, Delivered):
            return
        now_s = time.monotonic()
        stalls_s.append(now_s - last_s)
        last_s = now_s
        assert agent.session is not None
        step = sum(map(len, PAYLOADS)) // (len(to_kill) + 1)
        if len(killing) < len(to_kill) and (
            agent.session.meter.delivered_bytes > step * (len(killing) + 1)
        ):
            killing.append(asyncio.create_task(kill(to_kill[len(killing)])))

    agent.on_event = watch
    # The nodes' routes carry interest a moment after a subscription; a claim may come before it.
    answer = await claim_and_run(agent)
    assert answer == ANSWER
    assert len(killing) == len(to_kill)
    assert agent.session is not None
    assert agent.session.num_bytes_resent <= len(to_kill) * (8 << 20)
    assert max(stalls_s) < 10
    for transport in (data, control, worker_data, worker_control):
        assert transport.failure is None
    await worker.close()
    for transport in (data, control, worker_data, worker_control):
        await transport.close()


async def claim_and_run(agent: AgentShell) -> list[int]:
    async with asyncio.timeout(60):
        while True:
            try:
                return await agent.run()
            except NoResponders:
                await asyncio.sleep(0.05)


async def test_a_node_that_is_shut_down_sends_its_clients_elsewhere(
    nodes: list[NatsServer], ca_file: Path
) -> None:
    transport = await connect(nodes[0], ca_file, AGENT_LOGIN)
    back = asyncio.Event()
    transport.watch(lambda change: back.set() if change is ConnectionChange.UP else None)
    nodes[0].terminate()
    async with asyncio.timeout(WAIT_S):
        await back.wait()
    assert transport.failure is None
    assert await transport.ping(timeout_s=WAIT_S) >= 0
    await transport.close()
