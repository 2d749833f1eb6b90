"""Bytes of one family of schemes over another's at the same KL, by straight lines between measured levels, in logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Share", "bits_at", "share_over"]

Point = tuple[float, float]
"""Bits per element, KL."""


@dataclass(frozen=True, slots=True)
class Share:
    """Ours over theirs."""

    low_kl: float
    high_kl: float
    """Where both were measured, within what was asked for."""

    worst: float
    mean: float


def bits_at(points: Sequence[Point], kl: float) -> float | None:
    """Return bits per element at a KL; None outside of what was measured."""
    ordered = sorted(points, key=lambda point: point[1])
    kls = np.log([point[1] for point in ordered])
    if not kls[0] <= np.log(kl) <= kls[-1]:
        return None
    return float(np.exp(np.interp(np.log(kl), kls, np.log([point[0] for point in ordered]))))


def share_over(
    ours: Sequence[Point], theirs: Sequence[Point], *, low_kl: float = 0.003, high_kl: float = 0.02
) -> Share | None:
    """Compare at 41 KLs, evenly spaced in logs, where both families were measured; None if nowhere."""
    pairs = []
    for kl in np.geomspace(low_kl, high_kl, 41):
        mine, other = bits_at(ours, float(kl)), bits_at(theirs, float(kl))
        if mine is not None and other is not None:
            pairs.append((float(kl), mine / other))
    if not pairs:
        return None
    shares = [share for _, share in pairs]
    return Share(pairs[0][0], pairs[-1][0], max(shares), float(np.mean(shares)))
