"""A worker on the tiny model, and agents for it, on any broker; for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cloud_worker.config import WorkerConfig
from cloud_worker.evaluation import Evaluator, ExactCaches
from cloud_worker.executors import Executors
from cloud_worker.speeds import PrefillSample, SpeedModel
from cloud_worker.worker import Worker
from codec import Codec
from engine import TorchEngine
from telemetry import MetricSet, names
from tests.cloud_worker.agent import RANGES, TENANT, Agent
from wire import Accept
from wire.aio import Transport


@dataclass
class Bench:
    """A worker and a way to make agents."""

    engine: TorchEngine
    codec: Codec
    executors: Executors
    dial: Callable[[], Awaitable[Transport]]
    transports: list[Transport] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    metrics: MetricSet = field(default_factory=lambda: MetricSet(names.WORKER_METRICS))

    async def connect(self) -> Transport:
        transport = await self.dial()
        self.transports.append(transport)
        return transport

    async def worker(self, **settings: Any) -> Worker:
        config = WorkerConfig(
            tenant=TENANT, **({"prefill_step_tokens": 16, "max_answer_tokens": 64} | settings)
        )
        worker = Worker(
            config=config,
            worker_id="w-1",
            engine=self.engine,
            codec=self.codec,
            executors=self.executors,
            speeds=SpeedModel([PrefillSample(0, 16, 0.01)]),
            evaluator=Evaluator(
                engine=self.engine,
                executors=self.executors,
                caches=ExactCaches(2**30),
                step_tokens=16,
            ),
            metrics=self.metrics,
            data=await self.connect(),
            control=await self.connect(),
        )
        await worker.start()
        self.workers.append(worker)
        return worker

    async def agent(self, **settings: Any) -> Agent:
        agent = Agent(
            self.engine, self.codec, await self.connect(), await self.connect(), **settings
        )
        self.agents.append(agent)
        return agent

    async def close(self) -> None:
        for agent in self.agents:
            if agent.sender.accept is not None:
                agent.cancel()
                await agent.flush()
        for worker in self.workers:
            # Let the cancels arrive: a worker that stops first would wait for its word to be heard.
            with contextlib.suppress(TimeoutError):
                await until(lambda w=worker: not w.num_sessions, within_s=2)  # type: ignore[misc]
            await worker.close()
        for transport in self.transports:
            await transport.close()

    def count(self, line: str) -> float:
        for text in self.metrics.render().decode().splitlines():
            if text.startswith(line + " "):
                return float(text.rpartition(" ")[2])
        return 0.0


async def until(is_so: Callable[[], bool], *, within_s: float) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110 # there is no event to wait for
            await asyncio.sleep(0.01)


async def settle(worker: Worker) -> None:
    """Wait until every session has gone."""
    await until(lambda: not worker.num_sessions, within_s=10)


async def answer(agent: Agent, text_chunks: tuple[int, ...] = (), **ask: Any) -> Any:
    assert isinstance(await agent.open(), Accept)
    agent.ask(**ask)
    for chunk in range(len(RANGES)):
        if chunk in text_chunks:
            agent.recompute(chunk)
        else:
            agent.send(chunk)
    return await agent.run()
