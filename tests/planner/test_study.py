"""The benchmark's own study, small: it is the judge, so it must not rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import planner_study as study
from planner.estimator import PredictiveEstimator


def run_all(workload: study.Workload, labels: tuple[str, ...]) -> dict[str, float]:
    site = study.train(workload)
    return {
        contestant.label: study.score(
            contestant.label, study.run(workload, contestant, site)
        ).violations
        for contestant in study.contestants("klt")
        if contestant.label in labels
    }


def test_on_independent_rates_nobody_beats_the_oracle_and_kvtide_beats_the_last_sample() -> None:
    workload = study.independent_workload("klt", 0.5, num_requests=12, seed=3)
    late = run_all(
        workload, ("cachegen / last-sample", "fixed:klt:3 / last-sample", "kvtide", "oracle")
    )
    assert late["oracle"] <= late["kvtide"] <= late["fixed:klt:3 / last-sample"]
    assert late["kvtide"] < late["cachegen / last-sample"] / 4


@pytest.mark.data
def test_on_a_real_uplink_kvtide_is_late_less_often_than_cachegen_and_its_quantiles_hold(
    data_dir: Path,
) -> None:
    name, trace = study.load_uplinks(data_dir / "traces")[2]
    workload = study.real_workload(name, trace, "klt", num_requests=12, seed=2, fold=0)
    late = run_all(workload, ("cachegen / last-sample", "kvtide", "oracle"))
    assert late["kvtide"] <= late["cachegen / last-sample"]
    forecasts = study.calibrate(
        workload, trace.mean_bytes_per_s, study.train(workload), PredictiveEstimator
    )
    covered = sum(forecast.covers(4) for forecast in forecasts) / len(forecasts)
    assert covered >= 0.75
