"""What a choice costs on the worker, and what it costs in quality.

Owns `WorkerSpeeds` (what the worker says of itself) and `CostModel` (that, corrected by what it then
does). Invariants: prefill of one token costs a + b * position, because attention reads everything
before it; decoding costs by the KV that comes out, not by the bits that go in; losses are measured
numbers from a profile, never guesses. Must not know: profiles' files, the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from planner.errors import InvalidState
from planner.model import TEXT, Choice, ChunkOptions

UNMEASURED_KL: Final = math.inf
"""Loss of a level whose loss nobody measured: it is never chosen over a measured one."""
CORRECTION_GAIN: Final = 0.3
"""Weight of the newest measurement in a correction: the third one dominates the first guess."""
MAX_CORRECTION: Final = 8.0
"""A measurement further off than this is a hiccup of the machine, not its speed."""


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """The worker's own measurements, from its ACCEPT message."""

    prefill_a_s: float
    """Seconds per token at position 0."""
    prefill_b_s: float = 0.0
    """Seconds per token more for each token before it."""
    decode_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """KV bytes (fp16) that come out of the decoder per second, by level set."""

    def __post_init__(self) -> None:
        speeds = (self.prefill_a_s, self.prefill_b_s, *self.decode_bytes_per_s.values())
        if not all(math.isfinite(speed) and speed >= 0 for speed in speeds):
            raise InvalidState(f"{self} has a speed that is negative or not finite")

    def prefill_s(self, token_start: int, token_stop: int) -> float:
        """Return the time of prefilling a token range on top of what is before it."""
        num = token_stop - token_start
        positions = num * (token_start + token_stop - 1) / 2
        return self.prefill_a_s * num + self.prefill_b_s * positions

    def decode_s(self, level: str, kv_bytes: float) -> float:
        """Return the time of decoding a chunk; 0 for a level set that was never measured."""
        speed = self.decode_bytes_per_s.get(level_set(level), 0.0)
        return kv_bytes / speed if speed > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LevelCost:
    """One level of one chunk as it lies in the store."""

    name: str
    num_bytes: int
    kl_per_token: float | None
    """Measured mean KL(exact || lossy) per token; None when nobody measured it."""


class CostModel:
    """The worker's speeds, corrected online by the steps that it reports."""

    def __init__(self, speeds: WorkerSpeeds, *, kv_bytes_per_token: int) -> None:
        self.speeds = speeds
        self.kv_bytes_per_token = kv_bytes_per_token
        self._prefill_log = 0.0
        self._decode_log: dict[str, float] = {}

    @property
    def prefill_correction(self) -> float:
        """Measured over predicted prefill time; 1 before the first measurement."""
        return math.exp(self._prefill_log)

    def on_prefill(self, token_start: int, token_stop: int, seconds: float) -> None:
        """Take in one measured prefill step."""
        self._prefill_log = _corrected(
            self._prefill_log, self.speeds.prefill_s(token_start, token_stop), seconds
        )

    def on_decode(self, level: str, num_tokens: int, seconds: float) -> None:
        """Take in one measured decode."""
        name = level_set(level)
        predicted = self.speeds.decode_s(level, num_tokens * self.kv_bytes_per_token)
        self._decode_log[name] = _corrected(self._decode_log.get(name, 0.0), predicted, seconds)

    def prefill_s(self, token_start: int, token_stop: int) -> float:
        """Return the corrected time of a prefill step."""
        return self.speeds.prefill_s(token_start, token_stop) * self.prefill_correction

    def decode_s(self, level: str, num_tokens: int) -> float:
        """Return the corrected time of a decode."""
        predicted = self.speeds.decode_s(level, num_tokens * self.kv_bytes_per_token)
        return predicted * math.exp(self._decode_log.get(level_set(level), 0.0))

    def options(
        self,
        index: int,
        token_start: int,
        token_stop: int,
        levels: Iterable[LevelCost],
        *,
        can_recompute: bool = True,
    ) -> ChunkOptions:
        """Build a chunk's choices: its levels, and text.

        Levels without a measured loss are left out, unless there is nothing else.
        """
        num_tokens = token_stop - token_start
        rows = list(levels)
        measured = [row for row in rows if row.kl_per_token is not None]
        choices = [
            Choice(
                name=row.name,
                num_bytes=row.num_bytes,
                decode_s=self.decode_s(row.name, num_tokens),
                prefill_s=0.0,
                loss=max(0.0, row.kl_per_token or 0.0) * num_tokens,
            )
            for row in (measured or rows)
        ]
        if can_recompute:
            prefill_s = self.prefill_s(token_start, token_stop)
            choices.append(Choice(TEXT, 0, 0.0, prefill_s, 0.0, is_text=True))
        return ChunkOptions(index, token_start, token_stop, tuple(choices))


def level_set(level: str) -> str:
    """Return the level set of a level's name: ``cachegen`` of ``cachegen:1``."""
    return level.split(":", 1)[0]


def makespan_s(
    choices: Sequence[Choice],
    *,
    arrivals_s: Sequence[float],
    send_order: Sequence[int],
    engine_free_s: float = 0.0,
    decoder_free_s: float = 0.0,
) -> float:
    """Return when every chunk is in the cache: link, decoder and engine as one pipeline.

    The decoder takes chunks as they arrive; the engine takes text chunks in token order, each after
    every chunk before it is there.

    Args:
        choices: one per chunk, in token order.
        arrivals_s: when each chunk's last byte is at the worker; ignored for text.
        send_order: indices of the KV chunks in the order of sending.
        engine_free_s: when the engine can begin.
        decoder_free_s: when the decoder can begin.

    Returns:
        Seconds, on the axis of ``arrivals_s``.
    """
    ready = [0.0] * len(choices)
    decoder_s = decoder_free_s
    for index in send_order:
        decoder_s = max(decoder_s, arrivals_s[index]) + choices[index].decode_s
        ready[index] = decoder_s
    engine_s, prefix_s = engine_free_s, 0.0
    for index, choice in enumerate(choices):
        if choice.is_text:
            engine_s = max(engine_s, prefix_s) + choice.prefill_s
            ready[index] = engine_s
        prefix_s = max(prefix_s, ready[index])
    return prefix_s


def _corrected(log_ratio: float, predicted_s: float, measured_s: float) -> float:
    """Move a correction towards one more measurement."""
    if predicted_s <= 0.0 or measured_s <= 0.0:
        return log_ratio
    measured = math.log(measured_s / predicted_s)
    if abs(measured) > math.log(MAX_CORRECTION):
        return log_ratio
    return log_ratio + CORRECTION_GAIN * (measured - log_ratio)
