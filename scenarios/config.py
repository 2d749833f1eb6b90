"""A scenario: one TOML file, read strictly.

Invariant: an unknown key, a missing one or a bad value is a `ScenarioConfigError` that names file and
key; what is not written has the default that is written here. Must not know: processes, reports.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner import UnknownPolicy, make_policy
from scenarios import strict
from scenarios.errors import FileFormatError, ScenarioConfigError
from scenarios.importers import UNITS_BYTES_PER_S, CsvColumns, TraceFormat, load_trace
from scenarios.link import DEFAULT_DELAY_S, LinkConfig, default_queue_bytes
from scenarios.trace import BYTES_PER_S_PER_MBPS, Trace

ROOM_DIR = Path(__file__).parent
CATALOG_DIR = ROOM_DIR / "catalog"
TRACES_DIR = ROOM_DIR / "traces"
TEXTS_DIR = ROOM_DIR / "texts"

PLAIN_LEVELS = ("fp16", "int8")
"""Levels that may stand as a policy of their own, short for `fixed:<level>`."""


class Kind(enum.StrEnum):
    """How requests follow one another."""

    SEQUENCE = "sequence"
    """One after the other, each from the same moment of the trace."""
    FLEET = "fleet"
    """As they come in a request trace, over one trace of the link."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model that both programs run."""

    name: str = "smollm2-135m"
    """A name from the engine's catalog, a folder, or a Hugging Face id."""
    dtype: str = "float32"
    """Arithmetic: float32 or bfloat16."""
    device: str = "cpu"
    """Device of both engines: cpu or cuda."""


@dataclass(frozen=True, slots=True)
class UplinkSpec:
    """The link from the agent to the broker."""

    trace: str = "lte-uplink.txt"
    """File: absolute, beside the scenario's file, or one of `scenarios/traces`."""
    format: str = ""
    """Format of the file; empty looks at the file. One of mahimahi, time-rate, ping-rate, csv, iperf3."""
    column: str = ""
    """For CSV: name of the column of rates."""
    unit: str = "mbps"
    """For CSV: unit of that column."""
    time_column: str = ""
    """For CSV: name of the column of times; empty: every row is a step."""
    step_s: float = 1.0
    """For CSV without a column of times: length of a row. Unit: seconds."""
    offset_s: float = 0.0
    """Where in the trace a request begins. Unit: seconds."""
    scale: float = 1.0
    """Factor on every rate."""
    tie_level: str = ""
    """Scale the rates, once the first policy (text) has been tried, so that sending a context at this level
    takes as long as that did; empty does nothing."""
    delay_s: float | None = None
    """One-way delay; none takes the trace's own, else 20 ms. Unit: seconds."""
    queue_bytes: int | None = None
    """Room of the queue; none takes 128 KiB or 50 ms of the mean rate, whichever is more. Unit: bytes."""


@dataclass(frozen=True, slots=True)
class DownlinkSpec:
    """The link from the broker to the agent."""

    mbps: float = 50.0
    """Constant capacity. Unit: Mbit/s."""
    delay_s: float | None = None
    """One-way delay; none takes the uplink's. Unit: seconds."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A stretch of a text."""

    text: str = "handbook"
    """A bundled text (handbook), or a file: absolute, or beside the scenario's file."""
    format: str = ""
    """Format of a file; empty looks at the file. One of plain, jsonl, longchat, squad, qmsum."""
    item: int = 0
    """For a file of several texts: which one, from 0."""
    tokens: int = 0
    """Take about so many tokens, whole paragraphs; 0 takes all."""


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """A context that is ingested before the questions."""

    name: str
    """Its id at the agent."""
    parts: tuple[TextPart, ...]
    """Texts that are joined; contexts with equal first parts share a prefix."""


@dataclass(frozen=True, slots=True)
class QuestionSpec:
    """A question on a context."""

    text: str
    """The user's message."""
    context: str = ""
    """Name of the context; empty takes the first."""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Many requests from several agents, as a request trace has them."""

    agents: int = 2
    """Edge agents, each behind its own link."""
    requests: str = ""
    """Request trace: an Azure CSV or a Mooncake JSONL file; empty makes arrivals from the seed."""
    num_requests: int = 12
    """Requests taken from the trace, over all agents."""
    mean_gap_s: float = 4.0
    """Mean time between two arrivals where they are made from the seed. Unit: seconds."""
    time_scale: float = 1.0
    """Factor on the trace's times."""
    token_scale: float = 1.0
    """Factor on the trace's context lengths, to fit them to the model's window."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """What goes wrong on purpose."""

    kill_worker_s: float | None = None
    """Kill the worker so long after each request began. Unit: seconds."""
    spare_workers: int = 0
    """Workers besides the first, ready to take over."""


@dataclass(frozen=True, slots=True)
class CostSpec:
    """Speeds that `--simulate` computes with.

    The defaults were measured by the scenario `demo` on two busy cores of an AMD EPYC; `--like` takes those of
    another run.
    """

    prefill_a_s: float = 0.0035
    """Prefill of one token at position 0. Unit: seconds."""
    prefill_b_s: float = 4.2e-7
    """More for each position before it. Unit: seconds."""
    decode_bytes_per_s: float = 320e6
    """Bytes of KV cache (fp16) that the codec brings back in a second."""
    overhead_s: float = 0.15
    """From the request's arrival to the worker's acceptance, and from its first token to the agent."""
    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64
    levels: tuple[LevelCost, ...] = ()
    """Levels and what they cost; empty takes what was measured for the bundled model."""


@dataclass(frozen=True, slots=True)
class LevelCost:
    """One level of the codec in a simulation."""

    name: str
    bits_per_element: float
    """Everything counted."""
    kl: float | None = None
    """Mean KL of the next-token distributions; none: nobody measured it, so it is only used alone. Unit: nats."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run is made from."""

    name: str
    summary: str
    """One line for `--list`."""
    policies: tuple[str, ...]
    """Policies in the order in which they are tried: text, fixed:<level>, fp16, int8, cachegen, kvtide."""
    contexts: tuple[ContextSpec, ...]
    questions: tuple[QuestionSpec, ...] = ()
    kind: Kind = Kind.SEQUENCE
    seed: int = 7
    """Seed of everything random; sampling of the model is greedy."""
    slo_s: float = 10.0
    """Deadline of the first token. Unit: seconds."""
    max_tokens: int = 24
    """Longest answer. Unit: tokens."""
    repetitions: int = 1
    """How often each question is asked under each policy."""
    evaluate: bool = True
    """Whether the worker compares each answer with the one over the exact KV cache."""
    estimator: str = ""
    """Bandwidth estimator of the agent; empty takes its default."""
    reuse: bool = False
    """Whether the worker may keep chunks for the next request; a policy starts with none either way."""
    levels: tuple[str, ...] = ()
    """Levels encoded at the ingest; empty takes what the policies need."""
    chunk_tokens: int = 0
    """Tokens per chunk; 0 takes the agent's default."""
    timeout_s: float = 300.0
    """Time after which one request is given up. Unit: seconds."""
    model: ModelSpec = field(default_factory=ModelSpec)
    uplink: UplinkSpec = field(default_factory=UplinkSpec)
    downlink: DownlinkSpec = field(default_factory=DownlinkSpec)
    fleet: FleetSpec = field(default_factory=FleetSpec)
    faults: FaultSpec = field(default_factory=FaultSpec)
    cost: CostSpec = field(default_factory=CostSpec)
    source: Path = field(default=Path("scenario"), compare=False, metadata={"given": False})
    """The file that it was read from."""

    def context(self, question: QuestionSpec) -> ContextSpec:
        """Return the context of a question."""
        if not question.context:
            return self.contexts[0]
        return next(c for c in self.contexts if c.name == question.context)

    def load_trace(self) -> Trace:
        """Read the trace of the uplink, scaled.

        Raises:
            FileFormatError: the file is not what its format promises.
        """
        spec = self.uplink
        columns = None
        if spec.column:
            columns = CsvColumns(
                spec.column, unit=spec.unit, time=spec.time_column or None, step_s=spec.step_s
            )
        trace = load_trace(
            self.find_file(spec.trace, TRACES_DIR),
            trace_format=TraceFormat(spec.format) if spec.format else None,
            columns=columns,
        )
        return trace.scaled(spec.scale) if spec.scale != 1.0 else trace

    def uplink_config(self, trace: Trace) -> LinkConfig:
        """Return the uplink for a trace."""
        spec = self.uplink
        delay_s = spec.delay_s if spec.delay_s is not None else trace.delay_s
        return LinkConfig(
            trace,
            delay_s=DEFAULT_DELAY_S if delay_s is None else delay_s,
            queue_bytes=spec.queue_bytes or default_queue_bytes(trace),
            offset_s=spec.offset_s,
        )

    def tie_uplink(self, up: LinkConfig, *, num_bytes: int, text_s: float) -> LinkConfig:
        """Return the uplink on which so many bytes take as long as text took."""
        carried = up.trace.bytes_between(up.offset_s, up.offset_s + max(text_s, 1e-3))
        factor = num_bytes / max(carried, 1.0)
        return dataclasses.replace(up, trace=up.trace.scaled(factor))

    def downlink_config(self, up: LinkConfig) -> LinkConfig:
        """Return the downlink beside an uplink."""
        trace = Trace.constant(self.downlink.mbps * BYTES_PER_S_PER_MBPS, name="downlink")
        delay_s = up.delay_s if self.downlink.delay_s is None else self.downlink.delay_s
        return LinkConfig(trace, delay_s=delay_s, queue_bytes=default_queue_bytes(trace))

    def find_file(self, name: str, bundled: Path) -> Path:
        """Return a file by its path, beside the scenario's file, or bundled; the first that exists."""
        path = Path(name).expanduser()
        places = [path] if path.is_absolute() else [self.source.parent / path, bundled / path, path]
        for place in places:
            if place.is_file():
                return place
        raise FileFormatError(name, None, "there is no such file")


def request_policy(policy: str) -> str:
    """Return a policy as the agent takes it: a plain level is short for `fixed:<level>`."""
    return f"fixed:{policy}" if policy in PLAIN_LEVELS else policy


def load_scenario(name_or_path: str) -> Scenario:
    """Read a scenario by its name in the catalog or by its file.

    Raises:
        ScenarioConfigError: there is none, it is no TOML, or a key or a value is wrong.
    """
    path = CATALOG_DIR / f"{name_or_path}.toml"
    if not re.fullmatch(r"[a-z0-9-]+", name_or_path) or not path.is_file():
        path = Path(name_or_path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(catalog_names())
        problem = f"is neither a scenario of the catalog ({known}) nor a file that can be read"
        raise ScenarioConfigError(name_or_path, None, problem) from error
    return parse_scenario(text, source=path)


def catalog_names() -> list[str]:
    """Return the names of the catalog."""
    return sorted(path.stem for path in CATALOG_DIR.glob("*.toml"))


def parse_scenario(text: str, *, source: Path) -> Scenario:
    """Read a scenario from TOML.

    Raises:
        ScenarioConfigError: names the key that is wrong.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioConfigError(source, None, f"is no TOML: {error}") from error

    def refuse(key: str, problem: str) -> typing.NoReturn:
        raise ScenarioConfigError(source, key, problem)

    document.setdefault("name", source.stem)
    shorthand = {QuestionSpec: QuestionSpec, TextPart: TextPart}
    scenario = strict.build(Scenario, document, refuse, shorthand=shorthand)
    scenario = dataclasses.replace(scenario, source=source)
    _check(scenario)
    return scenario


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("seed", 0, 2**63 - 1),
    ("slo_s", 0.001, 86400),
    ("max_tokens", 1, 4096),
    ("repetitions", 1, 10_000),
    ("chunk_tokens", 0, 65_536),
    ("timeout_s", 1, 86400),
    ("uplink.offset_s", 0, 1e7),
    ("uplink.scale", 1e-6, 1e6),
    ("uplink.step_s", 1e-3, 1e5),
    ("uplink.delay_s", 0, 60),
    ("uplink.queue_bytes", 4096, 2**32),
    ("downlink.mbps", 0.01, 1e5),
    ("downlink.delay_s", 0, 60),
    ("fleet.agents", 1, 64),
    ("fleet.num_requests", 1, 100_000),
    ("fleet.mean_gap_s", 1e-3, 1e5),
    ("fleet.time_scale", 1e-6, 1e6),
    ("fleet.token_scale", 1e-6, 1e3),
    ("faults.kill_worker_s", 0, 86400),
    ("faults.spare_workers", 0, 16),
    ("cost.prefill_a_s", 0, 100),
    ("cost.prefill_b_s", 0, 100),
    ("cost.decode_bytes_per_s", 1, 1e15),
    ("cost.overhead_s", 0, 60),
)


def _check(scenario: Scenario) -> None:
    """Refuse values that are of the right type but make no sense."""

    def refuse(key: str, problem: str) -> typing.NoReturn:
        raise ScenarioConfigError(scenario.source, key, problem)

    for key, low, high in _RANGES:
        value: Any = scenario
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            refuse(key, f"is {value}, must be from {low:g} to {high:g}")
    check_policies(scenario.policies, scenario.source)
    if not scenario.contexts:
        refuse("contexts", "there must be at least one")
    names = [context.name for context in scenario.contexts]
    for index, context in enumerate(scenario.contexts):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", context.name):
            refuse(f"contexts[{index}].name", f"{context.name!r} cannot be a context's id")
        if names.count(context.name) > 1:
            refuse(f"contexts[{index}].name", f"{context.name!r} is used twice")
        if not context.parts:
            refuse(f"contexts[{index}].parts", "there must be at least one")
    if not scenario.questions:
        refuse("questions", "there must be at least one")
    for index, question in enumerate(scenario.questions):
        if question.context and question.context not in names:
            refuse(f"questions[{index}].context", f"there is no context {question.context!r}")
        if not question.text.strip():
            refuse(f"questions[{index}].text", "is empty")
    if scenario.uplink.format and scenario.uplink.format not in list(TraceFormat):
        refuse("uplink.format", f"must be one of {', '.join(TraceFormat)}")
    if scenario.uplink.unit not in UNITS_BYTES_PER_S:
        refuse("uplink.unit", f"must be one of {', '.join(UNITS_BYTES_PER_S)}")
    if scenario.uplink.tie_level and (
        scenario.policies[0] != "text" or scenario.kind is not Kind.SEQUENCE
    ):
        refuse("uplink.tie_level", "needs a sequence whose first policy is text")
    if scenario.faults.kill_worker_s is not None and scenario.faults.spare_workers == 0:
        refuse("faults.spare_workers", "a killed worker needs a spare one")


def check_policies(policies: tuple[str, ...], source: Path | str) -> None:
    """Refuse a list of policies that is empty, has one twice, or an unknown one.

    Raises:
        ScenarioConfigError: names the policy.
    """
    if not policies:
        raise ScenarioConfigError(source, "policies", "there must be at least one")
    for policy in policies:
        try:
            make_policy(policy)
        except UnknownPolicy as error:
            raise ScenarioConfigError(source, "policies", str(error)) from error
        if policies.count(policy) > 1:
            raise ScenarioConfigError(source, "policies", f"{policy!r} is there twice")
