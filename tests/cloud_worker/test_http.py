from __future__ import annotations

import aiohttp
import pytest

from cloud_worker.errors import PortInUse, WorkerError
from cloud_worker.http import StatusServer, start_http
from telemetry import MetricSet, names


async def start(reason: str | None = None, port: int = 0, host: str = "127.0.0.1") -> StatusServer:
    metrics = MetricSet(names.WORKER_METRICS)
    return await start_http(
        host=host,
        port=port,
        metrics=metrics,
        refresh=lambda: metrics.set(names.WORKER_ACTIVE_SESSIONS, 5),
        unready_reason=lambda: reason,
    )


async def get(server: StatusServer, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.port}{path}") as response,
    ):
        return response.status, await response.text()


async def test_a_ready_worker_says_so() -> None:
    server = await start()
    try:
        assert (await get(server, "/healthz"))[0] == 200
        assert (await get(server, "/readyz"))[0] == 200
        assert (await get(server, "/nowhere"))[0] == 404
    finally:
        await server.close()


async def test_a_draining_worker_is_healthy_and_not_ready() -> None:
    server = await start("draining")
    try:
        assert (await get(server, "/healthz"))[0] == 200
        status, text = await get(server, "/readyz")
        assert status == 503
        assert "draining" in text
    finally:
        await server.close()


async def test_metrics_are_read_anew_for_each_page() -> None:
    server = await start()
    try:
        status, text = await get(server, "/metrics")
        assert status == 200
        assert "kvtide_worker_active_sessions 5.0" in text
    finally:
        await server.close()


async def test_a_port_in_use_is_named() -> None:
    server = await start()
    try:
        with pytest.raises(PortInUse, match=str(server.port)):
            await start(port=server.port)
    finally:
        await server.close()


async def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(WorkerError, match=r"203\.0\.113\.1"):
        await start(host="203.0.113.1")
