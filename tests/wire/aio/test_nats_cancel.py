"""Cancelling a first connection, at every moment of it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from wire.aio import NatsTransport


@pytest.mark.parametrize("num_steps", range(12))
async def test_connecting_can_be_cancelled_at_every_step(num_steps: int) -> None:
    """The client library swallows a cancellation that comes while it looks the address up."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        task = asyncio.create_task(NatsTransport.connect(f"nats://127.0.0.1:{port}"))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
