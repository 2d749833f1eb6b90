"""The traces that ship with the project, made from a seed.

Invariant: the same seed gives the same bytes on every machine and Python version. So only
`random.Random.random()`, whose sequence Python guarantees, and exact arithmetic are used, no
transcendental function. Run as `python -m scenarios.generate` to write `traces/` again.
Must not know: links, scenarios.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACES_DIR = Path(__file__).parent / "traces"

_IRWIN_HALL_TERMS = 12
"""Twelve uniforms minus six: mean 0, variance 1, close to a normal; no libm in it."""
_PACKET_BITS = 1500 * 8


def _normal(rng: random.Random) -> float:
    return sum(rng.random() for _ in range(_IRWIN_HALL_TERMS)) - _IRWIN_HALL_TERMS / 2


def lte_like(
    seed: int,
    *,
    duration_s: float,
    step_s: float,
    low_mbps: float,
    high_mbps: float,
) -> list[float]:
    """Return an LTE-like uplink: a cell quality that wanders, fading on top, short handover gaps.

    The shape follows what Saturator recordings of LTE uplinks show (Winstein et al., NSDI 2013,
    section 3): correlation over seconds, strong variation within one, gaps of 0.1 to 0.3 s.

    Args:
        seed: of the generator.
        duration_s: length of the trace.
        step_s: length of one value.
        low_mbps: below this only fading and handovers go.
        high_mbps: the wandering mean stays under this.

    Returns:
        One rate per step, in Mbit/s.
    """
    rng = random.Random(seed)
    middle = (low_mbps + high_mbps) / 2
    quality = middle
    fading = 1.0
    gap_steps = 0
    rates: list[float] = []
    for _ in range(round(duration_s / step_s)):
        pull = 0.15 * step_s * (middle - quality)
        quality += pull + 0.45 * (high_mbps - low_mbps) * step_s * _normal(rng)
        quality = min(high_mbps, max(low_mbps, quality))
        fading = min(1.4, max(0.4, fading + 0.3 * (1.0 - fading) + 0.12 * _normal(rng)))
        if gap_steps == 0 and rng.random() < step_s / 25.0:  # a handover about every 25 s
            gap_steps = 1 + int(rng.random() * 0.3 / step_s)
        rates.append(0.3 if gap_steps else quality * fading)
        gap_steps = max(0, gap_steps - 1)
    return rates


def starlink_like(
    seed: int, *, duration_s: float, step_s: float, low_mbps: float, high_mbps: float
) -> list[float]:
    """Return a satellite uplink: a new level every 15 s, a dip at each change, rare obstructions.

    The 15 s period is the one at which satellites are reassigned (Tanveer et al., CoNEXT 2023).
    """
    rng = random.Random(seed)
    slot_s = 15.0
    level = (low_mbps + high_mbps) / 2
    blocked_steps = 0
    rates: list[float] = []
    for index in range(round(duration_s / step_s)):
        in_slot_s = (index * step_s) % slot_s
        if in_slot_s < step_s / 2:
            level = low_mbps + (high_mbps - low_mbps) * rng.random()
        dip = 0.4 if in_slot_s < 0.4 else 1.0
        if blocked_steps == 0 and rng.random() < step_s / 90.0:  # an overpass about every 90 s
            blocked_steps = 1 + int(rng.random() * 3.0 / step_s)
        noise = min(1.3, max(0.7, 1.0 + 0.1 * _normal(rng)))
        rates.append(0.0 if blocked_steps else level * dip * noise)
        blocked_steps = max(0, blocked_steps - 1)
    return rates


def steps(levels: Sequence[tuple[float, float]], *, step_s: float) -> list[float]:
    """Return a trace of steps, given as (seconds, Mbit/s)."""
    return [rate for length_s, rate in levels for _ in range(round(length_s / step_s))]


def as_time_rate(rates: Sequence[float], *, step_s: float, title: str) -> str:
    """Write `seconds Mbit/s` lines, one per step, rates to a thousandth."""
    lines = [f"{index * step_s:.1f} {rate:.3f}" for index, rate in enumerate(rates)]
    return "\n".join((f"# {title}", *lines)) + "\n"


def as_mahimahi(rates: Sequence[float], *, step_s: float) -> str:
    """Write delivery opportunities: a packet whenever the integral of the rate has 1500 bytes more."""
    step_ms = round(step_s * 1000)
    due_bits = 0.0
    times: list[int] = []
    for index, rate in enumerate(rates):
        for ms in range(index * step_ms + 1, (index + 1) * step_ms + 1):
            due_bits += rate * 1000.0
            while due_bits >= _PACKET_BITS:
                due_bits -= _PACKET_BITS
                times.append(ms)
    end_ms = len(rates) * step_ms
    if times[-1] != end_ms:  # the period of such a file is its last time
        times.append(end_ms)
    return "".join(f"{ms}\n" for ms in times)


@dataclass(frozen=True, slots=True)
class ShippedTrace:
    """One file of `traces/`."""

    file_name: str
    about: str
    """One line for SOURCES.md."""
    make: Callable[[], str]


_STEP_S = 0.1

SHIPPED: tuple[ShippedTrace, ...] = (
    ShippedTrace(
        "lte-uplink.txt",
        "LTE-like uplink, 10-20 Mbit/s, 180 s, seed 7",
        lambda: as_time_rate(
            lte_like(7, duration_s=180, step_s=_STEP_S, low_mbps=11.0, high_mbps=21.0),
            step_s=_STEP_S,
            title="LTE-like uplink, seed 7: seconds, Mbit/s",
        ),
    ),
    ShippedTrace(
        "lte-drive.txt",
        "LTE-like uplink of a moving car, 1-16 Mbit/s, 300 s, seed 11",
        lambda: as_time_rate(
            lte_like(11, duration_s=300, step_s=_STEP_S, low_mbps=1.0, high_mbps=16.0),
            step_s=_STEP_S,
            title="LTE-like uplink of a moving car, seed 11: seconds, Mbit/s",
        ),
    ),
    ShippedTrace(
        "starlink-like.txt",
        "satellite-like uplink, 5-35 Mbit/s, 300 s, seed 13",
        lambda: as_time_rate(
            starlink_like(13, duration_s=300, step_s=_STEP_S, low_mbps=5.0, high_mbps=35.0),
            step_s=_STEP_S,
            title="satellite-like uplink, seed 13: seconds, Mbit/s",
        ),
    ),
    ShippedTrace(
        "step.txt",
        "20 Mbit/s, after 5 s 4 Mbit/s, after 20 s 20 Mbit/s again; 60 s",
        lambda: as_time_rate(
            steps(((5, 20.0), (15, 4.0), (40, 20.0)), step_s=1.0),
            step_s=1.0,
            title="steps: seconds, Mbit/s",
        ),
    ),
    ShippedTrace(
        "outage.txt",
        "12 Mbit/s with 77 s without a byte from 6 s on; 180 s",
        lambda: as_time_rate(
            steps(((6, 12.0), (77, 0.0), (97, 12.0)), step_s=1.0),
            step_s=1.0,
            title="an outage of 77 s: seconds, Mbit/s",
        ),
    ),
    ShippedTrace(
        "constant.txt",
        "16 Mbit/s, 10 s",
        lambda: as_time_rate(
            steps(((10, 16.0),), step_s=1.0), step_s=1.0, title="constant: seconds, Mbit/s"
        ),
    ),
    ShippedTrace(
        "lte-slow.up",
        "LTE-like uplink in Mahimahi's format, 1-3 Mbit/s, 60 s, seed 17",
        lambda: as_mahimahi(
            lte_like(17, duration_s=60, step_s=_STEP_S, low_mbps=1.0, high_mbps=3.0),
            step_s=_STEP_S,
        ),
    ),
)


def sources_text() -> str:
    """Return the text of SOURCES.md."""
    rows = "".join(f"| `{t.file_name}` | {t.about} |\n" for t in SHIPPED)
    return (
        "# Where these traces come from\n\n"
        "All of them are made by `python -m scenarios.generate` of this project (Apache-2.0); no recorded data\n"
        "is in them. A test makes them again and compares the bytes. `.txt`: lines of seconds and Mbit/s, a\n"
        "value holds until the next time. `.up`: one line per 1500-byte delivery opportunity, in milliseconds.\n"
        "All loop at their end.\n\n"
        "| file | what |\n|---|---|\n" + rows
    )


def main() -> None:
    """Write all shipped traces and SOURCES.md."""
    TRACES_DIR.mkdir(exist_ok=True)
    for shipped in SHIPPED:
        (TRACES_DIR / shipped.file_name).write_text(shipped.make(), encoding="ascii")
    (TRACES_DIR / "SOURCES.md").write_text(sources_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
