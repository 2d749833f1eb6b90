"""Replaying a scenario with the real programs over a link that follows a trace.

One nats-server, the workers and the agents are processes; the link is a proxy in this process. Invariants:
every policy meets the same seconds of the trace; everything that was started is ended, also on Ctrl-C and on a
failure. Must not know: how a report looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import math
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from scenarios import client, machine
from scenarios.config import Kind, Scenario, request_policy
from scenarios.errors import ReplayError
from scenarios.levels import wanted_levels
from scenarios.link import LinkConfig
from scenarios.programs import Commands, Program, end, has_ended, running, wait_ready
from scenarios.proxy import RECORD_STEP_S, Direction, LinkProxy
from scenarios.results import IngestRecord, LinkRecord, RequestRecord, RunReport
from scenarios.trace import Trace
from scenarios.workload import build_context
from wire.aio import NatsServer, ServerStartError

TENANT = "scenario"
LISTEN_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 420.0
"""The first start fetches and converts the model's weights."""
INGEST_TIMEOUT_S = 1800.0
DRAIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Broker:
    """Where the nats-server listens."""

    host: str
    port: int
    token: str


OpenBroker = Callable[[], contextlib.AbstractAsyncContextManager[Broker]]


@contextlib.asynccontextmanager
async def own_broker() -> AsyncIterator[Broker]:
    """Run a nats-server on loopback for the length of the block.

    Raises:
        ReplayError: it does not start.
    """
    server = NatsServer(name="kvtide-scenario")
    try:
        await asyncio.to_thread(server.start)
        yield Broker("127.0.0.1", server.port, server.token)
    except ServerStartError as error:
        raise ReplayError(str(error)) from error
    finally:
        await asyncio.shield(asyncio.to_thread(server.stop))


class Progress(Protocol):
    """Who wants to know how far a run is; called on the event loop, must not block."""

    def stage(self, name: str) -> None:
        """Something of unknown length begins."""

    def ingest(self, context: str, stage: str, done: int, total: int) -> None:
        """An ingest got further."""

    def requests(self, total: int) -> None:
        """So many requests follow."""

    def asking(self, request: client.Ask) -> None:
        """A request begins."""

    def answered(self, record: RequestRecord) -> None:
        """A request has ended."""


@dataclass(eq=False, slots=True)
class Site:
    """One agent behind its own link."""

    agent: Program
    proxy: LinkProxy
    up: LinkConfig


@dataclass(eq=False, slots=True)
class Stage:
    """Everything that runs."""

    scenario: Scenario
    trace: Trace
    commands: Commands
    folder: Path
    broker: Broker
    http: aiohttp.ClientSession
    progress: Progress
    stack: contextlib.AsyncExitStack
    sites: list[Site] = dataclasses.field(default_factory=list)
    workers: list[Program] = dataclasses.field(default_factory=list)
    num_workers_started: int = 0
    ingests: list[IngestRecord] = dataclasses.field(default_factory=list)

    async def start_worker(self) -> Program:
        """Start one more worker and wait until it takes sessions."""
        name = f"worker-{self.num_workers_started}"
        self.num_workers_started += 1
        worker = await self.stack.enter_async_context(
            running(
                name,
                self.commands.worker,
                self._common(self.broker.port)
                | {
                    "worker_id": name,
                    "slo_s": self.scenario.slo_s,
                    # The speeds of this run, not of an earlier one on a busier machine.
                    "calibrate": "measure",
                    # A trace may be silent for longer than an agent may be.
                    "session_idle_timeout_s": 30.0 + self._longest_outage_s(),
                },
                folder=self.folder,
                ready_timeout_s=LISTEN_TIMEOUT_S,
            )
        )
        self.workers.append(worker)
        await wait_ready(worker, self.http, timeout_s=READY_TIMEOUT_S)
        return worker

    async def start_site(self, index: int, up: LinkConfig) -> None:
        """Start one agent behind a proxy of its own."""
        scenario = self.scenario
        proxy = LinkProxy(
            up=up,
            down=scenario.downlink_config(up),
            target_host=self.broker.host,
            target_port=self.broker.port,
        )
        await proxy.start()
        self.stack.push_async_callback(proxy.stop)
        settings = self._common(proxy.port) | {
            "store_dir": self.folder / f"store-{index}",
            "levels": list(wanted_levels(scenario)),
            "deadline_s": scenario.slo_s,
            "request_timeout_s": scenario.timeout_s,
        }
        if scenario.chunk_tokens:
            settings["chunk_tokens"] = scenario.chunk_tokens
        agent = await self.stack.enter_async_context(
            running(
                f"agent-{index}",
                self.commands.agent,
                settings,
                folder=self.folder,
                ready_timeout_s=LISTEN_TIMEOUT_S,
            )
        )
        self.sites.append(Site(agent, proxy, up))
        await wait_ready(agent, self.http, timeout_s=READY_TIMEOUT_S, want="broker")

    def _common(self, port: int) -> dict[str, Any]:
        model = self.scenario.model
        return {
            "http_port": 0,
            "nats_url": f"nats://{self.broker.host}:{port}",
            "nats_token_file": self.folder / "broker-token",
            "tenant": TENANT,
            "model": model.name,
            "dtype": model.dtype,
            "device": model.device,
        }

    def _longest_outage_s(self) -> float:
        return max((outage.duration_s for outage in self.trace.outages()), default=0.0)


async def replay(
    scenario: Scenario,
    *,
    progress: Progress,
    open_broker: OpenBroker = own_broker,
    commands: Commands | None = None,
    keep_folder: Path | None = None,
) -> RunReport:
    """Run a scenario for real.

    Args:
        scenario: what to run.
        progress: told how far it is.
        open_broker: starts a nats-server for the length of a block.
        commands: how the programs are started; None takes the real ones.
        keep_folder: where settings and logs of the programs stay; None throws them away at the end.

    Raises:
        ScenarioError: an input is bad, or a program did not do its part.
    """
    trace = scenario.load_trace()
    up = scenario.uplink_config(trace)
    texts = {context.name: build_context(scenario, context) for context in scenario.contexts}
    began = time.monotonic()
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    async with contextlib.AsyncExitStack() as stack:
        folder = keep_folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtide-scenario-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        progress.stage("starting nats-server, worker and agent")
        broker = await stack.enter_async_context(open_broker())
        token_path = folder / "broker-token"
        token_path.touch(mode=0o600)
        token_path.write_text(broker.token + "\n", encoding="utf-8")
        http = await stack.enter_async_context(aiohttp.ClientSession())
        on = Stage(scenario, trace, commands or Commands(), folder, broker, http, progress, stack)
        await _start_all(on, up)
        ingests = on.ingests = await _ingest_all(on, texts)
        if scenario.kind is Kind.FLEET:
            from scenarios.fleet import run_fleet

            records = await run_fleet(on)
        else:
            records = await _run_sequence(on)
        progress.stage("stopping")
        up = on.sites[0].up  # a tie may have scaled it
    return RunReport(
        scenario=scenario.name,
        summary=scenario.summary,
        mode="real",
        policies=scenario.policies,
        slo_s=scenario.slo_s,
        seed=scenario.seed,
        model=scenario.model.name,
        dtype=scenario.model.dtype,
        trace=trace.name,
        trace_mean_bytes_per_s=up.trace.mean_bytes_per_s,
        one_way_delay_s=up.delay_s,
        queue_bytes=up.queue_bytes,
        version=machine.version(),
        commit=machine.commit(),
        machine=machine.describe(),
        started_at=started_at,
        duration_s=round(time.monotonic() - began, 3),
        ingests=tuple(ingests),
        requests=tuple(records),
    )


async def _start_all(on: Stage, up: LinkConfig) -> None:
    """Start the first worker, then the agents; the first one converts the weights if need be."""
    await on.start_worker()
    for _ in range(on.scenario.faults.spare_workers):
        await on.start_worker()
    num_agents = on.scenario.fleet.agents if on.scenario.kind is Kind.FLEET else 1
    for index in range(num_agents):
        # Each agent drives through the trace at another time.
        shift_s = up.offset_s + index * up.trace.duration_s / num_agents
        await on.start_site(index, dataclasses.replace(up, offset_s=shift_s))


async def _ingest_all(on: Stage, texts: dict[str, str]) -> list[IngestRecord]:
    records: list[IngestRecord] = []
    for (name, text), site in itertools.product(texts.items(), on.sites):

        def on_stage(stage: str, done: int, total: int, context: str = name) -> None:
            on.progress.ingest(context, stage, done, total)

        record = await client.ingest(
            on.http,
            site.agent.base_url,
            context=name,
            text=text,
            on_stage=on_stage,
            timeout_s=INGEST_TIMEOUT_S,
        )
        if site is on.sites[0]:
            records.append(record)
    return records


def plan_asks(scenario: Scenario) -> list[client.Ask]:
    """Return the requests of a sequence: policies outside, so that each begins with nothing kept."""
    return [
        client.Ask(
            policy=policy,
            request_policy=request_policy(policy),
            context=scenario.context(question).name,
            question=question.text,
            deadline_s=scenario.slo_s,
            max_tokens=scenario.max_tokens,
            repetition=repetition,
            estimator=scenario.estimator,
            evaluate=scenario.evaluate,
        )
        for policy in scenario.policies
        for repetition in range(scenario.repetitions)
        for question in scenario.questions
    ]


async def _run_sequence(on: Stage) -> list[RequestRecord]:
    asks = plan_asks(on.scenario)
    on.progress.requests(len(asks))
    records: list[RequestRecord] = []
    policy_began = time.monotonic()
    for index, request in enumerate(asks):
        if index == 0 or asks[index - 1].policy != request.policy:
            policy_began = time.monotonic()
            if index and asks[index - 1].policy == on.scenario.policies[0]:
                _tie(on, records)
        started_s = time.monotonic() - policy_began
        record = await ask_over_link(on, on.sites[0], request)
        records.append(dataclasses.replace(record, started_s=round(started_s, 3)))
    return records


def _tie(on: Stage, records: Sequence[RequestRecord]) -> None:
    """Scale the uplink so that the scenario's level takes as long as the first policy, text, took."""
    level = on.scenario.uplink.tie_level
    if not level:
        return
    site, text = on.sites[0], records[0]
    ingest = next(i for i in on.ingests if i.context == text.context)
    if text.ttft_s is None or level not in ingest.bytes_by_level:
        raise ReplayError(
            f"there is nothing to tie: no first token under text, or no level {level}"
        )
    site.up = on.scenario.tie_uplink(
        site.up, num_bytes=ingest.bytes_by_level[level], text_s=text.ttft_s
    )
    site.proxy.change_uplink(site.up)


async def ask_over_link(on: Stage, site: Site, request: client.Ask) -> RequestRecord:
    """Ask one question from the trace's first moment on, with the fault that the scenario wants."""
    on.progress.asking(request)
    if not await site.proxy.drained(timeout_s=DRAIN_TIMEOUT_S):
        site.proxy.restart_trace()  # a silent stretch of the trace may hold something back
    site.proxy.restart_trace()
    async with _fault(on):
        record = await client.ask(
            on.http,
            site.agent.base_url,
            request,
            timeout_s=on.scenario.timeout_s + DRAIN_TIMEOUT_S,
        )
    if record.error and await has_ended(site.agent):
        raise ReplayError(
            f"{site.agent.name} ended with exit code {site.agent.process.returncode}: "
            f"{site.agent.last_words()}"
        )
    record = dataclasses.replace(record, link=link_record(site, record))
    on.progress.answered(record)
    return record


@contextlib.asynccontextmanager
async def _fault(on: Stage) -> AsyncIterator[None]:
    """Kill the worker that has the session, after the time that the scenario says, and replace it."""
    kill_s = on.scenario.faults.kill_worker_s
    if kill_s is None:
        yield
        return
    task = asyncio.create_task(_kill_busy_worker(on, kill_s))
    try:
        yield
    finally:
        if not task.done():
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome
    on.workers[:] = [worker for worker in on.workers if worker.process.returncode is None]
    while len(on.workers) < 1 + on.scenario.faults.spare_workers:
        await on.start_worker()


async def _kill_busy_worker(on: Stage, kill_s: float) -> None:
    await asyncio.sleep(kill_s)
    for worker in on.workers:
        async with on.http.get(f"{worker.base_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = [line.split()[-1] for line in lines if _is_active_sessions(line)]
        if values and float(values[0]) > 0:
            await end(worker, timeout_s=5.0, number=signal.SIGKILL)
            return
    raise ReplayError(f"no worker had a session {kill_s:g} s after the request, so none was killed")


def _is_active_sessions(line: str) -> bool:
    return line.startswith("kvtide_worker_active_sessions") and not line.startswith("#")


def link_record(site: Site, record: RequestRecord) -> LinkRecord:
    """Return what the uplink could carry and carried, up to the request's first token."""
    carried = site.proxy.carried_bytes(Direction.UP)
    end_s = max(record.ttft_s or 0.0, len(carried) * RECORD_STEP_S, RECORD_STEP_S)
    end_s = min(end_s, (record.ttft_s or end_s) * 1.1 + 1.0)
    count = math.ceil(end_s / RECORD_STEP_S)
    begin_s = site.up.offset_s
    capacity = site.up.trace.binned(begin_s, begin_s + count * RECORD_STEP_S, RECORD_STEP_S)
    padded: Sequence[int] = [*carried[:count], *([0] * (count - len(carried)))]
    return LinkRecord(
        step_s=RECORD_STEP_S,
        capacity_bytes_per_s=tuple(round(rate) for rate in capacity),
        carried_bytes_per_s=tuple(round(count / RECORD_STEP_S) for count in padded),
    )
