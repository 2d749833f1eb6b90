"""From a real run to the costs of a simulation, and from both to how well one foretells the other.

Pure: records in, costs and figures out. Must not know: files, programs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scenarios.config import CostSpec, LevelCost
from scenarios.errors import ReportError
from scenarios.results import HAVE_CHOICE, TEXT_CHOICE, ChunkRecord, RequestRecord, RunReport

_FP16_BYTES = 2


def costs_from(report: RunReport, base: CostSpec) -> CostSpec:
    """Measure the costs of a simulation on a real run.

    Prefill: a line through the text chunks' times per token over their positions (least squares). Decode: the
    median rate. Bytes per level: what the ingests stored. Quality: the mean KL of the answers whose chunks were
    all of one level. What the run does not show stays as in ``base``.

    Raises:
        ReportError: the run is no real one.
    """
    if report.mode != "real":
        raise ReportError(f"costs are measured on a real run, {report.scenario!r} was simulated")
    elements_per_token = base.num_layers * 2 * base.num_kv_heads * base.head_dim
    chunks = [chunk for request in report.requests for chunk in request.chunks]
    changes: dict[str, object] = {}
    line = _prefill_line([c for c in chunks if c.choice == TEXT_CHOICE])
    if line is not None:
        changes["prefill_a_s"], changes["prefill_b_s"] = line
    rates = [
        (c.token_stop - c.token_start) * elements_per_token * _FP16_BYTES / duration_s
        for c in chunks
        if c.choice not in (TEXT_CHOICE, HAVE_CHOICE) and (duration_s := _work_s(c))
    ]
    if rates:
        changes["decode_bytes_per_s"] = statistics.median(rates)
    levels = _levels(report, elements_per_token)
    if levels:
        changes["levels"] = levels
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _work_s(chunk: ChunkRecord) -> float | None:
    if chunk.decode_start_s is None or chunk.decode_end_s is None:
        return None
    return max(1e-6, chunk.decode_end_s - chunk.decode_start_s)


def _prefill_line(chunks: Sequence[ChunkRecord]) -> tuple[float, float] | None:
    """Fit seconds per token = a + b * position; both at least 0."""
    points = [
        ((c.token_start + c.token_stop) / 2, duration_s / (c.token_stop - c.token_start))
        for c in chunks
        if (duration_s := _work_s(c)) and c.token_stop > c.token_start
    ]
    if not points:
        return None
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    if len(set(xs)) < 2:
        return ys[0], 0.0
    slope, intercept = statistics.linear_regression(xs, ys)
    if slope < 0 or intercept < 0:
        return statistics.fmean(ys), 0.0
    return intercept, slope


def _levels(report: RunReport, elements_per_token: int) -> tuple[LevelCost, ...]:
    totals: dict[str, int] = {}
    tokens = sum(ingest.num_tokens for ingest in report.ingests)
    for ingest in report.ingests:
        for name, num_bytes in ingest.bytes_by_level.items():
            totals[name] = totals.get(name, 0) + num_bytes
    found: list[LevelCost] = []
    for name, num_bytes in totals.items():
        kls = [
            request.evaluation.kl
            for request in report.requests
            if request.evaluation is not None and {c.choice for c in request.chunks} == {name}
        ]
        kl = statistics.fmean(kls) if kls else None
        found.append(LevelCost(name, num_bytes * 8 / (tokens * elements_per_token), kl))
    return _interpolated(found)


def _interpolated(levels: Sequence[LevelCost]) -> tuple[LevelCost, ...]:
    """Give levels that no answer used alone a loss between their neighbours' in bits per element."""
    known = sorted((level.bits_per_element, level.kl) for level in levels if level.kl is not None)
    filled: list[LevelCost] = []
    for level in levels:
        if level.kl is not None or not known:
            filled.append(level)
            continue
        below = [kl for bits, kl in known if bits <= level.bits_per_element]
        above = [kl for bits, kl in known if bits >= level.bits_per_element]
        near = [below[-1]] if below else []
        near += [above[0]] if above else []
        filled.append(dataclasses.replace(level, kl=statistics.fmean(near)))
    return tuple(level for level in filled if level.kl is not None)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One policy's median TTFT, simulated and real."""

    policy: str
    simulated_s: float
    real_s: float

    @property
    def error(self) -> float:
        """Relative error of the simulation, as a share of the real time."""
        return abs(self.simulated_s - self.real_s) / self.real_s


def predictions(simulated: RunReport, real: RunReport) -> list[Prediction]:
    """Compare the two, policy by policy, where both have a first token."""
    found: list[Prediction] = []
    for policy in real.policies:
        pair = [_median_ttft_s(report.requests, policy) for report in (simulated, real)]
        if pair[0] is not None and pair[1] is not None:
            found.append(Prediction(policy, pair[0], pair[1]))
    return found


def _median_ttft_s(requests: Sequence[RequestRecord], policy: str) -> float | None:
    values = [r.ttft_s for r in requests if r.policy == policy and r.ttft_s is not None]
    return statistics.median(values) if values else None


def prediction_text(found: Sequence[Prediction]) -> str:
    """Return the comparison as text, with the median error."""
    if not found:
        return "no policy has a first token in both the simulation and the real run"
    width = max(len(item.policy) for item in found)
    lines = [
        f"{item.policy.ljust(width)}  simulated {item.simulated_s:7.2f} s  real {item.real_s:7.2f} s  "
        f"error {item.error:6.1%}"
        for item in found
    ]
    middle = statistics.median(item.error for item in found)
    return "\n".join([*lines, f"median error {middle:.1%}"])
