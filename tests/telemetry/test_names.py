from __future__ import annotations

import re

from telemetry.names import (
    EDGE_METRICS,
    WORKER_METRICS,
    Event,
    Label,
    MetricKind,
    level_label,
)

ALL = WORKER_METRICS + EDGE_METRICS


def test_metric_names_follow_the_naming_rule() -> None:
    for spec in ALL:
        assert re.fullmatch(r"kvtide_(worker|edge)(_[a-z0-9]+)+", spec.name), spec.name


def test_only_counters_end_in_total() -> None:
    for spec in ALL:
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER), spec.name


def test_names_are_unique_and_both_rooms_have_some() -> None:
    names = [spec.name for spec in ALL]
    assert len(names) == len(set(names))
    assert len(WORKER_METRICS) > 10
    assert len(EDGE_METRICS) > 10


def test_histograms_have_rising_buckets_and_others_have_none() -> None:
    for spec in ALL:
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name


def test_label_sets_are_closed_and_free_of_repeats() -> None:
    for label in Label:
        assert len(label.allowed) == len(set(label.allowed)) > 0


def test_event_names_are_lowercase_nouns_and_verbs() -> None:
    for event in Event:
        assert re.fullmatch(r"[a-z]+(\.[a-z]+)?", event.value), event


def test_an_unknown_level_is_counted_as_other() -> None:
    assert level_label("cachegen:3") == "cachegen:3"
    assert level_label("surprise:9") == "other"
