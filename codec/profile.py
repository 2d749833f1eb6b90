"""Profiles: offline statistics of a level set for one model, in a checked file."""

from __future__ import annotations

from dataclasses import dataclass

from codec.geometry import Geometry
from codec.levels import LevelInfo, LevelSet

__all__ = ["Profile", "bundled_profiles"]


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile file holds."""

    digest: bytes
    model_digest: bytes
    geometry: Geometry
    level_set: LevelSet
    levels: tuple[LevelInfo, ...]


def bundled_profiles(model_digest: bytes) -> list[Profile]:
    """Return the profiles that ship with the product for a model; empty where there are none.

    Args:
        model_digest: 32 bytes, the model's identity.
    """
    return [profile for profile in _read_bundled() if profile.model_digest == model_digest]


def _read_bundled() -> list[Profile]:
    return []
