"""The proxy carries bytes unchanged, at the trace's pace, fairly, and ends cleanly.

Time-based checks compare with the model's own schedule and are one-sided where the machine may be slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from scenarios.link import LinkConfig
from scenarios.proxy import Direction, LinkProxy
from scenarios.trace import BYTES_PER_S_PER_MBPS, Trace

FAST = LinkConfig(Trace.constant(100 * BYTES_PER_S_PER_MBPS), delay_s=0.001)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve(handler: Handler) -> asyncio.Server:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    return await asyncio.start_server(run, "127.0.0.1", 0)


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    seen = hashlib.sha256()
    while data := await reader.read(65536):
        seen.update(data)
    writer.write(seen.digest())
    await writer.drain()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[LinkProxy], Awaitable[Stream]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Open connections to a proxy that are closed for good at the end of the test."""
    writers: list[asyncio.StreamWriter] = []

    async def open_one(proxy: LinkProxy) -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
async def echo_server() -> AsyncIterator[int]:
    server = await serve(echo)
    yield port_of(server)
    server.close()


async def started(port: int, *, up: LinkConfig = FAST, down: LinkConfig = FAST) -> LinkProxy:
    proxy = LinkProxy(up=up, down=down, target_host="127.0.0.1", target_port=port)
    await proxy.start()
    return proxy


async def test_bytes_come_back_unchanged_through_both_directions(
    echo_server: int, connect: Connect
) -> None:
    proxy = await started(echo_server)
    sent = random.Random(1).randbytes(300_000)
    reader, writer = await connect(proxy)
    writer.write(sent)
    writer.write_eof()
    assert await reader.read() == sent
    assert sum(proxy.carried_bytes(Direction.UP)) == len(sent)
    assert sum(proxy.carried_bytes(Direction.DOWN)) == len(sent)
    assert await proxy.drained(timeout_s=5)
    await proxy.stop()


@pytest.mark.parametrize("rate_mbps", [2.0, 20.0])
async def test_transfer_takes_the_time_of_the_model(rate_mbps: float, connect: Connect) -> None:
    server = await serve(digest)
    rate = rate_mbps * BYTES_PER_S_PER_MBPS
    up = LinkConfig(Trace.constant(rate), delay_s=0.02)
    proxy = await started(port_of(server), up=up)
    loop = asyncio.get_running_loop()
    sent = bytes(int(rate * 0.6))
    reader, writer = await connect(proxy)
    begin = loop.time()
    writer.write(sent)
    writer.write_eof()
    assert await reader.read() == hashlib.sha256(sent).digest()
    took_s = loop.time() - begin
    ideal_s = len(sent) / rate + 0.02 + 0.001
    assert took_s >= ideal_s * 0.999  # never faster than the link
    assert took_s <= ideal_s * 1.5  # a machine under load may be late; unloaded it is within 1 %
    await proxy.stop()
    server.close()


async def test_restarted_trace_begins_at_its_offset(echo_server: int, connect: Connect) -> None:
    trace = Trace("silent after 0.2 s", (0.0, 0.2), (1e6, 0.0), 1000.0)
    proxy = await started(echo_server, up=LinkConfig(trace, delay_s=0.0))
    reader, writer = await connect(proxy)
    for _ in range(2):
        proxy.restart_trace(0.2)
        writer.write(b"x" * 100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.readexactly(100)
        proxy.restart_trace(0.0)  # what waited in the queue goes now
        async with asyncio.timeout(5):
            await reader.readexactly(100)
    await proxy.stop()


async def test_changed_uplink_sets_the_pace_from_then_on(
    echo_server: int, connect: Connect
) -> None:
    silent = Trace("silent after 0.1 s", (0.0, 0.1), (1e6, 0.0), 1000.0)
    proxy = await started(echo_server, up=LinkConfig(silent, delay_s=0.0, offset_s=0.2))
    reader, writer = await connect(proxy)
    proxy.restart_trace()
    writer.write(b"x" * 100)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await reader.readexactly(100)
    proxy.change_uplink(FAST)  # what waited goes at the new pace
    async with asyncio.timeout(5):
        assert await reader.readexactly(100) == b"x" * 100
    await proxy.stop()


async def test_short_messages_pass_beside_a_full_data_connection(connect: Connect) -> None:
    server = await serve(echo)
    rate = 10 * BYTES_PER_S_PER_MBPS
    queue_bytes = 64 * 1024
    up = LinkConfig(Trace.constant(rate), delay_s=0.005, queue_bytes=queue_bytes)
    proxy = await started(port_of(server), up=up)
    loop = asyncio.get_running_loop()
    data_reader, data_writer = await connect(proxy)
    reader, writer = await connect(proxy)

    async def flood() -> None:
        while True:
            data_writer.write(bytes(65536))
            await data_writer.drain()

    async def swallow() -> None:
        while await data_reader.read(65536):
            pass

    tasks = [asyncio.create_task(flood()), asyncio.create_task(swallow())]
    await asyncio.sleep(0.3)
    worst_s = 0.0
    for _ in range(5):
        begin = loop.time()
        writer.write(b"ping")
        await reader.readexactly(4)
        worst_s = max(worst_s, loop.time() - begin)
    for task in tasks:
        task.cancel()
    # It waits for one full queue, twice (to get in, to get through), not for the data connection's buffers.
    assert worst_s < 2 * queue_bytes / rate + 0.2
    await proxy.stop()
    server.close()


async def test_two_connections_share_the_rate_evenly(connect: Connect) -> None:
    counts = [0, 0]

    async def count(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        which = (await reader.readexactly(1))[0]
        while data := await reader.read(65536):
            counts[which] += len(data)

    server = await serve(count)
    up = LinkConfig(Trace.constant(20 * BYTES_PER_S_PER_MBPS), delay_s=0.001)
    proxy = await started(port_of(server), up=up)

    async def flood(which: int) -> None:
        _, writer = await connect(proxy)
        writer.write(bytes([which]))
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    tasks = [asyncio.create_task(flood(which)) for which in (0, 1)]
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await proxy.stop()
    server.close()
    assert min(counts) > 0.6 * max(counts) > 0


async def test_receiver_that_does_not_read_stops_the_sender(connect: Connect) -> None:
    release = asyncio.Event()

    async def wait(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await release.wait()

    server = await serve(wait)
    proxy = await started(port_of(server))
    _, writer = await connect(proxy)
    writer.write(bytes(64 * 1024 * 1024))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.drain()
    assert sum(proxy.carried_bytes(Direction.UP)) < 12 * 1024 * 1024
    release.set()
    writer.transport.abort()
    await proxy.stop()
    server.close()


async def test_end_that_vanishes_closes_the_other_one(echo_server: int, connect: Connect) -> None:
    proxy = await started(echo_server)
    _, writer = await connect(proxy)
    writer.write(bytes(10))
    writer.transport.abort()
    reader2, writer2 = await connect(proxy)
    writer2.write(b"still here")
    assert await reader2.readexactly(10) == b"still here"
    await proxy.stop()


async def test_target_that_is_not_there_closes_the_connection(connect: Connect) -> None:
    server = await serve(echo)
    port = port_of(server)
    server.close()
    await server.wait_closed()
    proxy = await started(port)
    reader, _ = await connect(proxy)
    assert await reader.read() == b""
    await proxy.stop()


async def test_stop_leaves_no_task(echo_server: int, connect: Connect) -> None:
    before = asyncio.all_tasks()
    proxy = await started(echo_server)
    _, writer = await connect(proxy)
    writer.write(b"x")
    await writer.drain()
    await asyncio.sleep(0.05)
    await proxy.stop()
    ours = {task for task in asyncio.all_tasks() - before if "LinkProxy" in repr(task)}
    assert not ours
