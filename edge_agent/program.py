"""The agent as a process: start, listen, load, wait for a signal, drain, stop.

HTTP is up before the model is loaded. Invariant: after SIGTERM no connection is taken any more, and the
process ends when the last answer has, or after ``drain_timeout_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
from collections.abc import AsyncIterator

from aiohttp import web

from edge_agent.agent import Agent
from edge_agent.auth import BearerTokens
from edge_agent.config import EdgeConfig
from edge_agent.errors import ConfigError, PortInUse
from edge_agent.http import build_app
from telemetry import Event, announce, configure_logging, get_logger

_log = get_logger("edge_agent")


def run(config: EdgeConfig) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Raises:
        AgentError: it could not start, or its model cannot be loaded.
    """
    configure_logging(config.log_level, program="kvtide-edge")
    import uvloop

    uvloop.run(_serve(config))


async def _serve(config: EdgeConfig) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        agent = await stack.enter_async_context(Agent.open(config))
        server = await stack.enter_async_context(_http_server(agent, config))
        announce(Event.LISTENING, port=server.port)
        loading = asyncio.create_task(agent.load())
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading in done:
            # A model that cannot be loaded ends the program with its sentence.
            loading.result()
            await stopping
        loading.cancel()
        stopping.cancel()
        _log.info(Event.DRAINING, requests=agent.num_requests, ingests=agent.num_ingests)
        agent.start_draining()
        await server.close_listener()
        await agent.wait_idle(config.drain_timeout_s)
    _log.info(Event.STOPPED)


class _HttpServer:
    """The listening socket and what hangs on it."""

    def __init__(self, runner: web.AppRunner, site: web.TCPSite) -> None:
        self._runner = runner
        self._site = site
        self._is_listening = True

    @property
    def port(self) -> int:
        """The bound port, chosen by the kernel where 0 was asked for."""
        return int(self._runner.addresses[0][1])

    async def close_listener(self) -> None:
        """Take no new connections; open ones go on."""
        if self._is_listening:
            self._is_listening = False
            await self._site.stop()


@contextlib.asynccontextmanager
async def _http_server(agent: Agent, config: EdgeConfig) -> AsyncIterator[_HttpServer]:
    tokens = (
        BearerTokens()
        if config.http_token_file is None
        else BearerTokens.load(config.http_token_file)
    )
    app = build_app(agent, tokens=tokens, max_body_bytes=config.max_body_bytes)
    # Handler cancellation: a client that goes away must free the worker at once.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.http_host, config.http_port)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"http_port: {config.http_host}:{config.http_port} is in use by another program"
                ) from error
            raise ConfigError(
                f"http_host: cannot listen on {config.http_host}:{config.http_port}:"
                f" {error.strerror or error}"
            ) from error
        server = _HttpServer(runner, site)
        yield server
    finally:
        await runner.cleanup()
