"""The templates of ``infra/nats``: what each user may do, and what it hears when it may not."""

from __future__ import annotations

import asyncio
import string
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.wire.aio.templates import (
    AGENT_LOGIN,
    FOLDER,
    WORKER_LOGIN,
    make_certificate,
    render_users,
    settings_of,
)
from tests.wire.shells import AgentShell, WorkerShell, expected_answer, make_payloads
from wire import WORKER_QUEUE, agent_inbox
from wire.aio import (
    ConnectError,
    ConnectionChange,
    Message,
    NatsServer,
    NatsTransport,
    NoResponders,
    PermissionDenied,
    find_server_binary,
)

pytestmark = pytest.mark.nats

WAIT_S = 20.0
SESSION = "00" * 16


def url_of(server: NatsServer, login: tuple[str, str], tenant: str) -> str:
    return f"nats://{login[0]}-{tenant}:{login[1]}@127.0.0.1:{server.port}"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer(settings=render_users("clinic", "plant"), token="") as server:
        yield server


@pytest.fixture
async def agent(server: NatsServer) -> AsyncIterator[NatsTransport]:
    transport = await NatsTransport.connect(
        url_of(server, AGENT_LOGIN, "clinic"), inbox=agent_inbox("clinic", "a"), timeout_s=WAIT_S
    )
    yield transport
    await transport.close()


@pytest.fixture
async def worker(server: NatsServer) -> AsyncIterator[NatsTransport]:
    transport = await NatsTransport.connect(
        url_of(server, WORKER_LOGIN, "clinic"), inbox="kvtide.clinic.i.w", timeout_s=WAIT_S
    )
    yield transport
    await transport.close()


def ignore(_message: Message) -> None:
    pass


async def check_denied_publish(transport: NatsTransport, subject: str) -> None:
    failed = asyncio.Event()
    transport.watch(lambda change: failed.set() if change is ConnectionChange.FAILED else None)
    await transport.publish(subject, b"")
    async with asyncio.timeout(WAIT_S):
        await failed.wait()
    failure = transport.failure
    assert isinstance(failure, PermissionDenied)
    assert (failure.operation, failure.subject) == ("publish to", subject.lower())
    assert "denies this client publish to" in str(failure)
    assert not transport.is_connected
    with pytest.raises(PermissionDenied):
        await transport.publish("kvtide.clinic.open", b"")


@pytest.mark.parametrize(
    "subject",
    [
        "kvtide.plant.open",
        f"kvtide.plant.w.w-1.{SESSION}.d",
        f"kvtide.plant.w.w-1.{SESSION}.c",
        "kvtide.clinic.i.other",
        f"kvtide.clinic.w.w-1.{SESSION}.x",
        "$SYS.REQ.SERVER.PING",
        "anything",
    ],
)
async def test_an_agent_may_not_publish_anywhere_else(agent: NatsTransport, subject: str) -> None:
    await check_denied_publish(agent, subject)


@pytest.mark.parametrize(
    "subject",
    [
        "kvtide.plant.open",
        "kvtide.plant.i.>",
        "kvtide.clinic.open",
        "kvtide.clinic.w.>",
        "kvtide.>",
        ">",
        "_INBOX.>",
    ],
)
async def test_an_agent_may_not_listen_anywhere_else(agent: NatsTransport, subject: str) -> None:
    with pytest.raises(PermissionDenied, match="subscribe to") as caught:
        await agent.subscribe(subject, ignore)
    assert caught.value.subject == subject.lower()
    assert agent.failure is caught.value


@pytest.mark.parametrize("subject", ["kvtide.clinic.open", "kvtide.plant.i.a", "anything"])
async def test_a_worker_may_not_publish_anywhere_else(worker: NatsTransport, subject: str) -> None:
    await check_denied_publish(worker, subject)


@pytest.mark.parametrize("subject", ["kvtide.clinic.open", "kvtide.plant.w.>", ">"])
async def test_a_worker_may_not_listen_anywhere_else(worker: NatsTransport, subject: str) -> None:
    with pytest.raises(PermissionDenied):
        await worker.subscribe(subject, ignore)


async def test_the_same_subject_of_another_tenant_is_another_subject(
    server: NatsServer, worker: NatsTransport
) -> None:
    await worker.subscribe("kvtide.clinic.open", ignore, queue=WORKER_QUEUE)
    stranger = await NatsTransport.connect(
        url_of(server, AGENT_LOGIN, "plant"), inbox=agent_inbox("plant", "a"), timeout_s=WAIT_S
    )
    with pytest.raises(NoResponders):
        await stranger.request("kvtide.plant.open", b"", timeout_s=WAIT_S)
    await stranger.close()


async def test_a_whole_request_needs_no_more_than_the_permissions(
    server: NatsServer, agent: NatsTransport, worker: NatsTransport
) -> None:
    data = await NatsTransport.connect(url_of(server, AGENT_LOGIN, "clinic"), timeout_s=WAIT_S)
    shell = WorkerShell(worker, worker)
    await shell.start()
    payloads = make_payloads((300_000, 5000), seed=2)
    answer = await AgentShell(data, agent, payloads, claim_timeout_s=WAIT_S).run()
    assert answer == expected_answer(payloads, range(20), (1, 2, 3), num_tokens=8)
    assert agent.failure is data.failure is worker.failure is None
    await shell.close()
    await data.close()


@pytest.mark.parametrize("name", ["single.conf", "cluster.conf"])
def test_each_template_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    values = make_certificate(tmp_path) | {
        "SERVER_NAME": "nats-0",
        "LISTEN": "127.0.0.1:4222",
        "CLUSTER_LISTEN": "127.0.0.1:6222",
        "ROUTES": '"nats-route://127.0.0.1:6223", "nats-route://127.0.0.1:6224"',
        "TENANT": "clinic",
        # Two made-up public user keys.
        "AGENT_NKEY": "UC6NLCN7AS34YOJVCYD4PJ3QB7QGLYG5B5IMBT25VW5K4TNUJODM7BOX",
        "WORKER_NKEY": "UBO2MQV67TQTVIRV3XFTEZOACM4WLOCMCDMAWN5QVN5PI2N6JHTVDRON",
    }
    for file in FOLDER.glob("*.conf"):
        text = string.Template(file.read_text(encoding="utf-8")).substitute(values)
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    result = subprocess.run(
        [str(find_server_binary()), "-t", "-c", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


async def test_tls_is_used_verified_and_never_done_without(tmp_path: Path) -> None:
    values = make_certificate(tmp_path)
    settings = settings_of("single.conf", values, users=render_users("clinic"))
    with NatsServer(settings=settings, token="") as server:
        url = url_of(server, AGENT_LOGIN, "clinic")
        ca_file = Path(values["TLS_CA"])
        transport = await NatsTransport.connect(url, ca_file=ca_file, timeout_s=WAIT_S)
        writer = transport._stream._io_writer
        assert writer is not None
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert await transport.ping(timeout_s=WAIT_S) >= 0
        await transport.close()
        # An authority that did not sign the certificate.
        (tmp_path / "other").mkdir()
        other = make_certificate(tmp_path / "other")
        with pytest.raises(ConnectError, match="certificate"):
            await NatsTransport.connect(url, ca_file=Path(other["TLS_CA"]), timeout_s=1.0)
    # A server, or whoever sits in between, that offers none: no login goes out in the clear.
    with NatsServer(settings=render_users("clinic"), token="") as server:
        url = url_of(server, AGENT_LOGIN, "clinic")
        with pytest.raises(ConnectError, match="does not offer TLS"):
            await NatsTransport.connect(url, ca_file=ca_file, timeout_s=WAIT_S)
