"""When to bother: the uplink rates at which sending KV, recomputing, or doing both wins.

Pure arithmetic of the pipeline for one context: the link carries KV bytes, the engine prefills tokens,
and a mixed plan does both at once until they meet. Must not know: models' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FP16_BITS = 16
CLEAR_WIN = 1.05
"""A mixed plan counts as winning when it is faster than either alone by this factor."""


@dataclass(frozen=True, slots=True)
class ContextCost:
    """One context, one level, one worker."""

    num_tokens: int
    kv_elements_per_token: int
    bits_per_element: float
    prefill_tokens_per_s: float
    """Mean over the context."""
    attention_growth: float = 0.0
    """How much more a token at the end costs than one at the start, as a share of the start's."""

    @property
    def kv_bytes(self) -> float:
        """Bytes of the whole context."""
        return self.num_tokens * self.kv_elements_per_token * self.bits_per_element / 8

    @property
    def text_s(self) -> float:
        """Prefill of the whole context."""
        return self.num_tokens / self.prefill_tokens_per_s

    @property
    def tie_bytes_per_s(self) -> float:
        """The rate at which sending everything takes as long as recomputing everything."""
        return self.kv_bytes / self.text_s

    def kv_s(self, bytes_per_s: float) -> float:
        """Time of sending the whole context."""
        return self.kv_bytes / bytes_per_s

    def mixed_s(self, bytes_per_s: float) -> float:
        """Time when text from the front and KV from the back meet.

        Source: with x the share recomputed, text takes T (x + g x^2 / 2) / (1 + g / 2) and the link
        takes K (1 - x); equal at the root of a quadratic.
        """
        text_s, kv_s, growth = self.text_s, self.kv_s(bytes_per_s), self.attention_growth
        scale = text_s / (1.0 + growth / 2.0)
        linear = scale + kv_s
        if growth == 0.0:
            share = kv_s / linear
        else:
            quadratic = scale * growth / 2.0
            share = ((linear**2 + 4.0 * quadratic * kv_s) ** 0.5 - linear) / (2.0 * quadratic)
        return kv_s * (1.0 - share)

    def winner(self, bytes_per_s: float) -> str:
        """Who is first at a rate: ``text``, ``kv`` or ``mixed``."""
        text_s, kv_s = self.text_s, self.kv_s(bytes_per_s)
        if self.mixed_s(bytes_per_s) * CLEAR_WIN < min(text_s, kv_s):
            return "mixed"
        return "text" if text_s < kv_s else "kv"

    def mixed_range_bytes_per_s(self) -> tuple[float, float]:
        """The lowest and the highest rate at which a mixed plan clearly wins."""
        tie = self.tie_bytes_per_s
        low = _bisect(tie / 1e4, tie, lambda rate: self.winner(rate) == "mixed")
        high = _bisect(tie * 1e4, tie, lambda rate: self.winner(rate) == "mixed")
        return low, high


def rate_ladder(costs: Sequence[ContextCost], num_rates: int = 9) -> list[float]:
    """Rates around the ties, evenly spaced in the logarithm. Unit: bytes per second."""
    ties = [cost.tie_bytes_per_s for cost in costs]
    low, high = min(ties) / 16.0, max(ties) * 16.0
    step = (high / low) ** (1.0 / (num_rates - 1))
    return [low * step**index for index in range(num_rates)]


def _bisect(outside: float, inside: float, holds: object) -> float:
    """The border between a rate where it does not hold and one where it does."""
    assert callable(holds)
    for _ in range(60):
        middle = (outside * inside) ** 0.5
        if holds(middle):
            inside = middle
        else:
            outside = middle
    return inside
