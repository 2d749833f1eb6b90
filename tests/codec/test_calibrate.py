from __future__ import annotations

import numpy as np
import pytest

from codec import CodecError, Geometry
from codec.cachegen import CachegenStatistics
from codec.calibrate import CachegenCalibration, cluster_rows, make_table
from codec.tables import PROB_SCALE
from tests.codec.builders import GEOMETRY, make_codec, make_kv, make_profile


def test_the_same_arrays_give_the_same_profile() -> None:
    digests = set()
    for _ in range(2):
        calibration = CachegenCalibration(GEOMETRY)
        for add in (calibration.add_scales, calibration.add_counts):
            for seed in range(3):
                add(make_kv(60, seed=seed))
        digests.add(calibration.build(model_digest=bytes(32), notes={}).digest)
    assert len(digests) == 1


def test_coded_size_is_what_the_tables_promise() -> None:
    kv = make_kv(2000, seed=55)
    statistics = CachegenStatistics.from_profile(make_profile())
    tables = statistics.tables
    for index, level in enumerate(statistics.levels):
        bits = 0.0
        for layer in range(GEOMETRY.num_layers):
            for side in range(2):
                values = kv[layer, side].reshape(2000, -1)
                for channel in range(values.shape[1]):
                    at = (layer, side, channel)
                    anchors = np.rint(values[::10, channel] / level.anchor_step[at])
                    base = np.repeat(anchors * level.anchor_step[at], 10)
                    deltas = np.rint((values[:, channel] - base) / level.delta_step[at])
                    deltas = deltas[np.arange(2000) % 10 != 0]
                    shifted = anchors - level.anchor_shift[at]
                    for symbols, table in (
                        (shifted, int(level.anchor_table[at])),
                        (deltas, int(level.delta_table[at])),
                    ):
                        cost = tables.bits(table)
                        place = symbols.astype(int) - tables.lows[table]
                        inside = (place >= 0) & (place < len(cost) - 1)
                        bits += cost[np.where(inside, place, len(cost) - 1)].sum()
                        bits += 16 * int((~inside).sum())
        coded = 8 * len(make_codec().encode(kv, level=f"cachegen:{index}", token_start=0))
        overhead = 8 * (128 + 4 * 13) + 12 * 32 * 32  # header, offsets, a flushed state per lane
        assert bits <= coded <= 1.002 * bits + overhead


def test_clusters_separate_what_differs_and_share_what_is_alike() -> None:
    rng = np.random.default_rng(0)
    narrow = rng.multinomial(1000, [0.1, 0.8, 0.1, 0, 0], size=20)
    wide = rng.multinomial(1000, [0.2, 0.2, 0.2, 0.2, 0.2], size=30)
    assignment, centres = cluster_rows(np.concatenate([narrow, wide]).astype(np.float64), 2)
    assert len(set(assignment[:20])) == len(set(assignment[20:])) == 1
    assert assignment[0] != assignment[-1]
    assert centres.sum() == pytest.approx(50_000)


def test_more_clusters_than_rows_are_not_made() -> None:
    assignment, centres = cluster_rows(np.eye(3) * 100, 64)
    assert sorted(assignment) == [0, 1, 2]
    assert centres.shape == (3, 3)


def test_a_table_drops_rare_ends_and_keeps_an_escape() -> None:
    counts = np.zeros(256)
    counts[127 - 3 : 127 + 4] = 1_000_000
    counts[127 + 40] = 1
    low, frequencies = make_table(counts)
    assert (low, len(frequencies)) == (-3, 8)
    assert int(frequencies.sum()) == PROB_SCALE


def test_a_table_of_nothing_but_outliers_still_codes() -> None:
    counts = np.zeros(256)
    counts[-1] = 50
    low, frequencies = make_table(counts)
    assert (low, len(frequencies)) == (0, 2)
    assert frequencies[-1] > 4000


def test_channels_that_never_vary_get_a_tiny_step() -> None:
    geometry = Geometry(3, 1, 2)
    calibration = CachegenCalibration(geometry)
    kv = np.zeros(geometry.kv_shape(40), np.float32)
    calibration.add_scales(kv)
    calibration.add_counts(kv)
    profile = calibration.build(model_digest=bytes(32), notes={})
    statistics = CachegenStatistics.from_profile(profile)
    assert all(level.delta_step.min() > 0 for level in statistics.levels)


def test_layers_fall_into_three_groups_with_growing_bins() -> None:
    calibration = CachegenCalibration(Geometry(30, 1, 1))
    assert list(np.bincount(calibration.layer_group)) == [10, 10, 10]
    assert bool(np.all(np.diff(calibration.bins, axis=1) > 0))
    assert bool(np.all(np.diff(calibration.bins, axis=0) > 0))
    assert list(CachegenCalibration(Geometry(2, 1, 1)).layer_group) == [0, 1]


def test_shared_tables_cost_little_and_never_less_than_own_ones() -> None:
    calibration = CachegenCalibration(GEOMETRY)
    for add in (calibration.add_scales, calibration.add_counts):
        for seed in range(100, 104):
            add(make_kv(400, seed=seed))
    profile = calibration.build(model_digest=bytes(32), notes={})
    own, shared = calibration.own_table_bits(), calibration.shared_table_bits(profile)
    assert len(own) == len(shared) == 7
    for a, b in zip(own, shared, strict=True):
        assert a <= b <= 1.25 * a  # few symbols per channel: own histograms are over-fitted


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(CodecError, match="at least 20 tokens"):
        CachegenCalibration(GEOMETRY).add_scales(make_kv(19, seed=0))
