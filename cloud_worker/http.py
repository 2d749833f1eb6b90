"""Health, readiness and metrics pages.

``/healthz`` says that the process runs, ``/readyz`` whether it takes sessions, ``/metrics`` is for
Prometheus. There is nothing else: work comes over the broker.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from aiohttp import web

from cloud_worker.errors import PortInUse, WorkerError
from telemetry.metrics import CONTENT_TYPE, MetricSet


class StatusServer:
    """Serves the pages until it is closed."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self._runner = runner
        self.port = port
        """The TCP port that is bound."""

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()


async def start_http(
    *,
    host: str,
    port: int,
    metrics: MetricSet,
    refresh: Callable[[], None],
    unready_reason: Callable[[], str | None],
) -> StatusServer:
    """Start the pages.

    Args:
        host: address to listen on.
        port: TCP port, 0 lets the kernel choose.
        metrics: what ``/metrics`` shows.
        refresh: sets the gauges that are read from state, before each reading.
        unready_reason: None when sessions are taken, else one word why not.

    Raises:
        PortInUse: the address is taken.
        WorkerError: the address cannot be used otherwise.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_request: web.Request) -> web.Response:
        reason = unready_reason()
        if reason is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    async def metrics_page(_request: web.Request) -> web.Response:
        refresh()
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics_page),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"http port {port} on {host} is taken by another program") from error
        raise WorkerError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    bound = runner.addresses[0][1]
    return StatusServer(runner, int(bound))
