"""Builds a `klt` profile from KV arrays and gradients. Knows nothing of models and texts.

Three passes over the same contexts: moments and sensitivities, then which tokens are sensitive, then
distributions. Same contexts in the same order give the same profile. docs/adr/0020 to 0024 say what each
choice was measured against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from codec import native
from codec.calibrate import make_table
from codec.errors import CodecError
from codec.geometry import Geometry
from codec.klt import token_classes, token_features
from codec.klt_native import CONTEXTS, KltChunk
from codec.klt_plan import ACTIVITY_ONE, FINE_DIGIT, LOUD_CLASS, NEUTRAL_CLASS, NUM_CLASSES, KltPlan
from codec.levels import LevelInfo, LevelSet, level_name
from codec.profile import Profile
from codec.tables import TableSet, quantize_frequencies

__all__ = ["SKIPPED_TOKENS", "Context", "KltCalibration"]

GROUP_LAYERS = 5
"""Layers that are transformed together: 3 cost 7 % more bits at equal loss, 10 a profile four times as large."""

SKIPPED_TOKENS = 4
"""Tokens at the start of a context that statistics leave out: attention sinks are like no other token."""

REGULARIZATION = 0.1
"""Share of a layer's mean sensitivity in each channel's."""

TOKEN_CLIP = 20.0
"""A token counts at most as this many times the mean of the lower 99 % in the sensitivities."""

ADAPTATION = 0.5
"""Exponent of a token's sensitivity in the step's divisor; from 0.5 on, outliers cost more than they save."""

RIDGE = 10.0
ENERGY_CLIP = 1e5
"""Most that a token counts in the regression, in medians: a handful of sinks would decide alone."""

STEPS = tuple(float(1.42e-4 * 3 ** (k / 2)) for k in range(-5, 3))
"""Steps of the levels, finest first, a factor of sqrt(3) apart, so that each level has one that refines it. In
roots of nats; on SmolLM2 they put a level at KL 0.003 and one below 0.01, and the finest below 0.0005."""

MOST_LEAK = 0.2
"""Steps of the finest level that the rounding of a direction to 8 bits may move a usual coefficient's row by;
directions with more get a second digit. Without any, the loss cannot fall below KL 0.0003."""

SCALE_CLASSES_PER_OCTAVE = 3
SCALE_OCTAVES = (-4, 9)
CUTOFF = 0.15
"""Deviation over step below which a component is not coded."""

CONTEXT_RATIOS = (0.35, 0.7, 1.1, 1.7, 2.8)

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Context:
    """One calibration context."""

    kv: F32
    """float32 [layer, 2, token, channel]: keys before rotation, values."""

    gradient: F32 | None
    """Like kv: of the log-likelihood of a sampled continuation, summed over its tokens; None if not taken."""

    predicted_tokens: int
    """Tokens of that continuation."""


class KltCalibration:
    """Collects what a profile needs; call the passes in order, each over all contexts."""

    def __init__(self, geometry: Geometry, *, steps: Sequence[float] = STEPS) -> None:
        """Start empty.

        Args:
            geometry: at least 2 layers.
            steps: of the levels, finest first, in roots of nats.
        """
        if geometry.num_layers < 2:
            raise CodecError("level set klt needs at least two layers; layer 0 is not coded")
        self.geometry = geometry
        self.steps = tuple(steps)
        first = range(1, geometry.num_layers, GROUP_LAYERS)
        self.spans = [(f, min(GROUP_LAYERS, geometry.num_layers - f)) for f in first]
        shape = (geometry.num_layers, 2, geometry.num_channels)
        self._sum = np.zeros(shape)
        self._num_tokens = 0
        self._moments = [np.zeros((self._rows(n),) * 2) for _, n in self.spans]
        width = 2 * geometry.num_channels
        self._layer0_moment = np.zeros((width, width))
        self._layer0_cross = np.zeros((width, self._rows(self.spans[0][1])))
        self._sensitivity = np.zeros(shape)
        self._num_graded = 0
        self._features: list[list[F32]] = [[] for _ in self.spans]
        self._energies: list[list[F32]] = [[] for _ in self.spans]

    def _rows(self, num_layers: int) -> int:
        return num_layers * 2 * self.geometry.num_channels

    # ---- first pass: moments and sensitivities --------------------------------------------------------

    def add_moments(self, context: Context) -> None:
        """Add a context of more than SKIPPED_TOKENS tokens."""
        kv = context.kv[:, :, SKIPPED_TOKENS:]
        self._sum += kv.sum(axis=2, dtype=np.float64)
        self._num_tokens += kv.shape[2]
        layer0 = _rows_of(kv, 0, 1)
        for index, (first, size) in enumerate(self.spans):
            rows = _rows_of(kv, first, size)
            self._moments[index] += rows.T @ rows
            if index == 0:
                self._layer0_moment += layer0.T @ layer0
                self._layer0_cross += layer0.T @ rows
        if context.gradient is not None:
            gradient = context.gradient[:, :, SKIPPED_TOKENS:]
            weight = _clipped(np.square(gradient).sum(axis=-1))
            self._sensitivity += (np.square(gradient) * weight[..., None]).sum(axis=2)
            self._num_graded += kv.shape[2] * context.predicted_tokens

    @property
    def mean(self) -> F32:
        """float32 [layer, kv, channel]."""
        return np.asarray(self._sum / self._num_tokens, np.float32)

    @property
    def weight(self) -> F32:
        """float32 [layer, kv, channel]: root of the diagonal of E[g g^T], pulled towards its layer's mean."""
        if not self._num_graded:
            raise CodecError("no context came with a gradient")
        diagonal = self._sensitivity / self._num_graded
        mean = diagonal.mean(axis=-1, keepdims=True)
        mean = np.maximum(mean, 1e-6 * mean.max())
        mixed = (1 - REGULARIZATION) * diagonal + REGULARIZATION * mean
        return np.asarray(np.sqrt(mixed), np.float32)

    # ---- second pass: which tokens are sensitive ------------------------------------------------------

    def add_sensitivity(self, context: Context) -> None:
        """Add a context again, if it has a gradient."""
        if context.gradient is None:
            return
        weight, mean = self.weight[:, :, None], self.mean[:, :, None]
        values = ((context.kv - mean) * weight)[:, :, SKIPPED_TOKENS:]
        pull = (context.gradient / weight)[:, :, SKIPPED_TOKENS:]
        for index, (first, size) in enumerate(self.spans):
            heads = 2 * size * self.geometry.num_kv_heads
            self._features[index].append(token_features(_rows_of(values, first, size), heads))
            energy = np.square(pull[first : first + size]).sum(axis=(0, 1, 3))
            self._energies[index].append(
                (energy / max(float(np.median(energy)), 1e-30)).astype(np.float32)
            )

    def sensitivity_arrays(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Return how a token's features make its class.

        A regression makes one number, the loudness, of the features; the classes' edges follow from the mean
        sensitivity of the calibration's tokens at each loudness, whatever its shape.
        """
        features = np.concatenate(self._features[index]).astype(np.float64)
        energy = np.concatenate(self._energies[index]).astype(np.float64)
        weights = _poisson_regression(features, np.minimum(energy, ENERGY_CLIP))
        loudness = features @ weights
        order = np.argsort(loudness, kind="stable")
        wanted = ADAPTATION * np.log2(_isotonic(energy[order]) + 1e-3)
        wanted -= wanted.mean()
        middle = np.arange(LOUD_CLASS) + 0.5 - NEUTRAL_CLASS
        places = np.searchsorted(wanted, middle)
        sorted_loudness = np.append(loudness[order], loudness[order][-1] + 1)
        return {
            f"sensitivity_{index}": np.asarray(weights, np.float32),
            f"loudness_edges_{index}": np.asarray(sorted_loudness[places], np.float32),
        }

    # ---- the transform --------------------------------------------------------------------------------

    def transform_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the profile's arrays up to the tables; needs the first two passes."""
        mean, weight = self.mean, self.weight
        arrays: dict[str, npt.NDArray[Any]] = {
            "mean": mean,
            "weight": weight,
            "group_first_layer": np.asarray([first for first, _ in self.spans], np.int32),
            "group_num_layers": np.asarray([size for _, size in self.spans], np.int32),
            "steps": np.asarray(self.steps, np.float32),
            "loud_bits": np.asarray(_loud_bits(len(self.steps)), np.uint8),
        }
        center = self._sum / self._num_tokens
        for index, (first, size) in enumerate(self.spans):
            scale = weight[first : first + size].astype(np.float64).reshape(-1)
            middle = center[first : first + size].reshape(-1)
            moment = self._moments[index] / self._num_tokens - np.outer(middle, middle)
            covariance = moment * np.outer(scale, scale)
            if index == 0:
                scale0 = weight[0].astype(np.float64).reshape(-1)
                middle0 = center[0].reshape(-1)
                own = self._layer0_moment / self._num_tokens - np.outer(middle0, middle0)
                own *= np.outer(scale0, scale0)
                cross = self._layer0_cross / self._num_tokens - np.outer(middle0, middle)
                cross *= np.outer(scale0, scale)
                solved = np.linalg.solve(own + 1e-3 * np.diag(np.diag(own)), cross)
                symbols, unit = _to_int8(solved)
                arrays[f"predictor_{index}"], arrays[f"predictor_scale_{index}"] = symbols, unit
                used = symbols.astype(np.float64) * unit[:, None]
                covariance += used.T @ own @ used - used.T @ cross - cross.T @ used
            values, vectors = np.linalg.eigh(covariance.astype(np.float32))
            deviation = np.sqrt(np.maximum(values[::-1], 1e-30))
            finest = np.float32(min(self.steps))
            kept = max(int(np.count_nonzero(deviation >= CUTOFF * finest)), 1)
            directions = vectors[:, ::-1][:, :kept].T
            symbols, unit = _to_int8(directions)
            arrays[f"basis_{index}"], arrays[f"basis_scale_{index}"] = symbols, unit
            error = directions - symbols * unit[:, None]
            leak = deviation[:kept] * np.linalg.norm(error, axis=1) / finest
            precise = int(np.count_nonzero(np.minimum.accumulate(leak) >= MOST_LEAK))
            if precise:
                digit = np.rint(error[:precise] / unit[:precise, None] * FINE_DIGIT)
                arrays[f"basis_fine_{index}"] = np.clip(digit, -127, 127).astype(np.int8)
            arrays[f"deviation_{index}"] = np.asarray(deviation[:kept], np.float32)
            arrays |= self.sensitivity_arrays(index)
        return arrays

    # ---- third pass: distributions --------------------------------------------------------------------

    def start_counts(self) -> _Counter:
        """Return what counts symbols; needs the first two passes."""
        return _Counter(self.geometry, self.transform_arrays(), self.spans, len(self.steps))


class _Counter:
    """Distributions of symbols by scale class, then by context."""

    def __init__(
        self,
        geometry: Geometry,
        arrays: Mapping[str, npt.NDArray[Any]],
        spans: Sequence[tuple[int, int]],
        num_levels: int,
    ) -> None:
        self._geometry = geometry
        self._spans = spans
        self._levels = tuple(
            LevelInfo(level_name(LevelSet.KLT, i), LevelSet.KLT, i, None, None, None, None)
            for i in range(num_levels)
        )
        octaves = np.arange(SCALE_OCTAVES[0], SCALE_OCTAVES[1] + 1e-9, 1 / SCALE_CLASSES_PER_OCTAVE)
        self._num_classes = len(octaves) + 1
        self._arrays = {
            **arrays,
            "class_edges": np.exp2(octaves).astype(np.float32),
            "cutoff": np.asarray([CUTOFF], np.float32),
            "expected": np.full(self._num_classes, ACTIVITY_ONE, np.int32),
            "context_ratios": np.rint(256 * np.asarray(CONTEXT_RATIOS)).astype(np.int32),
        }
        self._magnitude = np.zeros(self._num_classes)
        self._seen = np.zeros(self._num_classes)
        self._counts = np.zeros((self._num_classes * CONTEXTS, 256), np.int64)
        self._class_counts = np.zeros((len(spans), NUM_CLASSES))
        self._plan = self._make_plan(*self._flat_tables())

    def add_magnitudes(self, context: Context) -> None:
        """First half of the third pass: how large symbols of a scale class are."""
        for level, symbols, _ in self._symbols(context):
            capped = np.minimum(np.abs(symbols), 15).mean(axis=1)
            scale = level.components["first_table"] // CONTEXTS
            np.add.at(self._magnitude, scale, capped)
            np.add.at(self._seen, scale, 1)

    def finish_magnitudes(self) -> None:
        """Fix what to expect of each scale class."""
        known = np.flatnonzero(self._seen)
        mean = np.interp(
            np.arange(self._num_classes), known, self._magnitude[known] / self._seen[known]
        )
        expected = np.clip(np.rint(mean * ACTIVITY_ONE), 1, 15 * ACTIVITY_ONE)
        self._arrays["expected"] = expected.astype(np.int32)
        self._plan = self._make_plan(*self._flat_tables())

    def add_counts(self, context: Context) -> None:
        """Second half of the third pass."""
        for level, symbols, classes in self._symbols(context):
            native.call(
                "kv_klt_count",
                KltChunk.of(
                    level.placed(symbols.shape[1]),
                    level.components,
                    num_tokens=symbols.shape[1],
                    block_tokens=symbols.shape[1],
                    num_threads=1,
                ),
                symbols,
                classes,
                self._counts,
            )
        for index, row in enumerate(classes):
            self._class_counts[index] += np.bincount(row, minlength=NUM_CLASSES)

    def build(self, *, model_digest: bytes, notes: Mapping[str, Any]) -> Profile:
        """Return the profile, its levels not yet measured."""
        lows: list[int] = []
        rows: list[npt.NDArray[np.uint16]] = []
        for scale in range(self._num_classes):
            counts = self._counts[scale * CONTEXTS : (scale + 1) * CONTEXTS].astype(np.float64)
            total = _smooth(counts.sum(axis=0))
            low, frequencies = make_table(total)
            width = len(frequencies) - 1
            for context in counts:
                mixed = context + 4 * total / total.sum()
                inside = mixed[low + 127 : low + 127 + width]
                rest = max(float(mixed.sum() - inside.sum()), 1e-6 * float(mixed.sum()))
                lows.append(low)
                rows.append(quantize_frequencies(np.append(inside, rest)))
        for counts in self._class_counts:
            lows.append(0)
            rows.append(quantize_frequencies(np.append(counts + 0.5, 0.0)))
        tables = TableSet.from_rows(lows, rows)
        self._arrays |= {
            "table_low": tables.lows,
            "table_start": tables.starts,
            "table_frequency": tables.frequencies,
        }
        profile = Profile(
            model_digest=model_digest,
            geometry=self._geometry,
            level_set=LevelSet.KLT,
            levels=self._levels,
            arrays=dict(self._arrays),
            notes=dict(notes),
        )
        return Profile.from_bytes(profile.to_bytes())  # with its digest, through every check

    def _flat_tables(self) -> tuple[npt.NDArray[np.int32], TableSet]:
        """Tables that let every component keep the same values, before distributions are known."""
        wide = quantize_frequencies(np.ones(3))
        token = quantize_frequencies(np.ones(NUM_CLASSES + 1))
        rows = [wide] * (self._num_classes * CONTEXTS) + [token] * len(self._spans)
        lows = np.asarray([-1] * (self._num_classes * CONTEXTS) + [0] * len(self._spans), np.int32)
        return lows, TableSet.from_rows(lows, rows)

    def _make_plan(self, lows: npt.NDArray[np.int32], tables: TableSet) -> KltPlan:
        arrays = {
            **self._arrays,
            "table_low": lows,
            "table_start": tables.starts,
            "table_frequency": tables.frequencies,
        }
        return KltPlan.from_profile(
            Profile(bytes(32), self._geometry, LevelSet.KLT, self._levels, arrays)
        )

    def _symbols(self, context: Context) -> Any:
        """Yield each level with its symbols [component, token] and classes [group, token]."""
        plan = self._plan
        values = (context.kv - plan.mean[:, :, None]) * plan.weight[:, :, None]
        values = values[:, :, 1:]
        num_tokens = values.shape[2]
        classes = np.empty((len(plan.groups), num_tokens), np.uint8)
        coefficients = []
        for index, group in enumerate(plan.groups):
            rows = _rows_of(values, group.first_layer, group.num_layers)
            heads = 2 * group.num_layers * self._geometry.num_kv_heads
            classes[index] = token_classes(token_features(rows, heads), group)
            loud = classes[index] >= LOUD_CLASS
            if group.predictor is not None:
                rows = rows - _rows_of(values, 0, 1) @ group.predictor
            rows = np.where(loud[:, None], np.float32(0), rows)
            classes[index][loud] = NEUTRAL_CLASS
            coefficients.append(
                (group.analysis @ rows.T)
                * np.exp2(classes[index].astype(np.float32) - NEUTRAL_CLASS)
            )
        for level in plan.levels:
            parts = [
                np.rint(np.clip(part[: int(row["num_components"])] / level.step, -32767, 32767))
                for part, row in zip(coefficients, level.groups, strict=True)
            ]
            yield level, np.ascontiguousarray(np.concatenate(parts), np.int16), classes


def _loud_bits(num_levels: int) -> list[int]:
    """Bits of loud tokens: 8 in the finest third of the levels, then 6, then 5."""
    return [(8, 6, 5)[3 * index // num_levels] for index in range(num_levels)]


def _rows_of(kv: F32, first_layer: int, num_layers: int) -> F32:
    """Return [token, layer * kv * channel] of some layers of kv [layer, kv, token, channel]."""
    part = kv[first_layer : first_layer + num_layers]
    return np.ascontiguousarray(part.transpose(2, 0, 1, 3).reshape(kv.shape[2], -1), np.float32)


def _clipped(energy: F32) -> F32:
    """Return factors that keep a few tokens from deciding alone. energy: [layer, kv, token]."""
    threshold = np.quantile(energy, 0.99, axis=-1, keepdims=True)
    usual = energy <= threshold
    mean = np.where(usual, energy, 0).sum(axis=-1, keepdims=True) / usual.sum(
        axis=-1, keepdims=True
    )
    limit = TOKEN_CLIP * mean / np.maximum(energy, 1e-30)
    return np.asarray(np.minimum(limit, 1), np.float32)


def _poisson_regression(features: F64, target: F32) -> F64:
    """Return weights with exp(features @ weights) close to the mean of the target.

    Args:
        features: float64 [sample, feature + 1], the last a constant 1.
        target: float32 [sample], not negative.

    Source: Newton's method on the Poisson likelihood with a ridge penalty; steps limited to 1.
    """
    center, spread = features[:, :-1].mean(axis=0), features[:, :-1].std(axis=0) + 1e-6
    scaled = np.concatenate(((features[:, :-1] - center) / spread, features[:, -1:]), axis=1)
    wanted = target.astype(np.float64) / max(float(target.mean()), 1e-30)
    penalty = RIDGE * len(scaled) / 1000 * np.eye(scaled.shape[1])
    penalty[-1, -1] = 0
    weights = np.zeros(scaled.shape[1])
    for _ in range(12):
        fitted = np.exp(np.clip(scaled @ weights, -8, 8))
        slope = scaled.T @ (fitted - wanted) + penalty @ weights
        curve = scaled.T @ (scaled * fitted[:, None]) + penalty
        move = np.linalg.solve(curve + 1e-9 * np.eye(len(curve)), slope)
        weights = weights - move / max(1.0, float(np.abs(move).max()))
    out = weights.copy()
    out[:-1] /= spread
    out[-1] -= float((center * out[:-1]).sum())
    return out


def _isotonic(values: F64) -> F64:
    """Return the ascending sequence that is closest in mean square.

    Source: pool adjacent violators; Ayer et al., Ann. Math. Statist. 26 (1955).
    """
    means: list[float] = []
    sizes: list[int] = []
    for value in values:
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2] = (means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size
            sizes[-2] = size
            means.pop()
            sizes.pop()
    return np.repeat(np.asarray(means), np.asarray(sizes))


def _to_int8(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int8], F32]:
    """Quantize each row to 8 bits; returns symbols and the value of one unit per row."""
    largest = np.maximum(np.abs(rows).max(axis=1), 1e-10)
    unit = np.asarray(largest / 127, np.float32)
    return np.rint(rows / unit[:, None]).astype(np.int8), unit


def _smooth(counts: F64) -> F64:
    """Add a two-sided geometric of the histogram's own spread, so that rare values keep a place."""
    values = np.arange(-127, 128)
    seen = counts[:-1]
    spread = (seen * np.abs(values)).sum() / max(float(seen.sum()), 1.0) + 0.02
    ratio = spread / (1 + np.sqrt(1 + spread * spread))
    shape = ratio ** np.abs(values)
    return np.append(seen + 8 * shape / shape.sum(), counts[-1] + 0.01)
