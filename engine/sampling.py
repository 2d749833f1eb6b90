"""Choosing the next token: greedy, or sampled with temperature and top-p from a seeded generator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.0
    """0 = greedy; otherwise logits are divided by it, up to 2."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities sum to this, in (0, 1]."""
    seed: int = 0
    """Seed of the generator; the same seed and logits give the same tokens."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature {self.temperature} is outside 0 to 2")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} is negative")


def choose_token(
    logits: NDArray[np.float32], sampling: Sampling, generator: np.random.Generator
) -> int:
    """Pick a token id.

    Args:
        logits: float32 [vocab].
        sampling: how to pick.
        generator: source of randomness; untouched when greedy.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        # The first token is always kept; the one that crosses the threshold is kept too.
        keep = order[: int(np.searchsorted(cumulative, sampling.top_p)) + 1]
        kept = weights[keep] / weights[keep].sum()
        return int(keep[generator.choice(keep.size, p=kept)])
    return int(generator.choice(weights.size, p=weights))
