from __future__ import annotations

import pytest

from telemetry import names
from telemetry.metrics import MetricSet, UnknownLabelValue


def test_every_metric_of_both_programs_can_be_created_and_rendered() -> None:
    for specs in (names.WORKER_METRICS, names.EDGE_METRICS):
        text = MetricSet(specs).render().decode()
        for spec in specs:
            assert f"# HELP {spec.name} " in text, spec.name


def test_values_reach_the_page() -> None:
    metrics = MetricSet(names.WORKER_METRICS)
    metrics.add(names.WORKER_RECEIVED_BYTES, 100, "int8")
    metrics.add(names.WORKER_RECEIVED_BYTES, 23, "int8")
    metrics.set(names.WORKER_ACTIVE_SESSIONS, 3)
    metrics.observe(names.WORKER_TTFT_SECONDS, 0.3)
    text = metrics.render().decode()
    assert 'kvtide_worker_received_bytes_total{level="int8"} 123.0' in text
    assert "kvtide_worker_active_sessions 3.0" in text
    assert 'kvtide_worker_ttft_seconds_bucket{le="0.25"} 0.0' in text
    assert 'kvtide_worker_ttft_seconds_bucket{le="0.5"} 1.0' in text


def test_the_deadline_is_a_bucket() -> None:
    metrics = MetricSet(names.WORKER_METRICS, slo_s=3.7)
    metrics.observe(names.WORKER_TTFT_SECONDS, 3.6)
    assert 'kvtide_worker_ttft_seconds_bucket{le="3.7"} 1.0' in metrics.render().decode()


def test_a_value_outside_the_closed_set_is_refused_by_name() -> None:
    metrics = MetricSet(names.WORKER_METRICS)
    with pytest.raises(UnknownLabelValue, match=r"outcome='session-4711'"):
        metrics.add(names.WORKER_SESSIONS, 1, "session-4711")


def test_a_missing_label_is_refused() -> None:
    metrics = MetricSet(names.WORKER_METRICS)
    with pytest.raises(UnknownLabelValue, match="takes 1"):
        metrics.add(names.WORKER_SESSIONS, 1)


def test_two_sets_do_not_share_values() -> None:
    first, second = MetricSet(names.WORKER_METRICS), MetricSet(names.WORKER_METRICS)
    first.set(names.WORKER_ACTIVE_SESSIONS, 7)
    assert "kvtide_worker_active_sessions 0.0" in second.render().decode()
