"""Figures of a run, computed from its records.

Invariant: pure functions; a figure that has no data is None, never 0. Must not know: how a figure is shown.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scenarios.results import RequestRecord, RunReport


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """How one policy did over all its requests."""

    policy: str
    num_requests: int
    num_failed: int
    """Requests without a first token."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_max_s: float | None
    slo_violations: int
    """Requests whose first token came late or never."""
    bytes_mean: float | None
    """Mean chunk bytes per request."""
    choices: tuple[tuple[str, int], ...]
    """Chunks per choice, the most frequent first."""
    num_evaluated: int
    """Answers that were compared with the exact one."""
    exact_answers: int
    """Evaluated answers that are the exact one, token by token."""
    kl_mean: float | None
    """Mean over the evaluated answers. Unit: nats."""
    top1_mean: float | None


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Return the nearest-rank percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean; None of nothing."""
    held = list(values)
    return math.fsum(held) / len(held) if held else None


def figures_of(policy: str, requests: Sequence[RequestRecord]) -> PolicyFigures:
    """Compute the figures of the requests under one policy."""
    ttfts = [request.ttft_s for request in requests if request.ttft_s is not None]
    answered = [request for request in requests if request.ttft_s is not None]
    evaluations = [request.evaluation for request in requests if request.evaluation is not None]
    choices = collections.Counter(chunk.choice for request in requests for chunk in request.chunks)
    return PolicyFigures(
        policy=policy,
        num_requests=len(requests),
        num_failed=len(requests) - len(answered),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        ttft_max_s=max(ttfts, default=None),
        slo_violations=sum(not request.is_slo_met for request in requests),
        bytes_mean=mean(request.bytes_sent for request in answered),
        choices=tuple(sorted(choices.items(), key=lambda item: (-item[1], item[0]))),
        num_evaluated=sum(e.greedy_match is not None for e in evaluations),
        exact_answers=sum(e.greedy_match is True for e in evaluations),
        kl_mean=mean(e.kl for e in evaluations),
        top1_mean=mean(e.top1 for e in evaluations if e.top1 is not None),
    )


def figures(report: RunReport) -> list[PolicyFigures]:
    """Compute the figures of every policy, in the report's order."""
    return [
        figures_of(policy, [r for r in report.requests if r.policy == policy])
        for policy in report.policies
    ]


def lower_bound_s(request: RequestRecord) -> float | None:
    """Return the least time in which the request's bytes could have crossed its link.

    The distance of the TTFT to it is what the programs, the decoder and the prefill cost. None without a
    record of the link.
    """
    link = request.link
    if link is None:
        return None
    left = float(request.bytes_sent)
    for step, rate in enumerate(link.capacity_bytes_per_s):
        carried = rate * link.step_s
        if carried >= left:
            return step * link.step_s + (left / rate if rate else 0.0)
        left -= carried
    return None
