"""Running a scenario in virtual time: the planner's own code, the link model, a cost model, no programs.

Invariant: the report depends on the scenario, its files and the code alone, byte for byte; nothing reads a
clock. What is simplified: the worker's claim is a constant, requests that share a link or a worker are served
in the order of their arrival, and an answer's quality is the measured loss of its levels. Must not know:
processes, HTTP.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner import (
    TEXT,
    ChunkOptions,
    Decision,
    LevelUnavailable,
    default_estimator,
    make_estimator,
    make_policy,
)
from planner.cost import CostModel, LevelCost, WorkerSpeeds
from planner.simulate import (
    ChunkRecord as PlannedChunk,
    SimulatedLink,
    SimulatedRequest,
    TransferRecord,
    simulate_transfer,
)
from scenarios import client, levels, machine
from scenarios.config import Kind, Scenario
from scenarios.errors import ScenarioConfigError
from scenarios.fleet import plan_fleet_asks
from scenarios.link import LinkConfig
from scenarios.replay import plan_asks
from scenarios.results import (
    HAVE_CHOICE,
    ChunkRecord,
    EvaluationRecord,
    IngestRecord,
    LinkRecord,
    RequestRecord,
    RunReport,
)
from scenarios.trace import Trace
from scenarios.workload import CHARS_PER_TOKEN, build_context

DEFAULT_CHUNK_TOKENS = 1536
"""What the agent takes where a scenario names none."""
CHAT_FRAME_TOKENS = 25
"""Tokens of the chat template around a question."""
SILENCE_S = 5.0
"""After so long the agent takes a worker for lost."""
SLOWNESS = (0.97, 1.06)
"""Actual over expected prefill time, drawn anew for each request."""
LINK_STEP_S = 0.1
_FP16_BYTES = 2


class _SharedLink:
    """A link on which requests follow one another; remembers what was sent when."""

    def __init__(self, up: LinkConfig) -> None:
        self.trace: Trace = up.trace
        self.offset_s = up.offset_s
        self.busy_until_s = 0.0
        self.sent: list[tuple[float, float, float]] = []
        """(begin, end, bytes) of each segment, in seconds of the run."""

    def finish_s(self, start_s: float, num_bytes: float) -> float:
        """Return when so many bytes have left, if they are there at ``start_s``."""
        begin_s = max(start_s, self.busy_until_s)
        end_s = self.trace.finish_s(self.offset_s + begin_s, num_bytes) - self.offset_s
        self.busy_until_s = end_s
        self.sent.append((begin_s, end_s, num_bytes))
        return end_s

    def cut(self, at_s: float) -> None:
        """Forget what had not left by a moment: its sender gave up."""
        self.sent = [segment for segment in self.sent if segment[0] < at_s]
        self.busy_until_s = min(self.busy_until_s, at_s)

    def sent_bytes(self, until_s: float) -> int:
        """Return the bytes that had left by a moment."""
        return round(sum(count for _, end_s, count in self.sent if end_s <= until_s))

    def record(self, start_s: float, stop_s: float) -> LinkRecord:
        """Return what the link could carry and carried from one moment to another."""
        count = max(1, math.ceil((stop_s - start_s) / LINK_STEP_S))
        carried = [0.0] * count
        for begin_s, end_s, num_bytes in self.sent:
            first = max(0, int((begin_s - start_s) / LINK_STEP_S))
            last = min(count - 1, int((end_s - start_s) / LINK_STEP_S))
            if end_s <= start_s or last < first:
                continue
            for step in range(first, last + 1):
                left = max(begin_s, start_s + step * LINK_STEP_S)
                right = min(end_s, start_s + (step + 1) * LINK_STEP_S)
                share = (right - left) / (end_s - begin_s) if end_s > begin_s else 1.0
                carried[step] += num_bytes * max(0.0, share)
        begin_s = self.offset_s + start_s
        capacity = self.trace.binned(begin_s, begin_s + count * LINK_STEP_S, LINK_STEP_S)
        return LinkRecord(
            LINK_STEP_S,
            tuple(round(rate) for rate in capacity),
            tuple(round(value / LINK_STEP_S) for value in carried),
        )


@dataclass(frozen=True, slots=True)
class _Span:
    """One chunk of a context."""

    index: int
    token_start: int
    token_stop: int
    key: bytes
    """Equal for chunks with the same text up to their end."""


@dataclass(eq=False, slots=True)
class _World:
    """Everything that requests of one policy share."""

    scenario: Scenario
    spans: Mapping[str, Sequence[_Span]]
    rng: random.Random
    up: LinkConfig
    link: _SharedLink
    engine_free_s: float = 0.0
    held: set[bytes] = field(default_factory=set)
    """Chunks that the worker keeps."""


def simulate(scenario: Scenario) -> RunReport:
    """Run a scenario in virtual time.

    Raises:
        ScenarioError: an input is bad.
    """
    trace = scenario.load_trace()
    up = scenario.uplink_config(trace)
    texts = {context.name: build_context(scenario, context) for context in scenario.contexts}
    spans = {name: _spans(scenario, text) for name, text in texts.items()}
    ingests = [_ingest(scenario, name, found) for name, found in spans.items()]
    requests: list[RequestRecord] = []
    for index, policy in enumerate(scenario.policies):
        if index == 1 and scenario.uplink.tie_level:
            up = _tie(scenario, up, ingests, requests[0])
        requests += _simulate_policy(scenario, policy, spans, up)
    return RunReport(
        scenario=scenario.name,
        summary=scenario.summary,
        mode="simulated",
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
        machine="",
        started_at="",
        duration_s=0.0,
        ingests=tuple(ingests),
        requests=tuple(requests),
    )


def _spans(scenario: Scenario, text: str) -> list[_Span]:
    size = scenario.chunk_tokens or DEFAULT_CHUNK_TOKENS
    num_tokens = max(1, round(len(text) / CHARS_PER_TOKEN))
    found: list[_Span] = []
    for index, start in enumerate(range(0, num_tokens, size)):
        stop = min(num_tokens, start + size)
        prefix = text[: round(stop * CHARS_PER_TOKEN)]
        key = hashlib.sha256(f"{stop}:{prefix}".encode()).digest()
        found.append(_Span(index, start, stop, key))
    return found


def _chunk_bytes(scenario: Scenario, num_tokens: int, bits_per_element: float) -> int:
    cost = scenario.cost
    elements = num_tokens * cost.num_layers * 2 * cost.num_kv_heads * cost.head_dim
    return math.ceil(elements * bits_per_element / 8)


def _ingest(scenario: Scenario, name: str, spans: Sequence[_Span]) -> IngestRecord:
    num_tokens = spans[-1].token_stop
    return IngestRecord(
        context=name,
        num_tokens=num_tokens,
        num_chunks=len(spans),
        bytes_by_level={
            level.name: _chunk_bytes(scenario, num_tokens, level.bits_per_element)
            for level in levels.level_costs(scenario)
        },
        duration_s=0.0,
    )


def _tie(
    scenario: Scenario, up: LinkConfig, ingests: Sequence[IngestRecord], text: RequestRecord
) -> LinkConfig:
    level = scenario.uplink.tie_level
    ingest = next(i for i in ingests if i.context == text.context)
    if text.ttft_s is None or level not in ingest.bytes_by_level:
        raise ScenarioConfigError(scenario.source, "uplink.tie_level", f"there is no level {level}")
    return scenario.tie_uplink(up, num_bytes=ingest.bytes_by_level[level], text_s=text.ttft_s)


def _simulate_policy(
    scenario: Scenario, policy: str, spans: Mapping[str, Sequence[_Span]], up: LinkConfig
) -> Iterator[RequestRecord]:
    if scenario.kind is Kind.FLEET:
        plan = plan_fleet_asks(scenario, policy)
        count = scenario.fleet.agents
    else:
        plan = [(0.0, ask) for ask in plan_asks(scenario) if ask.policy == policy]
        count = 1
    # The same draws under every policy, so that differences come from the policies alone.
    rng = random.Random(scenario.seed)
    links = [
        dataclasses.replace(up, offset_s=up.offset_s + index * up.trace.duration_s / count)
        for index in range(count)
    ]
    worlds = [_World(scenario, spans, rng, link, _SharedLink(link)) for link in links]
    held: set[bytes] = set()
    engine_free_s = 0.0
    for at_s, request in plan:
        world = worlds[request.agent]
        if scenario.kind is Kind.SEQUENCE:  # every request meets the trace's first moment
            world.link, engine_free_s = _SharedLink(world.up), 0.0
        world.engine_free_s, world.held = engine_free_s, held
        record = _simulate_request(world, request, at_s)
        if record.ttft_s is not None:
            engine_free_s = max(engine_free_s, at_s + record.ttft_s)
        if scenario.reuse:
            held |= {span.key for span in spans[request.context]}
        yield record


def _simulate_request(world: _World, request: client.Ask, at_s: float) -> RequestRecord:
    scenario, cost = world.scenario, world.scenario.cost
    model = CostModel(
        WorkerSpeeds(
            prefill_a_s=cost.prefill_a_s,
            prefill_b_s=cost.prefill_b_s,
            decode_bytes_per_s=dict.fromkeys(
                ("fp16", "int8", "cachegen", "klt"), cost.decode_bytes_per_s
            ),
        ),
        kv_bytes_per_token=cost.num_layers * 2 * cost.num_kv_heads * cost.head_dim * _FP16_BYTES,
    )
    spans = world.spans[request.context]
    missing = [span for span in spans if span.key not in world.held]
    options = [_options(scenario, model, span) for span in missing]
    num_tokens = spans[-1].token_stop
    question_tokens = round(len(request.question) / CHARS_PER_TOKEN) + CHAT_FRAME_TOKENS
    tail_s = model.prefill_s(num_tokens, num_tokens + question_tokens)
    kept_s = sum(
        model.decode_s("cachegen", span.token_stop - span.token_start)
        for span in spans
        if span.key in world.held
    )
    wait_s = max(0.0, world.engine_free_s - at_s) + kept_s
    slowness = world.rng.uniform(*SLOWNESS)

    def transfer(begin_s: float) -> TransferRecord:
        try:
            return simulate_transfer(
                SimulatedRequest(
                    chunks=tuple(options),
                    deadline_s=request.deadline_s - (begin_s - at_s),
                    tail_prefill_s=tail_s,
                    engine_slowness=slowness,
                    queue_delay_s=wait_s,
                ),
                SimulatedLink(world.link, delay_s=world.up.delay_s),
                make_policy(request.request_policy),
                make_estimator(request.estimator or default_estimator(request.request_policy)),
                start_s=begin_s,
            )
        except LevelUnavailable as error:
            raise ScenarioConfigError(scenario.source, "policies", str(error)) from error

    begin_s = at_s + cost.overhead_s / 2
    done = transfer(begin_s)
    lost_bytes, changes = 0, 0
    kill_s = scenario.faults.kill_worker_s
    if kill_s is not None and begin_s + done.ttft_s > at_s + kill_s:
        # The worker is gone with what it had; once its silence is noticed, another one starts anew.
        world.link.cut(at_s + kill_s)
        lost_bytes, changes = world.link.sent_bytes(at_s + kill_s), 1
        begin_s = at_s + kill_s + SILENCE_S
        done = transfer(begin_s)
    record = _to_record(world, request, at_s, begin_s, done, tail_s)
    return dataclasses.replace(
        record, bytes_sent=done.num_bytes + lost_bytes, worker_changes=changes
    )


def _options(scenario: Scenario, model: CostModel, span: _Span) -> ChunkOptions:
    num_tokens = span.token_stop - span.token_start
    return model.options(
        span.index,
        span.token_start,
        span.token_stop,
        [
            LevelCost(
                level.name, _chunk_bytes(scenario, num_tokens, level.bits_per_element), level.kl
            )
            for level in levels.level_costs(scenario)
        ],
    )


def _to_record(
    world: _World,
    request: client.Ask,
    at_s: float,
    begin_s: float,
    done: TransferRecord,
    tail_s: float,
) -> RequestRecord:
    spans = world.spans[request.context]
    num_tokens = spans[-1].token_stop
    shift_s = begin_s - at_s
    is_endless = math.isinf(done.ttft_s)
    ttft_s = (
        None if is_endless else round(done.ttft_s + shift_s + world.scenario.cost.overhead_s / 2, 6)
    )
    by_index = {chunk.index: chunk for chunk in done.chunks}
    begun = [span for span in spans if span.index not in by_index or by_index[span.index].choice]
    chunks = tuple(
        _chunk(span, by_index[span.index], shift_s, world)
        if span.index in by_index
        else ChunkRecord(span.index, span.token_start, span.token_stop, HAVE_CHOICE, 0)
        for span in begun
    )
    stop_s = at_s + (ttft_s if ttft_s is not None else request.deadline_s)
    return RequestRecord(
        policy=request.policy,
        context=request.context,
        question=request.question,
        repetition=request.repetition,
        deadline_s=request.deadline_s,
        num_tokens=num_tokens,
        ttft_s=ttft_s,
        bytes_sent=done.num_bytes,
        chunks=chunks,
        prefill_start_s=None if ttft_s is None else round(max(0.0, ttft_s - tail_s), 6),
        prefill_end_s=ttft_s,
        last_token_s=ttft_s,
        decisions=tuple(_decision(at, decision, shift_s) for at, decision in done.decisions),
        evaluation=EvaluationRecord(kl=done.loss / num_tokens, top1=None, greedy_match=None),
        link=world.link.record(at_s, stop_s + LINK_STEP_S),
        error="the link never carried it all" if is_endless else "",
        started_s=round(at_s, 3),
        agent=request.agent,
    )


def _decision(at_s: float, decision: Decision, shift_s: float) -> dict[str, object]:
    """Return a decision as the agent logs it."""

    def finite(value: float | None, add_s: float = 0.0) -> float | None:
        return None if value is None or math.isinf(value) else round(value + add_s, 6)

    return {
        "at_s": round(at_s + shift_s, 6),
        "chunk": decision.chunk_index,
        "choice": decision.choice.name,
        "reason": decision.reason.value,
        "abandons": decision.abandons,
        "meets_deadline": decision.meets_deadline,
        "expected_ttft_s": finite(decision.expected_ttft_s, shift_s),
        "ttft_quantiles": [[q, finite(at, shift_s)] for q, at in decision.ttft_quantiles],
        "rate_bytes_per_s": finite(decision.rate_bytes_per_s),
    }


def _chunk(span: _Span, planned: PlannedChunk, shift_s: float, world: _World) -> ChunkRecord:
    def since_arrival(value_s: float) -> float | None:
        return None if math.isinf(value_s) else round(value_s + shift_s, 6)

    num_bytes = 0
    if planned.choice != TEXT:
        bits = {level.name: level.bits_per_element for level in levels.level_costs(world.scenario)}
        tokens = span.token_stop - span.token_start
        num_bytes = _chunk_bytes(world.scenario, tokens, bits[planned.choice])
    return ChunkRecord(
        index=span.index,
        token_start=span.token_start,
        token_stop=span.token_stop,
        choice=planned.choice,
        num_bytes=num_bytes,
        epoch=planned.epoch,
        send_start_s=since_arrival(planned.begun_s),
        acked_s=since_arrival(planned.begun_s if planned.choice == TEXT else planned.arrived_s),
        decode_start_s=since_arrival(planned.work_begun_s),
        decode_end_s=since_arrival(planned.ready_s),
        ready_s=since_arrival(planned.ready_s),
    )
