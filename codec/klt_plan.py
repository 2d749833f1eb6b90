"""What a `klt` profile says, checked and turned into what encoder, decoder and kernels read.

Levels differ in one number, the step. A component's tables follow from the ratio of its deviation to the
step (its scale class), so that all levels and components share a few tables. Everything that decides which
table codes a symbol is an integer, or a float32 division and comparison, which round alike everywhere.
docs/bitstream.md, "klt profiles".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec.errors import CorruptBitstream
from codec.klt_native import COMPONENT_DTYPE, CONTEXTS, GROUP_DTYPE
from codec.levels import REFINEMENT_LEVELS
from codec.profile import Profile
from codec.tables import TableSet

__all__ = [
    "ACTIVITY_ONE",
    "FINE_DIGIT",
    "LOUD_CLASS",
    "NEUTRAL_CLASS",
    "NUM_CLASSES",
    "Group",
    "KltPlan",
    "LevelPlan",
]

NUM_CLASSES = 8
NEUTRAL_CLASS = 2
LOUD_CLASS = 5
"""Tokens of this class are not transformed: in levels up to here, the transform's cut would be what they lose."""

FINE_DIGIT = 254
"""Units of a direction's second digit in one of its first: half a unit is 127."""

ACTIVITY_ONE = 1 << 12
ACTIVITY_SHIFT = 4
STEP_TOLERANCE = 1e-5
"""How far from 3 the ratio of two steps may be for one level to refine the other."""

_SMALLEST, _LARGEST = 2.0**-40, 2.0**40  # keeps quotients and products normal floats

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive layers that are transformed together. No slots: float forms are made on demand."""

    first_layer: int
    num_layers: int

    basis_symbols: npt.NDArray[np.int8]
    """int8 [component, row]: directions in the weighted space, largest deviation first."""

    basis_scale: F32
    """float32 [component]: value of one unit of a direction's symbols."""

    basis_fine: npt.NDArray[np.int8] | None
    """int8 [row of the first few components, row]: a second digit of their directions, 1/254 of a unit each."""

    predictor_symbols: npt.NDArray[np.int8] | None
    """int8 [2 * channel, row]: what layer 0 lets one expect of this group; None where it is not used."""

    predictor_scale: F32 | None
    """float32 [2 * channel]."""

    deviation: F32
    """float32 [component], descending: root mean square of the coefficients."""

    sensitivity: F32
    """float32 [feature + 1]: weights of the token's features and a constant: how loud a token is."""

    loudness_edges: F32
    """float32 [LOUD_CLASS], not descending: loudness at which the next class begins."""

    @property
    def num_rows(self) -> int:
        """Numbers per token: 2 * layers * channels."""
        return int(self.basis_symbols.shape[1])

    @functools.cached_property
    def basis(self) -> F32:
        """float32 [component, row]: coefficients times this give the weighted values."""
        symbols = self.basis_symbols.astype(np.float32)
        if self.basis_fine is not None:
            symbols[: len(self.basis_fine)] += self.basis_fine * np.float32(1 / FINE_DIGIT)
        return np.asarray(symbols * self.basis_scale[:, None], np.float32)

    @functools.cached_property
    def predictor(self) -> F32 | None:
        """float32 [2 * channel, row]."""
        if self.predictor_symbols is None or self.predictor_scale is None:
            return None
        return np.asarray(self.predictor_symbols * self.predictor_scale[:, None], np.float32)

    @functools.cached_property
    def analysis(self) -> F32:
        """float32 [component, row]: the way there, least squares, since 8-bit directions are not orthonormal."""
        return np.asarray(np.linalg.solve(self.basis @ self.basis.T, self.basis), np.float32)


@dataclass(frozen=True, eq=False, slots=True)
class LevelPlan:
    """One level, as the kernels read it."""

    step: np.float32
    groups: npt.NDArray[np.void]
    """GROUP_DTYPE [group]; places of coefficients are in components and become numbers with the tokens."""

    components: npt.NDArray[np.void]
    """COMPONENT_DTYPE, all groups' one after the other."""

    loud_bits: int
    """Bits per number of tokens that are not transformed."""

    @property
    def num_components(self) -> int:
        """Components over all groups."""
        return len(self.components)

    def placed(self, num_tokens: int) -> npt.NDArray[np.void]:
        """Return the groups with places for a chunk of that many tokens."""
        out = self.groups.copy()
        out["coefficients"] = out["first_component"].astype(np.uint64) * np.uint64(num_tokens)
        return out


@dataclass(frozen=True, eq=False, slots=True)
class KltPlan:
    """A profile's arrays, checked."""

    groups: tuple[Group, ...]
    mean: F32
    """float32 [layer, kv, channel], of keys before rotation and of values."""

    weight: F32
    """float32 [layer, kv, channel]: root of the sensitivity."""

    tables: TableSet
    levels: tuple[LevelPlan, ...]

    def is_refined(self, index: int) -> bool:
        """Whether a level's step is three times that of the level that would refine it."""
        if not REFINEMENT_LEVELS <= index < len(self.levels):
            return False
        finer = float(self.levels[index - REFINEMENT_LEVELS].step)
        return abs(float(self.levels[index].step) / finer - 3) <= 3 * STEP_TOLERANCE

    def quantizer(self, index: int) -> tuple[np.float32, int]:
        """Return the finest step of a level's chain of refinements, and how many thirds the level is away.

        Symbols of every level of a chain are made from those at its finest step, so that they nest whatever
        the steps' rounding.
        """
        thirds = 0
        while self.is_refined(index):
            index -= REFINEMENT_LEVELS
            thirds += 1
        return self.levels[index].step, thirds

    @classmethod
    def from_profile(cls, profile: Profile) -> KltPlan:
        """Check a profile's arrays.

        Raises:
            CorruptBitstream: an array is missing, of another shape, or out of range.
        """
        geometry = profile.geometry
        shape = (geometry.num_layers, 2, geometry.num_channels)
        mean = profile.array("mean", np.float32, shape)
        weight = _positive(profile.array("weight", np.float32, shape), "weight")
        if not np.isfinite(mean).all():
            raise CorruptBitstream("a mean is not finite")
        groups = _groups(profile)
        tables = TableSet(
            profile.array("table_low", np.int32, (None,)),
            profile.array("table_start", np.int64, (None,)),
            profile.array("table_frequency", np.uint16, (None,)),
        )
        scales = _Scales.of(profile, tables, len(groups))
        steps = _positive(profile.array("steps", np.float32, (None,)), "steps")
        indices = profile.level_indices()
        if sorted(indices) != list(range(len(steps))):
            raise CorruptBitstream(f"{len(indices)} levels, {len(steps)} steps")
        loud_bits = profile.array("loud_bits", np.uint8, steps.shape)
        if loud_bits.min() < 2 or loud_bits.max() > 8:
            raise CorruptBitstream("loud tokens have 2 to 8 bits per number")
        levels = tuple(
            scales.level(groups, np.float32(step), int(bits))
            for step, bits in zip(steps, loud_bits, strict=True)
        )
        return cls(groups, np.ascontiguousarray(mean), np.ascontiguousarray(weight), tables, levels)


@dataclass(frozen=True, eq=False, slots=True)
class _Scales:
    """Scale classes: from a component's deviation, in steps, to its tables and what to expect of it."""

    edges: F32
    """float32 [class - 1], ascending: deviation / step at which the next class begins."""

    cutoff: np.float32
    """Components with a smaller deviation / step are not coded."""

    expected: npt.NDArray[np.int64]
    """int64 [class]: mean magnitude, capped, times ACTIVITY_ONE."""

    ratios: npt.NDArray[np.int64]
    """int64 [context - 1], ascending: activity over what is expected at which the next context begins, times 256."""

    tables: TableSet

    @classmethod
    def of(cls, profile: Profile, tables: TableSet, num_groups: int) -> _Scales:
        edges = _positive(profile.array("class_edges", np.float32, (None,)), "class_edges")
        if np.any(np.diff(edges) <= 0):
            raise CorruptBitstream("the scale classes' edges do not ascend")
        num_classes = len(edges) + 1
        expected = profile.array("expected", np.int32, (num_classes,)).astype(np.int64)
        ratios = profile.array("context_ratios", np.int32, (CONTEXTS - 1,)).astype(np.int64)
        if expected.min() < 1 or expected.max() > 16 * ACTIVITY_ONE:
            raise CorruptBitstream("a scale class expects an impossible magnitude")
        if ratios[0] < 1 or ratios[-1] > 1 << 14 or np.any(np.diff(ratios) <= 0):
            raise CorruptBitstream("the contexts' ratios do not ascend")
        if tables.num_tables != num_classes * CONTEXTS + num_groups:
            raise CorruptBitstream(
                f"{tables.num_tables} tables for {num_classes} scale classes and {num_groups} groups"
            )
        sizes = np.diff(tables.starts)
        by_class = slice(0, num_classes * CONTEXTS)
        for numbers in (tables.lows[by_class], sizes[by_class]):
            rows = numbers.reshape(num_classes, CONTEXTS)
            if np.any(rows != rows[:, :1]):
                raise CorruptBitstream("a scale class's tables differ in their values")
        if np.any(tables.lows[by_class.stop :] != 0) or np.any(
            sizes[by_class.stop :] != NUM_CLASSES + 1
        ):
            raise CorruptBitstream("a table of token classes has other values than 0 to 7")
        cutoff = _positive(profile.array("cutoff", np.float32, (1,)), "cutoff")[0]
        return cls(edges, np.float32(cutoff), expected, ratios, tables)

    def level(self, groups: tuple[Group, ...], step: np.float32, loud_bits: int) -> LevelPlan:
        """Return the plan of a level."""
        rows = np.zeros(len(groups), GROUP_DTYPE)
        parts = []
        first = 0
        for index, group in enumerate(groups):
            ratio = group.deviation / step
            kept = int(np.count_nonzero(ratio >= self.cutoff))  # deviations descend
            scale = np.searchsorted(self.edges, ratio[:kept], side="right")
            part = np.zeros(kept, COMPONENT_DTYPE)
            part["first_table"] = scale * CONTEXTS
            part["low"] = self.tables.lows[scale * CONTEXTS]
            part["escape"] = np.diff(self.tables.starts)[scale * CONTEXTS] - 1
            expected = self.expected[scale]
            start = int(expected[0]) if kept else 0
            part["threshold"] = self._thresholds(expected, start)
            rows[index]["first_component"] = first
            rows[index]["num_components"] = kept
            rows[index]["class_table"] = (len(self.edges) + 1) * CONTEXTS + index
            rows[index]["start_activity"] = start
            parts.append(part)
            first += kept
        return LevelPlan(step, rows, np.concatenate(parts), loud_bits)

    def _thresholds(self, expected: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.int64]:
        """int64 [component, context - 1]: the ratios times the activity of a token like all others."""
        out = np.zeros((len(expected), CONTEXTS - 1), np.int64)
        activity = start
        for component, value in enumerate(expected):
            out[component] = (self.ratios * (activity + ACTIVITY_ONE // 50)) // 256 - (
                ACTIVITY_ONE // 50
            )
            activity += (int(value) - activity) >> ACTIVITY_SHIFT
        return out


def _groups(profile: Profile) -> tuple[Group, ...]:
    geometry = profile.geometry
    channels = geometry.num_channels
    first_layers = profile.array("group_first_layer", np.int32, (None,))
    sizes = profile.array("group_num_layers", np.int32, first_layers.shape)
    stops = np.cumsum(sizes.astype(np.int64)) + 1
    if sizes.min() < 1 or stops[-1] != geometry.num_layers:
        raise CorruptBitstream("the groups do not cover layers 1 and up")
    if np.any(first_layers != np.concatenate(([1], stops[:-1]))):
        raise CorruptBitstream("the groups' layers do not follow each other")
    groups = []
    for index, (first, size) in enumerate(zip(first_layers, sizes, strict=True)):
        num_rows = int(size) * 2 * channels
        basis = profile.array(f"basis_{index}", np.int8, (None, num_rows))
        if len(basis) > num_rows:
            raise CorruptBitstream(f"group {index} has more components than numbers")
        count = (len(basis),)
        fine = None
        if f"basis_fine_{index}" in profile.arrays:
            fine = profile.array(f"basis_fine_{index}", np.int8, (None, num_rows))
            if len(fine) > len(basis):
                raise CorruptBitstream(f"group {index} has more second digits than components")
        predictor = predictor_scale = None
        if f"predictor_{index}" in profile.arrays:
            predictor = profile.array(f"predictor_{index}", np.int8, (2 * channels, num_rows))
            predictor_scale = profile.array(f"predictor_scale_{index}", np.float32, (2 * channels,))
            if not np.isfinite(predictor_scale).all():
                raise CorruptBitstream(f"predictor_scale_{index} is not finite")
        deviation = _positive(
            profile.array(f"deviation_{index}", np.float32, count), f"deviation_{index}"
        )
        if np.any(np.diff(deviation) > 0):
            raise CorruptBitstream(f"the deviations of group {index} do not descend")
        sensitivity = profile.array(
            f"sensitivity_{index}",
            np.float32,
            (int(size) * 2 * geometry.num_kv_heads + 1,),
        )
        edges = profile.array(f"loudness_edges_{index}", np.float32, (LOUD_CLASS,))
        if not np.isfinite(sensitivity).all() or not np.all(np.diff(edges) >= 0):
            raise CorruptBitstream(f"the sensitivity of group {index} is not finite or in order")
        groups.append(
            Group(
                first_layer=int(first),
                num_layers=int(size),
                basis_symbols=basis,
                basis_scale=_positive(
                    profile.array(f"basis_scale_{index}", np.float32, count),
                    f"basis_scale_{index}",
                ),
                basis_fine=fine,
                predictor_symbols=predictor,
                predictor_scale=predictor_scale,
                deviation=deviation,
                sensitivity=sensitivity,
                loudness_edges=edges,
            )
        )
    return tuple(groups)


def _positive(array: F32, name: str) -> F32:
    if not bool(np.all((array >= _SMALLEST) & (array <= _LARGEST))):
        raise CorruptBitstream(f"array {name!r} is not positive and of sane size")
    return array
