"""What can go wrong in the broker in memory.

Owns the kinds of faults and how they are chosen. Invariant: the same source of randomness gives the same
faults. Must not know: transports.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class FaultKind(enum.Enum):
    """What goes wrong with an operation."""

    FAIL = "fail"
    """It raises; the message is not sent."""
    DROP = "drop"
    """It seems to work, and the message is lost."""
    DELAY = "delay"
    """The message, and all behind it on this connection, come later."""
    DUPLICATE = "duplicate"
    """The message comes twice."""
    REORDER = "reorder"
    """The message comes behind later ones."""
    CORRUPT = "corrupt"
    """One bit of the message is turned."""
    DISCONNECT = "disconnect"
    """The connection goes down, with everything under way, and comes back."""
    RESTART = "restart"
    """The broker goes down, with everything under way, and comes back."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: FaultKind
    at: int
    """Number of the operation, from 1, over all connections: publish, request and subscribe count."""
    count: int = 1
    """Operations in a row that it hits."""
    delay_s: float = 0.3
    """For DELAY, REORDER, DISCONNECT and RESTART: how long."""

    def hits(self, operation: int) -> bool:
        """Whether it hits the operation with this number."""
        return self.at <= operation < self.at + self.count


@dataclass(frozen=True, slots=True)
class Noise:
    """Faults at random, as probabilities per message."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 0.3
    """Longest delay, for ``reorder`` and ``delay``."""

    def draw(self, source: random.Random, operation: int) -> Fault | None:
        """Throw the dice for one operation."""
        chance = source.random()
        for kind, share in (
            (FaultKind.DROP, self.drop),
            (FaultKind.DUPLICATE, self.duplicate),
            (FaultKind.REORDER, self.reorder),
            (FaultKind.DELAY, self.delay),
            (FaultKind.CORRUPT, self.corrupt),
        ):
            if chance < share:
                return Fault(kind, operation, delay_s=source.uniform(0.0, self.delay_s))
            chance -= share
        return None
