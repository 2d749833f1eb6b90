from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from wire.aio import NatsServer, ServerStartError, find_server_binary

pytestmark = pytest.mark.nats


def test_the_binary_is_the_installed_one() -> None:
    assert find_server_binary().name.startswith("nats-server")


def test_it_listens_on_loopback_with_a_secret_that_nobody_sees() -> None:
    server = NatsServer()
    with server:
        assert server.url.startswith("nats://127.0.0.1:")
        assert server.port > 0
        assert len(server.token) >= 32
        pid = server.pid
        assert pid is not None
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists():
            words = command.read_bytes().split(b"\0")
            assert server.token.encode() not in b" ".join(words)
            config = Path(words[2].decode())
            assert stat.S_IMODE(config.stat().st_mode) == 0o600
            folder = config.parent
        else:
            folder = None
        assert server.token not in server.log
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert folder is None or not folder.exists()
    server.stop()


def test_two_servers_get_two_ports_and_a_restart_keeps_its_own() -> None:
    with NatsServer() as one, NatsServer() as two:
        assert one.port != two.port
        assert one.token != two.token
        port = one.port
        one.kill()
        assert one.pid is None
        one.start()
        assert one.port == port
        with pytest.raises(ServerStartError, match="runs already"):
            one.start()


def test_a_bad_configuration_is_told_in_its_own_words() -> None:
    server = NatsServer(settings="no_such_setting: 1")
    with pytest.raises(ServerStartError, match="no_such_setting"):
        server.start()
    assert server.pid is None
    server.stop()


def test_a_taken_port_is_a_clear_error() -> None:
    with NatsServer() as one:
        other = NatsServer(port=one.port)
        with pytest.raises(ServerStartError, match="address already in use"):
            other.start()
        other.stop()
