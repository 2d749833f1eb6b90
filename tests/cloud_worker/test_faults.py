"""One request while the Nth thing that happens on the broker goes wrong, for many N and kinds."""

from __future__ import annotations

import pytest

from cloud_worker.executors import Executors
from codec import Codec
from engine import TorchEngine
from tests.cloud_worker.agent import Agent, exact_answer
from tests.cloud_worker.bench import Bench, answer, until
from wire import Done, Failed, RemoteProtocolError
from wire.aio import Transport, TransportError
from wire.aio.faults import Fault, FaultKind, Noise
from wire.aio.memory import MemoryBroker

OPEN_OPERATIONS = 6
"""Inbox, request, both subjects and the accept: one of these lost, and the agent has to ask again."""
STRIDE = 5
"""Every operation is hit by one of the kinds, not each by all: a run that waits for a resend takes a
second of real time, because the model runs in real threads."""


async def one_request(
    engine: TorchEngine, codec: Codec, executors: Executors, broker: MemoryBroker
) -> tuple[str, int]:
    """Run one request; return what came of it and how many operations it took."""

    async def dial() -> Transport:
        return broker.connect()

    bench = Bench(engine, codec, executors, dial)
    agent: Agent | None = None
    try:
        worker = await bench.worker(session_idle_timeout_s=1.5)
        agent = await bench.agent()
        connected = agent

        def on_change(_change: object) -> None:
            connected.on_connection(is_up=connected.is_connected)

        for transport in (agent.data, agent.control):
            transport.watch(on_change)
        result = await answer(agent, (0,))
        assert isinstance(result, Done | Failed)
        outcome = "done" if isinstance(result, Done) else f"failed: {result.sentence}"
    except (TransportError, RemoteProtocolError) as error:
        outcome = f"error: {error}"
    num_operations = broker.num_operations
    if outcome == "done":
        assert agent is not None
        assert agent.tokens() == exact_answer(engine)
    broker.noise = Noise()
    # Whatever happened: the worker must come to rest by itself, with nothing held.
    await until(lambda: not worker.budget.reserved_bytes, within_s=10)
    await bench.close()
    assert worker.num_sessions == 0
    return outcome, num_operations


@pytest.mark.parametrize("kind", list(FaultKind))
async def test_one_fault_behind_the_opening_costs_time_only_and_before_it_is_a_clear_error(
    engine: TorchEngine, codec: Codec, executors: Executors, kind: FaultKind
) -> None:
    _, num_operations = await one_request(engine, codec, executors, MemoryBroker())
    # Operation 1 is the worker joining its queue group; a program that cannot do that does not start.
    first = 2 + list(FaultKind).index(kind)
    for number in range(first, num_operations + 1, STRIDE):
        broker = MemoryBroker(seed=number, faults=[Fault(kind, number, delay_s=0.05)])
        outcome, _ = await one_request(engine, codec, executors, broker)
        may_fail = number <= OPEN_OPERATIONS and outcome.startswith("error: ")
        assert outcome == "done" or may_fail, (number, outcome)


@pytest.mark.parametrize("seed", range(4))
async def test_a_noisy_broker_only_takes_longer(
    engine: TorchEngine, codec: Codec, executors: Executors, seed: int
) -> None:
    noise = Noise(drop=0.03, duplicate=0.05, reorder=0.05, delay=0.05, corrupt=0.03, delay_s=0.05)
    broker = MemoryBroker(seed=seed)

    async def dial() -> Transport:
        return broker.connect()

    bench = Bench(engine, codec, executors, dial)
    worker = await bench.worker()
    agent = await bench.agent()
    await agent.open()
    broker.noise = noise
    agent.ask()
    agent.recompute(1)
    agent.send(0)
    agent.send(2)
    assert isinstance(await agent.run(), Done)
    assert agent.tokens() == exact_answer(engine)
    broker.noise = Noise()
    await agent.flush()
    await until(lambda: not worker.budget.reserved_bytes, within_s=10)
    await bench.close()
