"""The transport and whole requests over a real nats-server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.wire.shells import (
    AgentShell,
    SessionEndedError,
    WorkerShell,
    expected_answer,
    make_payloads,
)
from wire import ChunkReady, Delivered, agent_inbox
from wire.aio import (
    AuthorizationFailed,
    ConnectError,
    ConnectionChange,
    Message,
    MessageTooLarge,
    NatsServer,
    NatsTransport,
    NoResponders,
    NotConnected,
    RequestTimeout,
    SendError,
    TransportClosed,
)

pytestmark = pytest.mark.nats

WAIT_S = 20.0
"""Longest wait of a test for something that takes milliseconds on an idle machine."""


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


async def connect(server: NatsServer, *, inbox: str = "") -> NatsTransport:
    return await NatsTransport.connect(
        server.url, token=server.token, inbox=inbox, timeout_s=WAIT_S
    )


@pytest.fixture
async def pair(server: NatsServer) -> AsyncIterator[tuple[NatsTransport, NatsTransport]]:
    left, right = await connect(server), await connect(server)
    yield left, right
    await left.close()
    await right.close()


class Changes:
    """Collects what a transport says of its connection."""

    def __init__(self, transport: NatsTransport) -> None:
        self.seen: list[ConnectionChange] = []
        self._news = asyncio.Event()
        transport.watch(self._take)

    def _take(self, change: ConnectionChange) -> None:
        self.seen.append(change)
        self._news.set()

    async def wait_for(self, change: ConnectionChange) -> None:
        async with asyncio.timeout(WAIT_S):
            while change not in self.seen:
                self._news.clear()
                await self._news.wait()


class Inbox:
    """Collects messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._news = asyncio.Event()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self._news.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.messages) < count:
                self._news.clear()
                await self._news.wait()


async def test_messages_arrive_in_order_and_whole(
    pair: tuple[NatsTransport, NatsTransport],
) -> None:
    left, right = pair
    inbox = Inbox()
    await right.subscribe("test.>", inbox)
    payloads = make_payloads([0, 1, 1000, left.max_payload], seed=1)
    for payload in payloads:
        await left.publish("test.a", payload, reply="answer.here")
    await inbox.wait_for(len(payloads))
    assert [message.data for message in inbox.messages] == payloads
    assert inbox.messages[0].subject == "test.a"
    assert inbox.messages[0].reply == "answer.here"


async def test_request_is_answered_by_one_of_a_queue_group(
    pair: tuple[NatsTransport, NatsTransport],
) -> None:
    left, right = pair
    answers: set[asyncio.Task[None]] = set()

    def answer(message: Message) -> None:
        task = asyncio.create_task(right.publish(message.reply, b"yes " + message.data))
        answers.add(task)
        task.add_done_callback(answers.discard)

    for _ in range(3):
        await right.subscribe("ask", answer, queue="group")
    assert await left.request("ask", b"1", timeout_s=WAIT_S) == b"yes 1"
    assert await left.ping(timeout_s=WAIT_S) >= 0.0


async def test_request_to_nobody_fails_at_once(pair: tuple[NatsTransport, NatsTransport]) -> None:
    with pytest.raises(NoResponders, match="nobody listens on 'void'"):
        await pair[0].request("void", b"", timeout_s=WAIT_S)


async def test_request_without_answer_times_out(pair: tuple[NatsTransport, NatsTransport]) -> None:
    await pair[1].subscribe("deaf", Inbox())
    with pytest.raises(RequestTimeout, match=r"within 0\.05 s"):
        await pair[0].request("deaf", b"", timeout_s=0.05)


async def test_too_large_message_is_refused_before_the_server_would_hang_up(
    pair: tuple[NatsTransport, NatsTransport],
) -> None:
    with pytest.raises(MessageTooLarge) as caught:
        await pair[0].publish("big", bytes(pair[0].max_payload + 1))
    assert caught.value.max_payload == pair[0].max_payload == 1 << 20
    assert pair[0].is_connected


async def test_bad_subject_is_a_send_error(pair: tuple[NatsTransport, NatsTransport]) -> None:
    with pytest.raises(SendError, match="cannot use subject"):
        await pair[0].publish("two words", b"")


async def test_nothing_comes_after_unsubscribe(pair: tuple[NatsTransport, NatsTransport]) -> None:
    left, right = pair
    gone, there = Inbox(), Inbox()
    subscription = await right.subscribe("news", gone)
    await right.subscribe("news", there)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await left.publish("news", b"1")
    await there.wait_for(1)
    assert gone.messages == []


async def test_a_receiver_that_raises_is_reported_and_hears_the_next_message(
    pair: tuple[NatsTransport, NatsTransport],
) -> None:
    left, right = pair
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    inbox = Inbox()

    def take(message: Message) -> None:
        inbox(message)
        raise ValueError("a bug in the shell")

    await right.subscribe("bug", take)
    await left.publish("bug", b"1")
    await left.publish("bug", b"2")
    await inbox.wait_for(2)
    await right.ping(timeout_s=WAIT_S)
    assert len(reports) == 2


async def test_socket_options_are_set_on_every_connection(server: NatsServer) -> None:
    transport = await connect(server)
    changes = Changes(transport)
    for _ in range(2):
        writer = transport._stream._io_writer
        assert writer is not None
        sock = writer.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        if hasattr(socket, "TCP_CONGESTION"):
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") in (b"cubic", b"reno")
            assert sock.getsockopt(socket.IPPROTO_TCP, 25) == 16 * 1024
        changes.seen.clear()
        server.kill()
        await changes.wait_for(ConnectionChange.DOWN)
        server.start()
        await changes.wait_for(ConnectionChange.UP)
    assert transport.num_reconnects == 2
    await transport.close()


async def test_nothing_is_buffered_while_the_connection_is_down(server: NatsServer) -> None:
    transport, listener = await connect(server), await connect(server)
    changes, heard = Changes(transport), Changes(listener)
    inbox = Inbox()
    await listener.subscribe("x", inbox)
    server.kill()
    await changes.wait_for(ConnectionChange.DOWN)
    assert not transport.is_connected
    for call in (
        transport.publish("x", b"lost"),
        transport.ping(timeout_s=1.0),
        transport.request("x", b"", timeout_s=1.0),
    ):
        with pytest.raises(NotConnected):
            await call
    server.start()
    await changes.wait_for(ConnectionChange.UP)
    await heard.wait_for(ConnectionChange.UP)
    # The subscription is back too, and only what is sent now arrives.
    await transport.publish("x", b"after")
    await inbox.wait_for(1)
    assert [message.data for message in inbox.messages] == [b"after"]
    await transport.close()
    await listener.close()


async def test_a_frozen_server_holds_publishing_back_and_cancelling_works(
    server: NatsServer,
) -> None:
    transport = await connect(server)
    server.freeze()
    try:
        published = 0

        async def flood() -> None:
            nonlocal published
            while True:
                await transport.publish("flood", bytes(256 * 1024))
                published += 1

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await flood()
        # Own buffers (twice 1 MiB) and the kernel's, which loopback lets grow to a few MiB.
        assert 4 <= published <= 64
        with pytest.raises(RequestTimeout):
            await transport.ping(timeout_s=0.1)
    finally:
        server.thaw()
    await transport.close()


async def test_wrong_token_is_a_refused_login(server: NatsServer) -> None:
    with pytest.raises(AuthorizationFailed, match="refuses the login") as caught:
        await NatsTransport.connect(server.url, token="wrong-secret", timeout_s=WAIT_S)
    assert "wrong-secret" not in str(caught.value)


async def test_no_broker_is_a_clear_error_without_the_secret() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"nats://user:secret@127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(
            ConnectError, match=r"no broker answers at nats://127\.0\.0\.1"
        ) as caught:
            await NatsTransport.connect(url, timeout_s=0.3)
    assert "secret" not in str(caught.value)


async def test_a_server_that_is_no_nats_server_is_a_clear_error() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-nothing\r\n")
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    with pytest.raises(ConnectError, match="no broker answers"):
        await NatsTransport.connect(f"nats://127.0.0.1:{port}", timeout_s=0.3)
    other.close()
    await other.wait_closed()


@pytest.mark.parametrize("url", ["", "http://host:1", "nats://", "host:4222"])
async def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(ConnectError, match="broker URL"):
        await NatsTransport.connect(url)


async def test_a_closed_transport_says_so(server: NatsServer) -> None:
    transport = await connect(server)
    await transport.close()
    await transport.close()
    with pytest.raises(TransportClosed):
        await transport.publish("x", b"")


async def test_closing_while_the_server_is_away_leaves_no_task(server: NatsServer) -> None:
    transport = await connect(server)
    changes = Changes(transport)
    await transport.subscribe("x", Inbox())
    server.kill()
    await changes.wait_for(ConnectionChange.DOWN)
    await transport.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# Whole requests.

SIZES = (6_000_000, 1, 9_000_000, 5_000_000)
PAYLOADS = make_payloads(SIZES, seed=9)
ANSWER = expected_answer(PAYLOADS, range(10 * len(SIZES)), (1, 2, 3), num_tokens=8)


class Stage:
    """A worker and an agent with two connections each."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.transports: list[NatsTransport] = []
        self.workers: list[WorkerShell] = []

    async def add_worker(self, name: str = "w-1") -> WorkerShell:
        data, control = await self._connect(), await self._connect()
        worker = WorkerShell(data, control, worker=name, window_bytes=12 << 20)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def new_agent(self, *, peer_timeout_s: float = 60.0) -> AgentShell:
        data = await self._connect()
        control = await self._connect(inbox=agent_inbox("clinic", "a-1"))
        return AgentShell(
            data, control, PAYLOADS, claim_timeout_s=WAIT_S, peer_timeout_s=peer_timeout_s
        )

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        for transport in self.transports:
            await transport.close()

    async def _connect(self, *, inbox: str = "") -> NatsTransport:
        transport = await connect(self._server, inbox=inbox)
        self.transports.append(transport)
        return transport


@pytest.fixture
async def stage(server: NatsServer) -> AsyncIterator[Stage]:
    stage = Stage(server)
    yield stage
    await stage.close()


async def test_twenty_megabytes_arrive_once_and_whole(stage: Stage) -> None:
    worker, agent = await stage.add_worker(), await stage.new_agent()
    assert await agent.run() == ANSWER
    assert agent.session is not None
    assert agent.session.num_bytes_resent == 0
    assert worker.max_held_bytes <= 12 << 20
    assert sum(isinstance(event, Delivered) for event in agent.events) > 20


@pytest.mark.parametrize("num_restarts", [1, 3])
async def test_a_server_killed_mid_way_costs_at_most_a_window_each_time(
    stage: Stage, server: NatsServer, num_restarts: int
) -> None:
    await stage.add_worker()
    agent = await stage.new_agent()
    changes = [Changes(transport) for transport in stage.transports]
    largest_window = 0
    acked = 0
    restarting: set[asyncio.Task[None]] = set()

    async def restart() -> None:
        server.kill()
        for change in changes:
            await change.wait_for(ConnectionChange.DOWN)
            change.seen.clear()
        server.start()

    def watch(event: object) -> None:
        nonlocal largest_window, acked
        assert agent.session is not None
        largest_window = max(largest_window, agent.session.bytes_in_flight)
        if isinstance(event, Delivered):
            acked = agent.session.meter.delivered_bytes
        step = sum(SIZES) // (num_restarts + 1)
        if len(restarting) < num_restarts and acked > step * (len(restarting) + 1):
            restarting.add(asyncio.create_task(restart()))

    agent.on_event = watch
    async with asyncio.timeout(60):
        assert await agent.run() == ANSWER
    assert len(restarting) == num_restarts
    for task in restarting:
        await task
    assert agent.session is not None
    segment = 256 * 1024
    assert agent.session.num_bytes_resent <= num_restarts * (largest_window + segment)


async def test_a_server_frozen_for_a_while_loses_nothing(stage: Stage, server: NatsServer) -> None:
    await stage.add_worker()
    agent = await stage.new_agent()
    frozen: set[asyncio.Task[None]] = set()

    async def freeze() -> None:
        server.freeze()
        await asyncio.sleep(1.0)
        server.thaw()

    def watch(event: object) -> None:
        if isinstance(event, ChunkReady) and not frozen:
            frozen.add(asyncio.create_task(freeze()))

    agent.on_event = watch
    async with asyncio.timeout(60):
        assert await agent.run() == ANSWER
    assert frozen
    assert agent.session is not None
    # The connection stayed: everything arrived late, and nothing twice.
    assert agent.session.num_bytes_resent == 0


async def test_a_worker_that_vanishes_is_replaced(stage: Stage) -> None:
    first = await stage.add_worker("w-1")
    agent = await stage.new_agent(peer_timeout_s=3.0)

    def watch(event: object) -> None:
        if isinstance(event, ChunkReady) and first.tasks:
            for task in first.tasks:
                task.cancel()

    agent.on_event = watch
    running = asyncio.create_task(agent.run())
    with pytest.raises(SessionEndedError, match="PeerLost"):
        await running
    agent.on_event = None
    await first.close()
    for transport in (first.data, first.control):
        await transport.close()
    await stage.add_worker("w-2")
    assert await agent.run() == ANSWER
    assert agent.worker_ids == ["w-1", "w-2"]


async def test_cancelling_frees_the_worker(stage: Stage) -> None:
    worker, agent = await stage.add_worker(), await stage.new_agent()
    begun = asyncio.Event()
    agent.on_event = lambda _: begun.set()
    running = asyncio.create_task(agent.run())
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(1.0):
        await asyncio.gather(*worker.tasks)
    assert not worker.sessions


async def test_fifty_requests_share_two_connections_each_side(stage: Stage) -> None:
    await stage.add_worker()
    first = await stage.new_agent()
    agents = []
    for index in range(50):
        payloads = make_payloads((60_000, 40_000 + index), seed=index)
        agents.append(
            AgentShell(first.data, first.control, payloads, seed=index, claim_timeout_s=WAIT_S)
        )
    answers = await asyncio.gather(*(agent.run() for agent in agents))
    for agent, answer in zip(agents, answers, strict=True):
        assert answer == expected_answer(agent.payloads, range(20), (1, 2, 3), num_tokens=8)
    assert all(transport.num_dropped == 0 for transport in stage.transports)
