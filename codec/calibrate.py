"""Builds a `cachegen` profile from KV arrays, in two passes: step sizes, then distributions.

Knows nothing of models and texts. Same arrays in the same order give the same profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from codec.cachegen import GROUP_TOKENS, NUM_LAYER_GROUPS, CachegenStatistics
from codec.errors import CodecError
from codec.geometry import FloatArray, Geometry
from codec.levels import LevelInfo, LevelSet, level_name
from codec.profile import Profile
from codec.tables import MAX_SYMBOLS, TableSet, quantize_frequencies

__all__ = ["LAYER_GROUP_BINS", "LEVEL_FACTORS", "CachegenCalibration", "cluster_rows", "make_table"]

LAYER_GROUP_BINS = (0.5, 1.0, 1.5)
"""Delta bins of the first, middle and last third of the layers, in standard deviations of the channel's
deltas. Source: CacheGen, arXiv:2310.07240, section 5.1.2 and its implementation's defaults."""

LEVEL_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5)
"""What each level multiplies the bins with, finest first."""

ANCHOR_HALF_RANGE = 127
"""Anchors have 8 bits: symbols -127 to 127 around the channel's mean; farther ones take an escape."""

ANCHOR_HEADROOM = 1.2
"""The mean over contexts of a channel's largest magnitude, times this, maps to symbol 127."""

TABLES_PER_LEVEL = 64
"""Tables that the channels of a level share. docs/adr/0003-range-coder-and-tables.md has what that costs."""

SMALLEST_SCALE = 2.0**-24
"""Scale of a channel that never varies: half's smallest step."""

ESCAPE_THRESHOLD = 2e-5
"""Values rarer than this at a table's ends are left to the escape: a frequency of 1 / 4096 for each would cost
every other symbol more than the escapes cost."""

HALF = MAX_SYMBOLS // 2 - 1
WIDTH = 2 * HALF + 2
"""Columns of a histogram: values -127 to 127, then everything else."""

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class CachegenCalibration:
    """Collects statistics. Call `add_scales` for every array, then `add_counts` for every array."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        shape = (geometry.num_layers, 2, geometry.num_channels)
        self._num_arrays = 0
        self._largest = np.zeros(shape)
        self._mean = np.zeros(shape)
        self._delta_power = np.zeros(shape)
        self._anchor_counts = np.zeros((*shape, WIDTH), np.int64)
        self._delta_counts = np.zeros((len(LEVEL_FACTORS), *shape, WIDTH), np.int64)
        thirds = np.arange(geometry.num_layers) * NUM_LAYER_GROUPS // geometry.num_layers
        self.layer_group = thirds.astype(np.uint8)
        self.bins = np.outer(LEVEL_FACTORS, LAYER_GROUP_BINS).astype(np.float32)

    def add_scales(self, kv: FloatArray) -> None:
        """First pass, kv [layer, 2, token, head, dim] with at least two groups of tokens."""
        for layer, side, values in self._planes(kv):
            groups = values[: len(values) // GROUP_TOKENS * GROUP_TOKENS].reshape(
                -1, GROUP_TOKENS, self.geometry.num_channels
            )
            if len(groups) < 2:
                raise CodecError("calibration needs at least 20 tokens per array")
            deltas = groups[:, 1:] - groups[:, :1]
            self._largest[layer, side] += np.abs(values).max(axis=0)
            self._mean[layer, side] += values.mean(axis=0)
            self._delta_power[layer, side] += np.square(deltas).mean(axis=(0, 1))
        self._num_arrays += 1

    @property
    def anchor_step(self) -> npt.NDArray[np.float32]:
        """float32 [layer, kv, channel]."""
        largest = self._largest / self._num_arrays * ANCHOR_HEADROOM
        return np.maximum(largest / ANCHOR_HALF_RANGE, SMALLEST_SCALE).astype(np.float32)

    @property
    def anchor_shift(self) -> npt.NDArray[np.int16]:
        """int16 [layer, kv, channel]: the mean's symbol."""
        shift = np.rint(self._mean / self._num_arrays / self.anchor_step)
        return shift.astype(np.int16)

    @property
    def delta_scale(self) -> npt.NDArray[np.float32]:
        """float32 [layer, kv, channel]: standard deviation of the deltas."""
        scale = np.sqrt(self._delta_power / self._num_arrays)
        return np.maximum(scale, SMALLEST_SCALE).astype(np.float32)

    def add_counts(self, kv: FloatArray) -> None:
        """Second pass, over the same arrays."""
        anchor_step, anchor_shift, delta_scale = (
            self.anchor_step,
            self.anchor_shift,
            self.delta_scale,
        )
        for layer, side, values in self._planes(kv):
            step = anchor_step[layer, side]
            symbols = np.rint(values[::GROUP_TOKENS] / step)
            _count(symbols - anchor_shift[layer, side], self._anchor_counts[layer, side])
            anchors = np.repeat(symbols * step, GROUP_TOKENS, axis=0)[: len(values)]
            is_delta = np.arange(len(values)) % GROUP_TOKENS != 0
            normalized = ((values - anchors) / delta_scale[layer, side])[is_delta]
            for level, bins in enumerate(self.bins):
                scaled = np.rint(normalized * (1 / bins[self.layer_group[layer]]))
                _count(scaled, self._delta_counts[level, layer, side])

    def build(
        self,
        *,
        model_digest: bytes,
        notes: Mapping[str, Any],
        measured: tuple[LevelInfo, ...] | None = None,
    ) -> Profile:
        """Return the profile.

        Args:
            model_digest: 32 bytes.
            notes: where it comes from; JSON values.
            measured: levels with their figures; None leaves them open.
        """
        shape = (self.geometry.num_layers, 2, self.geometry.num_channels)
        lows: list[int] = []
        rows: list[npt.NDArray[np.uint16]] = []
        numbers = []
        for flat in self._histograms():
            assignment, centres = cluster_rows(flat, TABLES_PER_LEVEL)
            numbers.append((assignment + len(rows)).astype(np.uint16).reshape(shape))
            for centre in centres:
                low, frequencies = make_table(centre)
                lows.append(low)
                rows.append(frequencies)
        tables = TableSet.from_rows(lows, rows)
        open_levels = tuple(
            LevelInfo(
                level_name(LevelSet.CACHEGEN, i), LevelSet.CACHEGEN, i, None, None, None, None
            )
            for i in range(len(LEVEL_FACTORS))
        )
        profile = Profile(
            model_digest=model_digest,
            geometry=self.geometry,
            level_set=LevelSet.CACHEGEN,
            levels=measured or open_levels,
            arrays={
                "anchor_step": self.anchor_step,
                "delta_scale": self.delta_scale,
                "anchor_shift": self.anchor_shift,
                "anchor_table": numbers[0],
                "delta_table": np.stack(numbers[1:]),
                "bins": self.bins,
                "layer_group": self.layer_group,
                "table_low": tables.lows,
                "table_start": tables.starts,
                "table_frequency": tables.frequencies,
            },
            notes=dict(notes),
        )
        return Profile.from_bytes(profile.to_bytes())  # with its digest, through every check

    def own_table_bits(self) -> tuple[float, ...]:
        """Return bits per symbol of anchors, then of each level's deltas, were each channel to have its own
        table: the entropies of the histograms."""
        bits = []
        for flat in self._histograms():
            share = flat / flat.sum(axis=1, keepdims=True)
            bits.append(float(-(flat * np.log2(np.where(share > 0, share, 1))).sum() / flat.sum()))
        return tuple(bits)

    def shared_table_bits(self, profile: Profile) -> tuple[float, ...]:
        """Return the same with the tables that the channels share in a profile, escapes' payload included."""
        statistics = CachegenStatistics.from_profile(profile)
        tables, levels = statistics.tables, statistics.levels
        numbers = [levels[0].anchor_table, *(level.delta_table for level in levels)]
        costs = np.empty((tables.num_tables, WIDTH))
        for table in range(tables.num_tables):
            cost = tables.bits(table)
            costs[table] = cost[-1] + 16
            low = int(tables.lows[table]) + HALF
            costs[table, low : low + len(cost) - 1] = cost[:-1]
        return tuple(
            float((flat * costs[number.ravel()]).sum() / flat.sum())
            for flat, number in zip(self._histograms(), numbers, strict=True)
        )

    def _histograms(self) -> Iterator[F64]:
        for counts in (self._anchor_counts, *self._delta_counts):
            yield counts.reshape(-1, WIDTH).astype(np.float64)

    def _planes(self, kv: FloatArray) -> Any:
        tokens = kv.shape[2]
        for layer in range(self.geometry.num_layers):
            for side in range(2):
                plane = kv[layer, side].astype(np.float32)
                yield layer, side, plane.reshape(tokens, self.geometry.num_channels)


def cluster_rows(counts: F64, num_clusters: int) -> tuple[I64, F64]:
    """Group histograms so that coding each with its group's distribution costs the fewest bits.

    Args:
        counts: float64 [row, column], rows not empty.
        num_clusters: at most; fewer come back where fewer are needed.

    Returns:
        assignment: int64 [row].
        centres: float64 [cluster, column], summed counts.

    Source: Lloyd's algorithm under Kullback-Leibler divergence; Banerjee et al., JMLR 6 (2005), "Clustering
    with Bregman Divergences": the sum of a group's counts is its best centre.
    """
    columns = np.arange(counts.shape[1])
    totals = counts.sum(axis=1, keepdims=True)
    share = counts / totals
    mean = share @ columns
    spread = np.sqrt(np.maximum(share @ (columns**2) - mean**2, 0))
    order = np.argsort(spread, kind="stable")
    assignment = np.empty(len(counts), np.int64)
    assignment[order] = np.arange(len(counts)) * min(num_clusters, len(counts)) // len(counts)
    for _ in range(30):
        used, assignment = np.unique(assignment, return_inverse=True)
        centres = np.zeros((len(used), counts.shape[1]))
        np.add.at(centres, assignment, counts)
        smooth = centres + 1e-6 * centres.sum(axis=1, keepdims=True)
        cost = counts @ -np.log2(smooth / smooth.sum(axis=1, keepdims=True)).T
        best = cost.argmin(axis=1)
        if np.array_equal(best, assignment):
            break
        assignment = best
    used, assignment = np.unique(assignment, return_inverse=True)
    centres = np.zeros((len(used), counts.shape[1]))
    np.add.at(centres, assignment, counts)
    return assignment.astype(np.int64), centres


def make_table(counts: F64) -> tuple[int, npt.NDArray[np.uint16]]:
    """Turn a histogram over -127 to 127 and the rest into a table.

    Returns:
        low: value of the table's first symbol.
        frequencies: uint16, escape last.
    """
    inside, outside = counts[:-1], counts[-1]
    likely = np.flatnonzero(inside > ESCAPE_THRESHOLD * counts.sum())
    if likely.size == 0:  # everything escapes: any one value will do
        likely = np.asarray([HALF])
    low, high = int(likely[0]), int(likely[-1]) + 1
    rest = outside + inside[:low].sum() + inside[high:].sum()
    weights = np.append(inside[low:high], max(rest, 1e-6 * counts.sum()))
    return low - HALF, quantize_frequencies(weights)


def _count(symbols: npt.NDArray[np.floating[Any]], counts: I64) -> None:
    """Add symbols [token, channel] to histograms [channel, WIDTH]."""
    columns = np.where(np.abs(symbols) <= HALF, symbols + HALF, WIDTH - 1).astype(np.int64)
    columns += np.arange(counts.shape[0]) * WIDTH
    counts += np.bincount(columns.ravel(), minlength=counts.size).reshape(counts.shape)
