"""How fast this worker decodes and prefills, learned from its own measurements.

Pure: measurements come in as numbers. Prefill of one token costs ``a + b * position`` seconds,
because attention reads everything before it; decoding costs a time per byte of KV that comes out,
whatever the bitstream's size, for each level set.

Source: planner.md, cost model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FORGETTING = 0.97
"""Weight that an old measurement keeps for each new one: about the last 30 count. A worker's speed
drifts with its neighbours, within minutes rather than seconds."""
MIN_SECONDS = 1e-9
"""Shortest measurement that is believed; a clock may tick more coarsely than a small step."""
_RIDGE = 1e-6
"""Share of the diagonal added to the normal equations: steps at one position only do not tell a
from b, and then the smaller b is taken."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds per token as a straight line over the position."""

    a_s: float
    """Seconds for a token at position 0."""
    b_s: float
    """Seconds more for each token before it."""

    def seconds(self, token_start: int, num_tokens: int) -> float:
        """Predict the time of prefilling ``num_tokens`` on top of ``token_start`` tokens."""
        return self.a_s * num_tokens + self.b_s * _position_sum(token_start, num_tokens)


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured prefill step."""

    token_start: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One measured decode of a chunk."""

    level_set: str
    """Level set, such as ``cachegen``; levels of a set cost about the same."""
    kv_bytes: int
    """Bytes of the KV that came out, in fp16."""
    seconds: float


class SpeedModel:
    """Predicts step times; every measurement corrects it."""

    def __init__(
        self, prefill: Iterable[PrefillSample] = (), decode: Iterable[DecodeSample] = ()
    ) -> None:
        # Normal equations of seconds = a * n + b * sum(positions), each sample weighted by
        # 1 / seconds**2: a short step counts as much as a long one.
        self._nn = self._np = self._pp = self._ny = self._py = 0.0
        self._decode_s: dict[str, float] = {}
        self._decode_bytes: dict[str, float] = {}
        for sample in prefill:
            self.observe_prefill(sample)
        for sample_ in decode:
            self.observe_decode(sample_)

    def observe_prefill(self, sample: PrefillSample) -> None:
        """Take in one measured prefill step."""
        if sample.num_tokens < 1:
            raise ValueError(f"a prefill step of {sample.num_tokens} tokens says nothing")
        seconds = max(sample.seconds, MIN_SECONDS)
        n = sample.num_tokens / seconds
        p = _position_sum(sample.token_start, sample.num_tokens) / seconds
        self._nn = self._nn * FORGETTING + n * n
        self._np = self._np * FORGETTING + n * p
        self._pp = self._pp * FORGETTING + p * p
        self._ny = self._ny * FORGETTING + n
        self._py = self._py * FORGETTING + p

    def observe_decode(self, sample: DecodeSample) -> None:
        """Take in one measured decode."""
        if sample.kv_bytes < 1:
            raise ValueError(f"a decode of {sample.kv_bytes} bytes says nothing")
        key = sample.level_set
        self._decode_s[key] = self._decode_s.get(key, 0.0) * FORGETTING + max(
            sample.seconds, MIN_SECONDS
        )
        self._decode_bytes[key] = self._decode_bytes.get(key, 0.0) * FORGETTING + sample.kv_bytes

    @property
    def prefill(self) -> PrefillCost | None:
        """The fitted line; None before the first measurement."""
        if self._nn == 0.0:
            return None
        flat = PrefillCost(self._ny / self._nn, 0.0)
        pp = self._pp * (1.0 + _RIDGE)
        determinant = self._nn * pp - self._np * self._np
        if determinant <= 0.0:
            return flat
        b = (self._nn * self._py - self._np * self._ny) / determinant
        a = (pp * self._ny - self._np * self._py) / determinant
        if b < 0.0:
            return flat
        if a <= 0.0:
            return PrefillCost(0.0, self._py / self._pp)
        return PrefillCost(a, b)

    @property
    def level_sets(self) -> tuple[str, ...]:
        """Level sets that were measured, sorted."""
        return tuple(sorted(self._decode_s))

    def decode_bytes_per_s(self, level_set: str) -> float | None:
        """KV bytes (fp16) that come out of the decoder per second; None when never measured."""
        if level_set not in self._decode_s:
            return None
        return self._decode_bytes[level_set] / self._decode_s[level_set]

    def decode_seconds(self, level_set: str, kv_bytes: int) -> float:
        """Predict the time of decoding a chunk; 0 for a level set that was never measured."""
        speed = self.decode_bytes_per_s(level_set)
        return 0.0 if speed is None else kv_bytes / speed

    def prefill_seconds(self, token_start: int, num_tokens: int) -> float:
        """Predict the time of a prefill; 0 before the first measurement."""
        cost = self.prefill
        return 0.0 if cost is None else cost.seconds(token_start, num_tokens)


def _position_sum(token_start: int, num_tokens: int) -> float:
    """Sum of the positions of ``num_tokens`` tokens from ``token_start`` on."""
    return num_tokens * token_start + num_tokens * (num_tokens - 1) / 2
