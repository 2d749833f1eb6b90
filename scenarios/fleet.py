"""Many requests from several agents to one worker, as a request trace has them.

Owns the importers of request traces and the replay of arrivals. Invariants: the same seed gives the same
arrivals; a file is read whole or refused with file and line. Must not know: processes' settings, reports.
"""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import datetime
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scenarios import client
from scenarios.config import TEXTS_DIR, Scenario, request_policy
from scenarios.errors import FileFormatError
from scenarios.results import RequestRecord

if TYPE_CHECKING:
    from scenarios.replay import Stage

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens behind one hash id. Source: Mooncake, FAST25-release/traces."""
_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a request trace."""

    at_s: float
    """Since the first one."""
    context_tokens: int
    answer_tokens: int
    block_ids: tuple[int, ...] = ()
    """One per 512 tokens of prefix where the trace has them: equal ids are equal text."""


def load_arrivals(path: Path) -> list[Arrival]:
    """Read a request trace: Azure's CSV, or Mooncake's JSONL where the name ends so.

    Raises:
        FileFormatError: names file and line of the fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, None, "is not text") from error
    arrivals = _mooncake(path, text) if path.suffix == ".jsonl" else _azure(path, text)
    if not arrivals:
        raise FileFormatError(path, None, "has no request")
    first_s = arrivals[0].at_s
    return [dataclasses.replace(a, at_s=a.at_s - first_s) for a in arrivals]


def _azure(path: Path, text: str) -> list[Arrival]:
    rows = csv.reader(text.splitlines(), strict=True)
    header = next(rows, [])
    if header != _AZURE_HEADER:
        raise FileFormatError(path, 1, f"has the header {header}, not {_AZURE_HEADER}")
    arrivals: list[Arrival] = []
    for row in rows:
        line = rows.line_num
        if len(row) != len(header):
            raise FileFormatError(path, line, f"has {len(row)} fields, not {len(header)}")
        try:
            # Seven digits of fraction are one more than a datetime takes.
            moment = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", row[0]))
            at_s = moment.replace(tzinfo=datetime.UTC).timestamp()
            arrival = Arrival(at_s, _count(row[1]), _count(row[2]))
        except ValueError as error:
            raise FileFormatError(path, line, str(error)) from error
        if arrivals and at_s < arrivals[-1].at_s:
            raise FileFormatError(path, line, f"{row[0]} comes before the line above")
        arrivals.append(arrival)
    return arrivals


def _mooncake(path: Path, text: str) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            fields = json.loads(content)
            arrival = Arrival(
                at_s=_count(fields["timestamp"]) / 1000.0,
                context_tokens=_count(fields["input_length"]),
                answer_tokens=_count(fields["output_length"]),
                block_ids=tuple(_count(block) for block in fields["hash_ids"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            problem = f"is no request with timestamp, lengths and hash_ids ({error})"
            raise FileFormatError(path, line, problem) from error
        if arrivals and arrival.at_s < arrivals[-1].at_s:
            raise FileFormatError(path, line, "comes before the line above")
        arrivals.append(arrival)
    return arrivals


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is no count")
    number = int(value)
    if number < 0:
        raise ValueError(f"{value!r} is negative")
    return number


def plan_arrivals(scenario: Scenario) -> list[Arrival]:
    """Return the arrivals of a fleet, from its request trace or from the seed.

    Raises:
        FileFormatError: the request trace is bad.
    """
    spec = scenario.fleet
    if spec.requests:
        found = load_arrivals(scenario.find_file(spec.requests, TEXTS_DIR))[: spec.num_requests]
        return [
            dataclasses.replace(
                arrival,
                at_s=arrival.at_s * spec.time_scale,
                context_tokens=max(1, round(arrival.context_tokens * spec.token_scale)),
            )
            for arrival in found
        ]
    rng = random.Random(scenario.seed)
    at_s = 0.0
    arrivals: list[Arrival] = []
    for _ in range(spec.num_requests):
        arrivals.append(Arrival(round(at_s, 3), 0, scenario.max_tokens))
        at_s += rng.expovariate(1.0 / spec.mean_gap_s) * spec.time_scale
    return arrivals


def plan_fleet_asks(scenario: Scenario, policy: str) -> list[tuple[float, client.Ask]]:
    """Return when which agent asks what, under one policy.

    The contexts of the scenario stand for those of the trace: a request takes the one whose length is
    closest, requests that share their first block take the same one.
    """
    arrivals = plan_arrivals(scenario)
    asks: list[tuple[float, client.Ask]] = []
    for index, arrival in enumerate(arrivals):
        question = scenario.questions[index % len(scenario.questions)]
        if not question.context and len(scenario.contexts) > 1:
            spread = arrival.block_ids[-1] if arrival.block_ids else index
            question = dataclasses.replace(
                question, context=scenario.contexts[spread % len(scenario.contexts)].name
            )
        asks.append(
            (
                arrival.at_s,
                client.Ask(
                    policy=policy,
                    request_policy=request_policy(policy),
                    context=scenario.context(question).name,
                    question=question.text,
                    deadline_s=scenario.slo_s,
                    max_tokens=max(1, min(scenario.max_tokens, arrival.answer_tokens)),
                    repetition=index,
                    estimator=scenario.estimator,
                    # An evaluation would take the worker's time from the requests that follow.
                    evaluate=False,
                    agent=index % scenario.fleet.agents,
                ),
            )
        )
    return asks


async def run_fleet(on: Stage) -> list[RequestRecord]:
    """Replay the arrivals under each policy in turn."""
    records: list[RequestRecord] = []
    plans = [plan_fleet_asks(on.scenario, policy) for policy in on.scenario.policies]
    on.progress.requests(sum(len(plan) for plan in plans))
    for plan in plans:
        for site in on.sites:
            site.proxy.restart_trace()
        records += await _run_plan(on, plan)
    return records


async def _run_plan(on: Stage, plan: Sequence[tuple[float, client.Ask]]) -> list[RequestRecord]:
    began = time.monotonic()

    async def one(at_s: float, request: client.Ask) -> RequestRecord:
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        on.progress.asking(request)
        record = await client.ask(
            on.http,
            on.sites[request.agent].agent.base_url,
            request,
            timeout_s=on.scenario.timeout_s,
        )
        on.progress.answered(record)
        return dataclasses.replace(record, started_s=round(at_s, 3))

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(one(at_s, request)) for at_s, request in plan]
    return [task.result() for task in waiting]
