"""Whole requests over the broker in memory, in virtual time, with one thing after another going wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests.wire.shells import (
    AgentShell,
    SessionEndedError,
    WorkerShell,
    expected_answer,
    make_payloads,
)
from wire import WireError
from wire.aio import (
    Fault,
    FaultKind,
    MemoryBroker,
    Noise,
    run_in_virtual_time,
)

SIZES = (150_000, 40_000, 1, 60_000)
PAYLOADS = make_payloads(SIZES, seed=5)
ANSWER = expected_answer(PAYLOADS, range(10 * len(SIZES)), (1, 2, 3), num_tokens=8)
TEXT_CHUNK = 2
LATENCY_S = 0.02
BYTES_PER_S = 2.5e6
GIVE_UP_S = 120.0
"""Longer than any timeout of the protocol: what is not over by then hangs."""


async def one_request(broker: MemoryBroker) -> tuple[AgentShell, WorkerShell]:
    """Run one request to its end; afterwards the worker must hold nothing and no task may be left."""
    worker = WorkerShell(
        broker.connect(), broker.connect(), texts={TEXT_CHUNK: PAYLOADS[TEXT_CHUNK]}
    )
    agent = AgentShell(
        broker.connect(),
        broker.connect(inbox="_INBOX.agent"),
        PAYLOADS,
        abort_first=True,
        recompute=frozenset({TEXT_CHUNK}),
    )
    before = asyncio.all_tasks()
    try:
        await worker.start()
        async with asyncio.timeout(GIVE_UP_S):
            answer = await agent.run()
        assert answer == ANSWER
    finally:
        # Longer than the worker's patience with an agent that it does not hear any more.
        await asyncio.sleep(GIVE_UP_S)
        assert not worker.sessions
        await worker.close()
        assert asyncio.all_tasks() == before
    return agent, worker


def outcome(broker: MemoryBroker) -> str:
    """``answered``, or the name of the typed error."""
    try:
        run_in_virtual_time(one_request(broker))
    except (WireError, SessionEndedError) as error:
        return type(error).__name__
    return "answered"


def new_broker(
    *faults: Fault, noise: Noise | None = None, seed: int = 0, max_payload: int = 1 << 20
) -> MemoryBroker:
    return MemoryBroker(
        seed=seed,
        latency_s=LATENCY_S,
        bytes_per_s=BYTES_PER_S,
        faults=faults,
        noise=noise,
        max_payload=max_payload,
    )


def test_without_faults_nothing_is_sent_twice() -> None:
    async def run() -> None:
        agent, worker = await one_request(new_broker())
        assert agent.session is not None
        assert agent.session.num_bytes_resent == 0
        assert worker.endings == []

    run_in_virtual_time(run())


@pytest.mark.parametrize("kind", list(FaultKind), ids=lambda kind: kind.value)
def test_the_nth_operation_fails_for_every_n(kind: FaultKind) -> None:
    outcomes: dict[str, int] = {}
    operation = 0
    while True:
        operation += 1
        broker = new_broker(Fault(kind, operation))
        result = outcome(broker)
        outcomes[result] = outcomes.get(result, 0) + 1
        if broker.num_operations < operation:
            break
    assert operation > 50
    # The three subscriptions and the claim come before there is a session that could mend anything.
    num_before = 7
    assert outcomes.pop("answered") >= operation - num_before
    assert set(outcomes) <= {"SendError", "NotConnected", "RequestTimeout", "FrameError"}


@pytest.mark.parametrize("outage_s", [0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("kind", [FaultKind.DISCONNECT, FaultKind.RESTART])
def test_outages_up_to_half_a_minute_are_lived_through(kind: FaultKind, outage_s: float) -> None:
    # From the first frame after the claim on: before it the worker does not know of a live agent.
    for operation in range(8, 90, 6):
        assert outcome(new_broker(Fault(kind, operation, delay_s=outage_s))) == "answered"


@pytest.mark.parametrize("kind", [FaultKind.DISCONNECT, FaultKind.RESTART])
def test_an_outage_costs_at_most_a_window(kind: FaultKind) -> None:
    async def run(operation: int) -> None:
        agent, _ = await one_request(new_broker(Fault(kind, operation)))
        assert agent.session is not None
        # Window: 1.25 x 2.5 MB/s x 40 ms + 2 x 32 KiB, and at least 4 segments.
        window = max(4 * 32 * 1024, int(1.3 * BYTES_PER_S * 2 * LATENCY_S) + 2 * 32 * 1024)
        # The descriptor of a chunk counts as sent, and a lost one comes again.
        assert agent.session.num_bytes_resent <= window + 1024

    for operation in range(10, 80, 3):
        run_in_virtual_time(run(operation))


@pytest.mark.parametrize("seed", range(40))
def test_a_bad_link_only_costs_time(seed: int) -> None:
    noise = Noise(drop=0.03, duplicate=0.05, reorder=0.05, delay=0.05, corrupt=0.02)

    async def run() -> None:
        broker = new_broker(seed=seed)
        worker = WorkerShell(broker.connect(), broker.connect(), decode_s=0.05)
        agent = AgentShell(
            broker.connect(), broker.connect(inbox="_INBOX.agent"), PAYLOADS, abort_first=True
        )
        await worker.start()

        def accepted(_event: object) -> None:
            # The claim is a single question and answer; whether it is asked again is the shell's.
            broker.noise = noise

        agent.on_event = accepted
        async with asyncio.timeout(GIVE_UP_S):
            assert await agent.run() == ANSWER
        broker.noise = Noise()
        await asyncio.sleep(GIVE_UP_S)
        assert not worker.sessions
        await worker.close()

    run_in_virtual_time(run())


def test_a_slow_decoder_holds_the_sender_back() -> None:
    async def run() -> None:
        broker = new_broker()
        worker = WorkerShell(broker.connect(), broker.connect(), decode_s=1.0, window_bytes=180_000)
        agent = AgentShell(broker.connect(), broker.connect(inbox="_INBOX.agent"), PAYLOADS)
        await worker.start()
        assert await agent.run() == ANSWER
        assert worker.max_held_bytes <= 180_000
        await worker.close()

    run_in_virtual_time(run())


@pytest.mark.parametrize("cancel_at_s", [0.0, 0.01, 0.03, 0.05, 0.08, 0.11, 0.14])
def test_cancelling_at_any_time_frees_the_worker_within_a_heartbeat(cancel_at_s: float) -> None:
    async def run() -> None:
        broker = new_broker()
        worker = WorkerShell(broker.connect(), broker.connect())
        agent = AgentShell(broker.connect(), broker.connect(inbox="_INBOX.agent"), PAYLOADS)
        await worker.start()
        task = asyncio.create_task(agent.run())
        await asyncio.sleep(cancel_at_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        session = agent.session
        was_accepted = session is not None and session.accept is not None
        # An agent that leaves before it heard the worker's yes cannot tell it; that costs more.
        await asyncio.sleep(1.0 if was_accepted else 6.0)
        assert not worker.sessions
        await worker.close()

    run_in_virtual_time(run())


def test_a_dead_worker_is_noticed_and_another_one_answers() -> None:
    async def run() -> None:
        broker = new_broker()
        first = WorkerShell(broker.connect(), broker.connect(), worker="w-1")
        second = WorkerShell(broker.connect(), broker.connect(), worker="w-2")
        data, control = broker.connect(), broker.connect(inbox="_INBOX.agent")
        await first.start()
        agent = AgentShell(data, control, PAYLOADS, peer_timeout_s=3.0)
        task = asyncio.create_task(agent.run())
        await asyncio.sleep(0.15)
        assert first.sessions
        await first.close()
        for transport in (first.data, first.control):
            await transport.close()
        died_at_s = asyncio.get_running_loop().time()
        await second.start()
        with pytest.raises(SessionEndedError, match="PeerLost"):
            await task
        assert asyncio.get_running_loop().time() - died_at_s <= 3.2
        assert await agent.run() == ANSWER
        assert agent.worker_ids == ["w-1", "w-2"]
        await second.close()

    run_in_virtual_time(run())


def test_a_frozen_worker_that_wakes_up_does_no_harm() -> None:
    async def run() -> None:
        broker = new_broker()
        first = WorkerShell(broker.connect(), broker.connect(), worker="w-1")
        second = WorkerShell(broker.connect(), broker.connect(), worker="w-2")
        agent = AgentShell(
            broker.connect(),
            broker.connect(inbox="_INBOX.agent"),
            PAYLOADS,
            peer_timeout_s=3.0,
            claim_timeout_s=0.2,
            num_claims=20,
        )
        await first.start()
        task = asyncio.create_task(agent.run())
        await asyncio.sleep(0.15)
        for transport in (first.data, first.control):
            transport.freeze()  # type: ignore[attr-defined] # the one in memory
        await second.start()
        with pytest.raises(SessionEndedError, match="PeerLost"):
            await task
        # The broker still hands claims to the frozen one.
        running = asyncio.create_task(agent.run())
        await asyncio.sleep(0.1)
        for transport in (first.data, first.control):
            transport.thaw()  # type: ignore[attr-defined]
        # Whichever took the claim: the one that woke up has old frames of both sessions by now.
        assert await running == ANSWER
        await asyncio.sleep(GIVE_UP_S)
        assert not first.sessions
        assert not second.sessions
        await first.close()
        await second.close()

    run_in_virtual_time(run())


def test_many_requests_at_once_stay_apart() -> None:
    async def run() -> None:
        broker = new_broker(seed=3)
        workers = [
            WorkerShell(broker.connect(), broker.connect(), worker=f"w-{index}")
            for index in range(2)
        ]
        for worker in workers:
            await worker.start()
        agents = []
        for index in range(30):
            payloads = make_payloads((50_000, 20_000 + index), seed=index)
            control = broker.connect(inbox=f"_INBOX.agent-{index}")
            agents.append(AgentShell(broker.connect(), control, payloads, seed=index))
        answers = await asyncio.gather(*(agent.run() for agent in agents))
        for agent, answer in zip(agents, answers, strict=True):
            assert answer == expected_answer(agent.payloads, range(20), (1, 2, 3), num_tokens=8)
        assert {agent.worker_ids[0] for agent in agents} == {"w-0", "w-1"}
        for worker in workers:
            await worker.close()

    run_in_virtual_time(run())
