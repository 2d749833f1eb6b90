"""The codec's levels: which ones a scenario needs, and what they cost in bytes and quality.

Costs are the scenario file's, else those of the profiles that the codec ships for the bundled model. A level
that nobody measured is left out. Must not know: how a simulation or a replay uses them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import codec
from scenarios.config import LevelCost, Scenario, request_policy
from scenarios.errors import ScenarioConfigError

BUNDLED_MODEL = "smollm2-135m"
_PROFILES = Path(codec.__file__).parent / "profiles"


def level_costs(scenario: Scenario) -> tuple[LevelCost, ...]:
    """Return the levels of a simulation.

    Raises:
        ScenarioConfigError: a model that is not bundled, and no levels in the file.
    """
    if scenario.cost.levels:
        return scenario.cost.levels
    if scenario.model.name != BUNDLED_MODEL:
        raise ScenarioConfigError(
            scenario.source, "cost.levels", f"is needed to simulate {scenario.model.name}"
        )
    return _bundled()


def bundled_level_sets() -> tuple[str, ...]:
    """Return the level sets that the codec ships a profile for."""
    found = {path.name.split(".")[1] for path in _PROFILES.glob(f"{BUNDLED_MODEL}.*.kvprofile")}
    return tuple(sorted(found))


def wanted_levels(scenario: Scenario) -> tuple[str, ...]:
    """Return the levels that the agent must encode for a scenario's policies, as it names them."""
    if scenario.levels:
        return scenario.levels
    wanted: list[str] = []
    for policy in scenario.policies:
        rule, _, level = request_policy(policy).partition(":")
        if rule == "fixed":
            wanted.append(level)
        elif rule == "cachegen":
            wanted.append("cachegen:*")
        elif rule != "text":
            wanted += ["int8", *(f"{name}:*" for name in bundled_level_sets())]
    if scenario.uplink.tie_level:
        wanted.append(scenario.uplink.tie_level)
    stars = {name for name in wanted if name.endswith(":*")}
    kept = [name for name in wanted if name in stars or f"{name.partition(':')[0]}:*" not in stars]
    # Text alone needs no level, but a store keeps at least one.
    return tuple(dict.fromkeys(kept)) or ("int8",)


@functools.cache
def _bundled() -> tuple[LevelCost, ...]:
    found: dict[str, LevelCost] = {}
    for path in sorted(_PROFILES.glob(f"{BUNDLED_MODEL}.*.kvprofile")):
        for level in codec.Profile.load(path).levels:
            if level.bits_per_element is not None and level.kl is not None:
                found[level.name] = LevelCost(level.name, level.bits_per_element, level.kl)
    return tuple(found.values())
