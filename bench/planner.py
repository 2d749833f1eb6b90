"""Every policy side by side, in virtual time: ``python -m bench.planner [--traces DIR] [--json OUT]``.

Prints, for the real uplink traces and for the paper's independent rates: violations of the deadline,
mean quality loss, bytes, and the distance to the oracle; then how well the estimator's quantiles cover
what came, how long a decision takes, and the optimizer against brute force. Nothing here depends on the
machine's speed except the decision time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import planner_study as study
from planner import Choice, ChunkOptions, __file__ as planner_file
from planner.curve import DeliveryCurve
from planner.estimator import PredictiveEstimator
from planner.optimizer import PlanRequest, choose, least_loss
from planner.simulate import TransferRecord

BRUTE_CASES = 200


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("KVTIDE_DATA")
    folder = Path(default) if default else Path(planner_file).resolve().parents[2] / "shared/data"
    parser.add_argument("--traces", type=Path, default=folder / "traces")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=60, help="per trace and half")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--level-set", choices=sorted(study.LEVEL_SETS), default="klt")
    arguments = parser.parse_args(argv)
    report: dict[str, Any] = {"seed": arguments.seed, "level_set": arguments.level_set}
    report["optimizer"] = optimizer_report()
    if arguments.traces.is_dir():
        report["real"], report["calibration"] = real_report(arguments)
    else:
        print(f"no traces at {arguments.traces}: the real links are left out")
    report["independent"] = independent_report(arguments)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        print(f"wrote {arguments.json}")
    return 0


# ---- tables --------------------------------------------------------------------------------------


def print_table(title: str, scores: Sequence[study.Score], feasible: dict[str, float]) -> None:
    """Print one table, the oracle last; ``feasible`` is the share of misses that it would not have had."""
    oracle = scores[-1]
    print(f"\n{title} ({scores[0].num_requests} requests)")
    print(
        f"{'policy / estimator':28s} {'late':>7s} {'to oracle':>10s} {'avoidable':>10s}"
        f" {'KL/token':>9s} {'MB':>8s} {'TTFT/deadline p50':>18s} {'p95':>6s}"
    )
    for row in scores:
        print(
            f"{row.label:28s} {row.violations:7.1%} {100 * (row.violations - oracle.violations):+7.1f} pp"
            f" {feasible[row.label]:10.1%} {row.kl_per_token:9.5f} {row.num_bytes / 1e6:8.2f}"
            f" {row.ttft_p50:18.2f} {row.ttft_p95:6.2f}"
        )


def avoidable(records: Sequence[TransferRecord], oracle: Sequence[TransferRecord]) -> float:
    """Share of the requests that the oracle met and this one did not."""
    pairs = [(a, b) for a, b in zip(records, oracle, strict=True) if b.meets_deadline]
    return sum(not a.meets_deadline for a, _ in pairs) / len(pairs) if pairs else 0.0


def summarize(
    title: str, runs: dict[str, list[TransferRecord]], num_tokens: int
) -> list[dict[str, Any]]:
    """Score and print; return rows for the report."""
    oracle = runs["oracle"]
    scores = [study.score(label, records, num_tokens) for label, records in runs.items()]
    missed = {label: avoidable(records, oracle) for label, records in runs.items()}
    print_table(title, scores, missed)
    return [{**asdict(row), "avoidable": missed[row.label]} for row in scores]


def real_report(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """All contestants over every uplink trace, and the coverage of the quantiles."""
    level_set = arguments.level_set
    contestants = study.contestants(level_set)
    total: dict[str, list[TransferRecord]] = {contestant.label: [] for contestant in contestants}
    tables: dict[str, Any] = {}
    coverage: dict[str, list[study.Forecast]] = {}
    tokens = study.NUM_CHUNKS * study.CHUNK_TOKENS
    for name, trace in study.load_uplinks(arguments.traces):
        runs: dict[str, list[TransferRecord]] = {c.label: [] for c in contestants}
        for fold in (0, 1):
            workload = study.real_workload(
                name, trace, level_set, num_requests=arguments.requests // 2,
                seed=arguments.seed, fold=fold,
            )  # fmt: skip
            site = study.train(workload)
            for contestant in contestants:
                runs[contestant.label] += study.run(workload, contestant, site)
            coverage.setdefault(name, []).extend(
                study.calibrate(workload, trace.mean_bytes_per_s, site, PredictiveEstimator)
            )
        tables[name] = summarize(name, runs, tokens)
        for label, records in runs.items():
            total[label] += records
    tables["all"] = summarize("all real uplinks", total, tokens)
    return tables, coverage_report(coverage)


def coverage_report(coverage: dict[str, list[study.Forecast]]) -> dict[str, Any]:
    """How many outcomes each quantile of the delivery time covered."""
    classes: dict[str, list[study.Forecast]] = {}
    for name, forecasts in coverage.items():
        classes.setdefault(study.trace_class(name), []).extend(forecasts)
    rows = {**coverage, **{f"class {name}": rows for name, rows in classes.items()}}
    head = " ".join(f"{quantile:>6.0%}" for quantile in study.QUANTILES)
    print(f"\ncoverage of the quantiles of the delivery time\n{'':34s} {head}    asked")
    report = {}
    for name, forecasts in rows.items():
        shares = [
            sum(forecast.covers(index) for forecast in forecasts) / len(forecasts)
            for index in range(len(study.QUANTILES))
        ]
        cells = " ".join(f"{share:6.1%}" for share in shares)
        print(f"{name:34s} {cells} {len(forecasts):8d}")
        report[name] = {
            "asked": len(forecasts),
            "covered": {str(q): share for q, share in zip(study.QUANTILES, shares, strict=True)},
        }
    return report


def independent_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """The paper's set-up: the future is independent of the past."""
    report = {}
    for deadline_s in study.DEADLINE_S_PAPER:
        workload = study.independent_workload(
            arguments.level_set, deadline_s, num_requests=3 * arguments.requests,
            seed=arguments.seed,
        )  # fmt: skip
        site = study.train(workload)
        runs = {
            contestant.label: study.run(workload, contestant, site)
            for contestant in study.contestants(arguments.level_set)
        }
        tokens = study.PAPER_CHUNKS * study.PAPER_TOKENS
        report[str(deadline_s)] = summarize(workload.name, runs, tokens)
    return report


# ---- the optimizer -------------------------------------------------------------------------------


def large_request(num_chunks: int = 64, num_choices: int = 8, seed: int = 0) -> PlanRequest:
    """A plan of the size that the aim is about; no two chunks alike."""
    rng = random.Random(seed)
    chunks = []
    for index in range(num_chunks):
        levels = [
            Choice(
                name=f"level:{level}",
                num_bytes=int(4e6 * 0.7**level * rng.uniform(0.9, 1.1)),
                decode_s=0.005,
                prefill_s=0.0,
                loss=1.5 * 2.0**level * rng.uniform(0.9, 1.1),
            )
            for level in range(num_choices - 1)
        ]
        text = Choice("text", 0, 0.0, 10.0, 0.0, is_text=True)
        chunks.append(ChunkOptions(index, index * 1536, (index + 1) * 1536, (*levels, text)))
    return PlanRequest(tuple(chunks), budget_s=30.0)


def optimizer_report() -> dict[str, Any]:
    """Time of one decision, and the optimum of small cases by trying everything."""
    request = large_request()
    times = []
    for rate in [2e6 + 5e4 * step for step in range(100)]:
        curve = DeliveryCurve.straight(rate)
        begin = time.thread_time()
        choose(request, curve, quantile=0.95)
        times.append(time.thread_time() - begin)
    equal = sum(matches_brute_force(seed) for seed in range(BRUTE_CASES))
    machine = f"{platform.processor() or platform.machine()}, Python {sys.version.split()[0]}"
    print(
        f"one plan of 64 chunks x 8 choices, time of one core: p50 {statistics.median(times) * 1e3:.2f} ms,"
        f" least {min(times) * 1e3:.2f} ms ({machine})"
    )
    print(f"least loss equal to brute force: {equal} of {BRUTE_CASES} small cases")
    return {
        "decision_s": {"p50": statistics.median(times), "min": min(times), "n": len(times)},
        "brute_force": {"equal": equal, "of": BRUTE_CASES},
        "machine": machine,
    }


def matches_brute_force(seed: int) -> bool:
    """Compare one small case."""
    rng = random.Random(seed)
    chunks = [
        [
            Choice(f"c:{row}", rng.randint(1, 40), 0.0, 0.0, float(rng.randint(0, 30)))
            for row in range(rng.randint(1, 4))
        ]
        for _ in range(rng.randint(1, 5))
    ]
    limits = sorted(float(rng.randint(5, 120)) for _ in chunks)
    found = least_loss(chunks, limits, tick=1.0)
    best = min(
        (
            sum(choice.loss for choice in plan)
            for plan in itertools.product(*chunks)
            if all(
                sum(choice.num_bytes for choice in plan[: row + 1]) <= limit
                for row, limit in enumerate(limits)
            )
        ),
        default=None,
    )
    return (found is None and best is None) or (found is not None and found.loss == best)


if __name__ == "__main__":
    sys.exit(main())
