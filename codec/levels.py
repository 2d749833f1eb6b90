"""Level sets and level names: the one table of what `cachegen:2` means."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from codec.errors import UnknownLevel

__all__ = [
    "BASELINE_LEVELS",
    "REFINEMENT_LEVELS",
    "LevelInfo",
    "LevelSet",
    "RefinementInfo",
    "level_name",
    "parse_level",
    "parse_refinement",
    "refinement_name",
]

REFINEMENT_LEVELS = 2
"""A refinement makes a level of set `klt` this many levels finer: its step is a third."""


class LevelSet(enum.StrEnum):
    """Families of levels that share a transform; the value is the first part of a level's name."""

    FP16 = "fp16"
    INT8 = "int8"
    CACHEGEN = "cachegen"
    KLT = "klt"

    @property
    def wire_id(self) -> int:
        """The number in bitstreams and profiles."""
        return _WIRE_IDS[self]

    @classmethod
    def from_wire_id(cls, wire_id: int) -> LevelSet:
        """Return the set of a number.

        Raises:
            ValueError: no set has it.
        """
        for level_set, known in _WIRE_IDS.items():
            if known == wire_id:
                return level_set
        raise ValueError(f"no level set has number {wire_id}")

    @property
    def needs_profile(self) -> bool:
        """Whether bitstreams of this set can only be read with a profile."""
        return self not in (LevelSet.FP16, LevelSet.INT8)


_WIRE_IDS = {LevelSet.FP16: 1, LevelSet.INT8: 2, LevelSet.CACHEGEN: 3, LevelSet.KLT: 4}


@dataclass(frozen=True, slots=True)
class LevelInfo:
    """One level, and what it was measured to cost and to lose."""

    name: str
    """`fp16`, `int8`, `cachegen:0`, ...; index 0 is the finest of its set."""

    level_set: LevelSet
    index: int

    bits_per_element: float | None
    """Bits per KV element with everything counted; None where nobody measured."""

    kl: float | None
    """Mean KL(exact || lossy) of next-token distributions, nats, on held-out text."""

    ppl_ratio: float | None
    """Perplexity with the lossy cache over perplexity with the exact one."""

    top1: float | None
    """Share of tokens whose most likely successor is the same, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RefinementInfo:
    """A bitstream that makes a decoded level finer."""

    name: str
    """`klt:6>4`: from level 6 to level 4."""

    base: str
    """The level that it refines, sent whole or itself refined."""

    fine: str
    """The level that comes out."""


BASELINE_LEVELS = (
    LevelInfo("fp16", LevelSet.FP16, 0, 16.0, None, None, None),
    LevelInfo("int8", LevelSet.INT8, 0, None, None, None, None),
)
"""Levels that need no profile. Their loss depends on the model, so it is in no table here; a profile may carry it."""


def level_name(level_set: LevelSet, index: int) -> str:
    """Return `fp16`, `int8` or `<set>:<index>`."""
    return f"{level_set}:{index}" if level_set.needs_profile else str(level_set)


def parse_level(name: str) -> tuple[LevelSet, int]:
    """Split a level name into its set and index.

    Raises:
        UnknownLevel: the name is not of the form `fp16`, `int8` or `<set>:<index>`.
    """
    label, colon, number = name.partition(":")
    for level_set in LevelSet:
        if level_set != label:
            continue
        if not level_set.needs_profile and not colon:
            return level_set, 0
        if level_set.needs_profile and number.isascii() and number.isdecimal() and len(number) <= 3:
            return level_set, int(number)
    raise UnknownLevel(f"no level is named {name!r}; levels are fp16, int8, cachegen:N and klt:N")


def refinement_name(base: int, fine: int) -> str:
    """Return `klt:<base>><fine>`: what makes level `base` into the finer level `fine`."""
    return f"{LevelSet.KLT}:{base}>{fine}"


def parse_refinement(name: str) -> tuple[LevelSet, int, int] | None:
    """Return set, base index and fine index of a refinement's name; None for any other name."""
    base, mark, fine = name.partition(">")
    if not mark or not (fine.isascii() and fine.isdecimal() and len(fine) <= 3):
        return None
    try:
        level_set, index = parse_level(base)
    except UnknownLevel:
        return None
    if level_set is not LevelSet.KLT or index != int(fine) + REFINEMENT_LEVELS:
        return None
    return level_set, index, int(fine)
