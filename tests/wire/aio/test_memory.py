from __future__ import annotations

import asyncio

import pytest

from wire.aio import (
    ConnectionChange,
    Fault,
    FaultKind,
    MemoryBroker,
    Message,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    NothingToWaitFor,
    OnMessage,
    PermissionDenied,
    RequestTimeout,
    SendError,
    TransportClosed,
    run_in_virtual_time,
)


async def collect(broker: MemoryBroker, count: int) -> list[bytes]:
    """Publish numbers from one connection; return what the other got, with time to come."""
    left, right = broker.connect(), broker.connect()
    inbox: list[Message] = []
    await right.subscribe("x", inbox.append)
    for number in range(count):
        try:
            await left.publish("x", b"%d" % number)
        except SendError:
            await asyncio.sleep(1.0)
    await asyncio.sleep(10.0)
    return [message.data for message in inbox]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FaultKind.FAIL, [b"0", b"2", b"3"]),
        (FaultKind.DROP, [b"0", b"2", b"3"]),
        (FaultKind.DELAY, [b"0", b"1", b"2", b"3"]),
        (FaultKind.DUPLICATE, [b"0", b"1", b"1", b"2", b"3"]),
        (FaultKind.REORDER, [b"0", b"2", b"3", b"1"]),
        (FaultKind.CORRUPT, [b"0", b"?", b"2", b"3"]),
        # What is under way goes down with the connection.
        (FaultKind.DISCONNECT, [b"2", b"3"]),
        (FaultKind.RESTART, [b"2", b"3"]),
    ],
)
def test_each_fault_does_what_it_says(kind: FaultKind, expected: list[bytes]) -> None:
    broker = MemoryBroker(latency_s=0.05, faults=[Fault(kind, at=3)])
    got = run_in_virtual_time(collect(broker, 4))
    if kind is FaultKind.CORRUPT:
        assert len(got[1]) == 1
        assert got[1] != b"1"
        got[1] = b"?"
    assert got == expected


def test_the_same_seed_gives_the_same_run() -> None:
    from wire.aio import Noise

    noise = Noise(drop=0.2, duplicate=0.2, reorder=0.2, delay=0.2)
    runs = [
        run_in_virtual_time(collect(MemoryBroker(seed=seed, latency_s=0.01, noise=noise), 50))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_rate_and_latency_take_their_time() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        broker = MemoryBroker(latency_s=0.5, bytes_per_s=1000.0)
        left, right = broker.connect(), broker.connect()
        times: list[float] = []
        await right.subscribe("x", lambda _: times.append(loop.time()))
        await left.publish("x", bytes(2000))
        await left.publish("x", bytes(1000))
        await asyncio.sleep(10.0)
        assert times == pytest.approx([2.5, 3.5])

    run_in_virtual_time(run())


def note(seen: list[str], name: str) -> OnMessage:
    return lambda _: seen.append(name)


def test_wildcards_and_queue_groups() -> None:
    async def run() -> None:
        broker = MemoryBroker()
        left, right = broker.connect(), broker.connect()
        seen: list[str] = []
        for pattern in ("a.*", "a.>", "a.b", "*.b", "b.>"):
            await right.subscribe(pattern, note(seen, pattern))
        group: list[str] = []
        for member in range(3):
            await right.subscribe("a.b", note(group, f"member {member}"), queue="g")
        await left.publish("a.b", b"")
        await left.publish("a.b.c", b"")
        await left.publish("b", b"")
        await asyncio.sleep(1.0)
        assert seen == ["a.*", "a.>", "a.b", "*.b", "a.>"]
        assert len(group) == 1

    run_in_virtual_time(run())


def test_errors_are_those_of_the_real_transport() -> None:
    async def run() -> None:
        broker = MemoryBroker(max_payload=100)
        left, right = broker.connect(denied=["secret.>"]), broker.connect()
        with pytest.raises(NoResponders):
            await left.request("nobody", b"", timeout_s=1.0)
        await right.subscribe("deaf", lambda _: None)
        with pytest.raises(RequestTimeout):
            await left.request("deaf", b"", timeout_s=1.0)
        with pytest.raises(MessageTooLarge):
            await left.publish("x", bytes(101))
        changes: list[ConnectionChange] = []
        unwatch = left.watch(changes.append)
        left.disconnect()
        with pytest.raises(NotConnected):
            await left.publish("x", b"")
        left.reconnect()
        assert changes == [ConnectionChange.DOWN, ConnectionChange.UP]
        assert await left.ping(timeout_s=1.0) == 0.0
        with pytest.raises(PermissionDenied):
            await left.subscribe("secret.x", lambda _: None)
        assert isinstance(left.failure, PermissionDenied)
        assert changes[-1] is ConnectionChange.FAILED
        unwatch()
        await right.close()
        with pytest.raises(TransportClosed):
            await right.publish("x", b"")

    run_in_virtual_time(run())


def test_virtual_time_jumps_and_a_hang_is_an_error() -> None:
    async def sleep_long() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(sleep_long()) == 1e6

    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingToWaitFor):
        run_in_virtual_time(hang())
