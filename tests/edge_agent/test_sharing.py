"""Requests that share the uplink, over the real sessions and the real worker in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cloud_worker.executors import Executors
from codec import Codec
from edge_agent.api import parse_chat
from edge_agent.errors import DeadlineRefused
from edge_agent.model import EdgeModel
from edge_agent.sharing import UplinkShares
from engine import TorchEngine
from planner import MedianRate
from planner.fleet import Demand
from planner.model import TransferState
from tests.edge_agent.test_uplink import World, make_world
from tests.planner.builders import options, sample, state


class Meter:
    """What the shares read of a session's meter."""

    rate_bytes_per_s: float | None = 1e6
    min_rtt_s: float | None = 0.04


class Session:
    """What the shares read and set of a session."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.segment_bytes = 1000
        self.window_share_bytes: int | None = None


def enter(shares: UplinkShares, name: str, transfer: TransferState, *, strict: bool = False) -> Any:
    estimator = MedianRate()
    estimator.on_delivery(sample(1e6, 0.0))
    session: Any = Session()
    shares.enter(name, session, transfer, estimator, is_strict=strict, now=0.0)
    return session


def transfer(deadline_s: float) -> TransferState:
    return state(options(0, prefill_s=100.0), deadline_s=deadline_s)


def test_alone_nobody_is_limited_and_together_the_urgent_one_has_more() -> None:
    shares = UplinkShares()
    urgent = enter(shares, "urgent", transfer(2.5))
    shares.update("urgent", transfer(2.5), now=1.0)
    assert urgent.window_share_bytes is None
    relaxed = enter(shares, "relaxed", transfer(60.0))
    shares.update("urgent", transfer(2.5), now=2.0)
    assert urgent.window_share_bytes > 2 * relaxed.window_share_bytes > 0
    before = urgent.window_share_bytes
    shares.update("urgent", transfer(60.0), now=2.01)
    assert urgent.window_share_bytes == before  # divided a moment ago
    shares.leave("relaxed")
    assert urgent.window_share_bytes is None
    shares.leave("urgent")


def test_nothing_known_about_the_link_limits_nobody() -> None:
    shares = UplinkShares()
    first, second = (enter(shares, name, transfer(5.0)) for name in "ab")
    first.meter.rate_bytes_per_s = second.meter.rate_bytes_per_s = None
    shares.update("a", transfer(5.0), now=1.0)
    assert first.window_share_bytes is None
    shares.update("nobody", transfer(5.0), now=2.0)


def test_a_strict_deadline_behind_others_is_refused_with_a_time() -> None:
    shares = UplinkShares()
    enter(shares, "one", transfer(1.5), strict=True)
    with pytest.raises(DeadlineRefused, match="promised to 1 requests") as refused:
        enter(shares, "two", transfer(1.6), strict=True)
    assert refused.value.retry_after_s >= 1
    enter(shares, "three", transfer(1.6))  # not strict: late, but let in
    assert set(shares._demands) == {"one", "three"}
    assert isinstance(shares._demands["one"], Demand)


@pytest.fixture
def executors() -> Any:
    made = Executors()
    yield made
    made.close()


async def test_a_hopeless_strict_request_is_refused_and_the_worker_let_go(
    ingestor: Any, store: Any, metrics: Any, engine: TorchEngine, codec: Codec, pool: Any,
    executors: Executors,
) -> None:  # fmt: skip
    async with make_world(ingestor, store, metrics, EdgeModel(engine, codec), pool) as world:
        worker = await world.add_worker(executors)
        await world.ask(world.request("fixed:fp16"))
        request = world.request("kvtide", deadline_s=1e-6, strict=True, estimator="predictive")
        with pytest.raises(DeadlineRefused, match="cannot be met"):
            await world.ask(request)
        await world.wait_until(lambda: worker.num_sessions == 0)
        await _answers_together(world)


async def _answers_together(world: World) -> None:
    requests = [
        world.request("kvtide", session=name * 16, estimator="predictive") for name in ("cd", "ef")
    ]
    ends = await asyncio.gather(*(world.uplink.answer(request, world.take) for request in requests))
    assert [end.finish_reason for end in ends] == ["length", "length"]


def test_strict_is_a_flag_of_the_api() -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "kvtide": {"strict": True},
    }
    assert parse_chat(body).strict
