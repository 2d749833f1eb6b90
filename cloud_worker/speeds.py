"""How fast this worker decodes and prefills, learned from its own measurements.

Pure: measurements come in as numbers. A prefill call costs a fixed time (all weights are read once,
however few the tokens) and ``a + b * position`` seconds for each token, because attention reads
everything before it. Decoding costs a time per byte of KV that comes out, whatever the bitstream's
size, for each level set.

Source: planner.md, cost model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNMEASURED_DECODE_BYTES_PER_S = 200e6
"""Told before the first measurement. Source: docs/bitstream.md, 100 million symbols of 2 bytes a second."""
FORGETTING = 0.97
"""Weight that an old measurement keeps for each new one: about the last 30 count. A worker's speed
drifts with its neighbours, within minutes rather than seconds."""
MIN_SECONDS = 1e-9
"""Shortest measurement that is believed; a clock may tick more coarsely than a small step."""
_RIDGE = 1e-9
"""Share of the diagonal added to the normal equations, so that steps of one length at one position,
which cannot tell the three numbers apart, still give an answer."""


_CALL, _A, _B = 0, 1, 2
_CHOICES = ([_A], [_A, _B], [_CALL, _A], [_CALL, _A, _B], [_B], [_CALL, _B], [_CALL])
"""Every choice of which numbers are not zero; where two fit alike, the earlier one is taken."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a prefill call; no number is negative."""

    call_s: float
    """Seconds of a call, however few its tokens."""
    a_s: float
    """Seconds more for each token at position 0."""
    b_s: float
    """Seconds more for each token before it."""

    def seconds(self, token_start: int, num_tokens: int) -> float:
        """Predict the time of prefilling ``num_tokens`` on top of ``token_start`` tokens."""
        numbers = (self.call_s, self.a_s, self.b_s)
        return float(np.dot(numbers, _features(token_start, num_tokens)))


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
        # Normal equations of seconds = call + a * n + b * sum(positions), each sample weighted by
        # 1 / seconds**2: a short step counts as much as a long one.
        self._gram = np.zeros((3, 3))
        self._right = np.zeros(3)
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
        features = _features(sample.token_start, sample.num_tokens) / seconds
        self._gram = self._gram * FORGETTING + np.outer(features, features)
        self._right = self._right * FORGETTING + features

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
        """The best fit without a negative number; None before the first measurement."""
        if not self._gram.any():
            return None
        best = PrefillCost(0.0, 0.0, 0.0)
        best_error = 0.0
        for used in _CHOICES:
            gram = self._gram[np.ix_(used, used)]
            ridge = np.diag(np.diag(gram)) * _RIDGE
            if not gram.diagonal().all():
                continue
            part = np.linalg.solve(gram + ridge, self._right[used])
            if (part < 0).any():
                continue
            numbers = np.zeros(3)
            numbers[used] = part
            # Squared error up to a constant that all choices share.
            error = float(numbers @ self._gram @ numbers - 2 * numbers @ self._right)
            if error < best_error - 1e-9:
                best, best_error = PrefillCost(*(float(n) for n in numbers)), error
        return best

    def prefill_cost(self) -> PrefillCost:
        """The fitted cost; nothing at all before the first measurement."""
        return self.prefill or PrefillCost(0.0, 0.0, 0.0)

    def slowest_decode_bytes_per_s(self) -> float:
        """Decoding speed of the slowest level set, for a planner that takes one number."""
        speeds = [self.decode_bytes_per_s(level_set) for level_set in self.level_sets]
        return min((speed for speed in speeds if speed), default=UNMEASURED_DECODE_BYTES_PER_S)

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


def _features(token_start: int, num_tokens: int) -> NDArray[np.float64]:
    """Return calls, tokens and the sum of their positions: what the three numbers multiply."""
    position_sum = num_tokens * token_start + num_tokens * (num_tokens - 1) / 2
    return np.array([1.0, num_tokens, position_sum])
