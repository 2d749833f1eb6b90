"""The planner's study in virtual time: workloads, contestants, and what is measured of them.

One-way link and worker are those of `planner.simulate`. Each contestant sees the same requests at the
same moments of the same trace. Scaled sizes: the context of a trace is as long as the trace's mean rate
carries at the second finest level in `TARGET_S`, so that every link is equally tight; deadlines vary
around that. What a site could have learned, it learned from one half of the trace; the figures
are from the other half, and then the halves change places.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from planner import ChunkOptions, Estimator, Policy, make_estimator, make_policy
from planner.adaptive import AdaptiveConfig, AdaptivePolicy
from planner.baselines import Oracle
from planner.cost import CostModel, LevelCost, WorkerSpeeds
from planner.estimator import PredictiveEstimator
from planner.policies import CachegenPolicy
from planner.simulate import (
    SimulatedLink,
    SimulatedRequest,
    TransferRecord,
    simulate_transfer,
)
from planner.site import SiteModel
from scenarios.importers import CsvColumns, load_trace
from scenarios.trace import Trace

UPLINKS: Final = (
    ("mahimahi/ATT-LTE-driving-2016.up", None),
    ("mahimahi/ATT-LTE-driving.up", None),
    ("mahimahi/TMobile-LTE-short.up", None),
    ("mahimahi/Verizon-EVDO-driving.up", None),
    ("starlink/autobahn_throughput_rows560-1579.csv", ("timestamp_start_ul", "upload")),
)
"""Every uplink trace of the data folder, and the columns of time and Mbit/s where it is CSV."""
TARGET_S: Final = 5.0
"""Transfer time that contexts are scaled to. Unit: seconds at the mean rate and `klt:1`."""
DEADLINE_RANGE: Final = (0.5, 1.5)
"""Deadlines as shares of `TARGET_S`, uniform."""
PREFILL_RANGE: Final = (1.0, 4.0)
"""Prefill of the whole context as a multiple of the deadline, uniform: at 1 recomputing everything
just fails, at 4 it helps for a part."""
DEADLINE_S_PAPER: Final = (0.5, 1.0)
"""SLOs of the paper's set-up. Unit: seconds."""
PAPER_CHUNKS: Final = 10
PAPER_TOKENS: Final = 1500
PAPER_ELEMENTS: Final = 32 * 2 * 4096
"""KV elements per token of a 7B-class model without grouped heads."""
PAPER_GBPS: Final = (0.1, 10.0)
PAPER_STEP_S: Final = 0.1
"""How long one draw of the rate lasts: the paper draws one per chunk, and ten chunks fill its SLO of 1 s."""
PAPER_PREFILL_TOKENS_PER_S: Final = 7000.0
"""Of a data-centre GPU on a 7B model: recomputing all 15,000 tokens takes over 2 s."""
PAPER_DECODE_BYTES_PER_S: Final = 50e9
"""fp16 KV per second out of a GPU decoder, so that decoding is not what decides."""
NUM_CHUNKS: Final = 8
CHUNK_TOKENS: Final = 768
SMOLLM2_ELEMENTS_PER_TOKEN: Final = 11_520
"""30 layers x 2 x 3 heads x 64."""
LEVEL_SETS: Final = {
    "klt": (
        ("klt:0", 1.1, 0.002),
        ("klt:1", 0.8, 0.005),
        ("klt:2", 0.55, 0.017),
        ("klt:3", 0.4, 0.038),
    ),
    "cachegen": (("cachegen:0", 3.6, 0.033), ("cachegen:1", 2.7, 0.226)),
}
"""Level, bits per KV element, mean KL per token: measured on SmolLM2-135M."""
SLOWNESS: Final = (0.97, 1.05)
"""How much slower than predicted the worker really is, uniform."""
NUM_TRAINING: Final = 24
"""Requests of the first half that a site has learned from."""
TAIL_S: Final = 0.05
DELAY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy, and how its estimator is made."""

    label: str
    policy: Callable[[], Policy]
    estimator: Callable[[SiteModel, SimulatedLink, float], Estimator]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests on one trace, in time order, in passes that share nothing but what was trained."""

    name: str
    link: SimulatedLink
    training: tuple[tuple[float, SimulatedRequest], ...]
    passes: tuple[tuple[tuple[float, SimulatedRequest], ...], ...]


def named(policy: str, estimator: str) -> Contestant:
    """A contestant out of the registries."""
    return Contestant(
        f"{policy} / {estimator}",
        lambda: make_policy(policy),
        lambda site, link, start_s: make_estimator(estimator),
    )


def contestants(level_set: str) -> list[Contestant]:
    """All of them, the oracle last."""
    levels = [name for name, _, _ in LEVEL_SETS[level_set]]
    rows = [named("text", "last-sample")]
    rows += [named(f"fixed:{level}", "last-sample") for level in levels]
    rows += [
        Contestant(
            f"cachegen / {estimator}",
            lambda: CachegenPolicy(level_set=level_set),
            lambda site, link, start_s, e=estimator: make_estimator(e),  # type: ignore[misc]
        )
        for estimator in ("last-sample", "median-rate", "ewma", "harmonic-mean")
    ]
    rows.append(named("robust-mpc", "robust-mpc"))
    rows.append(named("kvtide", "harmonic-mean"))
    rows.append(
        Contestant(
            "kvtide", lambda: AdaptivePolicy(), lambda site, link, s: PredictiveEstimator(site)
        )
    )
    rows.append(Contestant("oracle", lambda: AdaptivePolicy(name="oracle"), _oracle))
    return rows


def _oracle(site: SiteModel, link: SimulatedLink, start_s: float) -> Estimator:
    capacity = link.capacity
    assert isinstance(capacity, Trace)
    return Oracle(capacity.bytes_until, delay_s=link.delay_s, busy_since_s=start_s)


def chunk_options(
    level_set: str, bytes_per_token: float, full_prefill_s: float, rng: random.Random
) -> tuple[ChunkOptions, ...]:
    """Chunks whose finest but one level has so many bytes per token, sizes varying by 5 %."""
    levels = LEVEL_SETS[level_set]
    unit = bytes_per_token / levels[min(1, len(levels) - 1)][1]
    tokens = NUM_CHUNKS * CHUNK_TOKENS
    # Attention: the last token costs twice the first one.
    a_s = full_prefill_s / (1.5 * tokens)
    speeds = WorkerSpeeds(a_s, a_s / tokens, {level_set: 500e6})
    model = CostModel(speeds, kv_bytes_per_token=2 * SMOLLM2_ELEMENTS_PER_TOKEN)
    chunks = []
    for index in range(NUM_CHUNKS):
        size = rng.uniform(0.95, 1.05) * CHUNK_TOKENS * unit
        rows = [LevelCost(name, round(size * bits), kl) for name, bits, kl in levels]
        start = index * CHUNK_TOKENS
        chunks.append(model.options(index, start, start + CHUNK_TOKENS, rows))
    return tuple(chunks)


def make_request(level_set: str, mean_rate: float, rng: random.Random) -> SimulatedRequest:
    """One request scaled to a link."""
    deadline_s = TARGET_S * rng.uniform(*DEADLINE_RANGE)
    bytes_per_token = mean_rate * TARGET_S / (NUM_CHUNKS * CHUNK_TOKENS)
    full_prefill_s = deadline_s * rng.uniform(*PREFILL_RANGE)
    return SimulatedRequest(
        chunks=chunk_options(level_set, bytes_per_token, full_prefill_s, rng),
        deadline_s=deadline_s,
        tail_prefill_s=TAIL_S,
        engine_slowness=rng.uniform(*SLOWNESS),
        decoder_slowness=rng.uniform(*SLOWNESS),
    )


def real_workload(
    name: str, trace: Trace, level_set: str, *, num_requests: int, seed: int, fold: int
) -> Workload:
    """Requests on a trace: training in one half, passes through the other.

    Args:
        fold: 0 trains on the first half, 1 on the second.
    """
    rng = random.Random(f"{seed} {name} {level_set} {fold}")
    rate = trace.mean_bytes_per_s
    segment = int(min(64 * 1024, max(8 * 1024, rate * 0.02)))
    link = SimulatedLink(trace, DELAY_S, segment)
    half_s = trace.duration_s / 2
    train_s, test_s = (0.0, half_s) if fold == 0 else (half_s, 0.0)
    training = tuple(
        (start_s, make_request(level_set, rate, rng))
        for start_s in sorted(
            train_s + rng.uniform(0.0, half_s - 2 * TARGET_S) for _ in range(NUM_TRAINING)
        )
    )
    passes = []
    count = 0
    while count < num_requests:
        start_s = test_s + rng.uniform(0.0, 3 * TARGET_S)
        rows = []
        while start_s < test_s + half_s - TARGET_S and count < num_requests:
            rows.append((start_s, make_request(level_set, rate, rng)))
            start_s += rng.uniform(2.5, 5.0) * TARGET_S
            count += 1
        passes.append(tuple(rows))
    return Workload(name, link, training, tuple(passes))


def independent_workload(
    level_set: str, deadline_s: float, *, num_requests: int, seed: int
) -> Workload:
    """The paper's set-up: every chunk's rate drawn independently, uniform from 0.1 to 10 Gbit/s."""
    rng = random.Random(f"{seed} independent {level_set} {deadline_s}")
    spacing_s = 4.0
    duration_s = spacing_s * (num_requests + NUM_TRAINING + 2)
    starts = [index * PAPER_STEP_S for index in range(round(duration_s / PAPER_STEP_S))]
    rates = [rng.uniform(*PAPER_GBPS) * 1e9 / 8 for _ in starts]
    trace = Trace("independent", tuple(starts), tuple(rates), duration_s)
    link = SimulatedLink(trace, delay_s=0.001, segment_bytes=2 * 1024 * 1024)
    a_s = 1.0 / PAPER_PREFILL_TOKENS_PER_S / 1.5
    speeds = WorkerSpeeds(
        a_s, a_s / (PAPER_CHUNKS * PAPER_TOKENS), {level_set: PAPER_DECODE_BYTES_PER_S}
    )
    model = CostModel(speeds, kv_bytes_per_token=2 * PAPER_ELEMENTS)
    requests = []
    for index in range(num_requests + NUM_TRAINING):
        chunks = []
        for chunk in range(PAPER_CHUNKS):
            rows = [
                LevelCost(name, round(PAPER_TOKENS * PAPER_ELEMENTS * bits / 8), kl)
                for name, bits, kl in LEVEL_SETS[level_set]
            ]
            start = chunk * PAPER_TOKENS
            chunks.append(model.options(chunk, start, start + PAPER_TOKENS, rows))
        request = SimulatedRequest(
            chunks=tuple(chunks),
            deadline_s=deadline_s,
            tail_prefill_s=0.01,
            engine_slowness=rng.uniform(*SLOWNESS),
            decoder_slowness=rng.uniform(*SLOWNESS),
        )
        requests.append((spacing_s * index + rng.uniform(0.0, 1.0), request))
    name = f"independent, SLO {deadline_s} s"
    return Workload(name, link, tuple(requests[:NUM_TRAINING]), (tuple(requests[NUM_TRAINING:]),))


def trace_class(name: str) -> str:
    """The collection that a trace is from."""
    return "starlink" if "starlink" in name else "mahimahi"


def load_uplinks(folder: Path) -> list[tuple[str, Trace]]:
    """Read every uplink trace."""
    found = []
    for name, columns in UPLINKS:
        spec = (
            None if columns is None else CsvColumns(rate=columns[1], unit="mbps", time=columns[0])
        )
        found.append(
            (
                Path(name).name if "starlink" not in name else "starlink-upload",
                load_trace(folder / name, columns=spec),
            )
        )
    return found


def train(workload: Workload) -> SiteModel:
    """What a site could have learned before: the requests of the first half, sent as kvtide does."""
    site = SiteModel()
    for start_s, request in workload.training:
        simulate_transfer(
            request, workload.link, AdaptivePolicy(), PredictiveEstimator(site), start_s=start_s
        )
    return site


def run(workload: Workload, contestant: Contestant, site: SiteModel) -> list[TransferRecord]:
    """Carry every request through; each pass begins with what was trained."""
    records = []
    for requests in workload.passes:
        own = SiteModel.from_plain(site.to_plain())
        for start_s, request in requests:
            estimator = contestant.estimator(own, workload.link, start_s)
            records.append(
                simulate_transfer(
                    request, workload.link, contestant.policy(), estimator, start_s=start_s
                )
            )
    return records


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the table."""

    label: str
    num_requests: int
    violations: float
    """Share of requests whose first token came after the deadline."""
    kl_per_token: float
    num_bytes: float
    """Mean per request."""
    ttft_p50: float
    """Share of the deadline."""
    ttft_p95: float


def score(
    label: str, records: Sequence[TransferRecord], num_tokens: int = NUM_CHUNKS * CHUNK_TOKENS
) -> Score:
    """Sum up; ``num_tokens`` is the length of each context."""
    count = len(records)
    shares = sorted(record.ttft_s / record.deadline_s for record in records)
    return Score(
        label,
        count,
        sum(not record.meets_deadline for record in records) / count,
        sum(record.loss for record in records) / count / num_tokens,
        sum(record.num_bytes for record in records) / count,
        shares[count // 2],
        shares[min(count - 1, math.ceil(0.95 * count) - 1)],
    )


def with_config(label: str, **changes: object) -> Contestant:
    """The policy with another configuration, on the predictive estimator."""
    config = dataclasses.replace(AdaptiveConfig(), **changes)  # type: ignore[arg-type]
    return Contestant(
        label, lambda: AdaptivePolicy(config), lambda site, link, s: PredictiveEstimator(site)
    )


QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Quantiles of the time to deliver that are checked."""
PROBE_TIMES_S: Final = (0.3, 1.0, 2.5, 5.0)
"""Moments after a transfer's start at which the estimator is asked, besides its very start."""
PROBE_SIZES_S: Final = (0.5, 1.5, 4.0)
"""Sizes asked about, as seconds at the trace's mean rate."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One question to an estimator, and what came."""

    asked_s: float
    """Since the transfer's start."""
    size_s: float
    actual_s: float
    quantiles_s: tuple[float, ...]

    def covers(self, index: int) -> bool:
        """Whether the outcome is within that quantile."""
        return self.actual_s <= self.quantiles_s[index]


class _Probe:
    """Asks an estimator at set moments while a transfer keeps the link busy."""

    def __init__(
        self, link: SimulatedLink, estimator: Estimator, start_s: float, mean: float
    ) -> None:
        self._link, self._estimator, self._start_s, self._mean = link, estimator, start_s, mean
        self._due = list(PROBE_TIMES_S)
        self.forecasts: list[Forecast] = []

    def __call__(self, now: float, in_flight: int, link_free_s: float) -> None:
        if self._due and now - self._start_s >= self._due[0]:
            self._due.pop(0)
            self.ask(now, in_flight, link_free_s)

    def ask(self, now: float, in_flight: int, link_free_s: float) -> None:
        for size_s in PROBE_SIZES_S:
            num_bytes = size_s * self._mean
            done_s = self._link.capacity.finish_s(max(now, link_free_s), num_bytes)
            quantiles = tuple(
                self._estimator.time_quantile_s(num_bytes + in_flight, quantile, now=now)
                for quantile in QUANTILES
            )
            actual_s = done_s + self._link.delay_s - now
            self.forecasts.append(Forecast(now - self._start_s, size_s, actual_s, quantiles))


def calibrate(
    workload: Workload, mean_rate: float, site: SiteModel, make: Callable[[SiteModel], Estimator]
) -> list[Forecast]:
    """Ask an estimator all through transfers that keep the link busy for `PROBE_TIMES_S` and longer."""
    forecasts = []
    num_bytes = round(mean_rate * 2 * max(PROBE_TIMES_S))
    level = LevelCost("fp16", num_bytes, 0.0)
    model = CostModel(WorkerSpeeds(1.0), kv_bytes_per_token=1)
    request = SimulatedRequest((model.options(0, 0, 1, [level]),), deadline_s=60.0)
    for requests in workload.passes:
        own = SiteModel.from_plain(site.to_plain())
        for start_s, _ in requests:
            estimator = make(own)
            probe = _Probe(workload.link, estimator, start_s, mean_rate)
            probe.ask(start_s, 0, start_s)
            simulate_transfer(
                request, workload.link, make_policy("fixed:fp16"), estimator,
                start_s=start_s, observer=probe,
            )  # fmt: skip
            forecasts += probe.forecasts
    return forecasts
