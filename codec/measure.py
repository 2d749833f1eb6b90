"""What a level costs and loses on a model: the figures that profiles carry and planners trade.

Pure arithmetic over a small seam to the model, so that any engine (and a fake one in tests) can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from codec.codec import Codec
from codec.geometry import FloatArray
from codec.levels import LevelInfo

__all__ = ["LossSum", "MeasuredModel", "compare_logits", "measure_levels"]

F32 = npt.NDArray[np.float32]


class MeasuredModel(Protocol):
    """A language model, as far as measuring goes."""

    def context_kv(self, token_ids: Sequence[int]) -> FloatArray:
        """Return the KV cache of tokens from position 0, [layer, kv, token, head, dim]."""
        ...

    def layer0_kv(self, token_ids: Sequence[int]) -> F32 | None:
        """Return float32 [2, token, head, dim], K before rotation and V of layer 0; None if no level needs it."""
        ...

    def continuation_logits(self, kv: FloatArray, token_ids: Sequence[int]) -> F32:
        """Return float32 [token, vocab]: logits after each of `token_ids`, which follow the cache `kv`."""
        ...


@dataclass(slots=True)
class LossSum:
    """Sums over predicted tokens."""

    tokens: int = 0
    scored_tokens: int = 0
    kl: float = 0.0
    log_ppl_difference: float = 0.0
    agreements: int = 0
    bits: float = 0.0
    elements: int = 0

    def info(self, level: LevelInfo) -> LevelInfo:
        """Return the level with its means."""
        return LevelInfo(
            name=level.name,
            level_set=level.level_set,
            index=level.index,
            bits_per_element=round(self.bits / self.elements, 4),
            kl=round(self.kl / self.tokens, 7),
            ppl_ratio=round(float(np.exp(self.log_ppl_difference / self.scored_tokens)), 6),
            top1=round(self.agreements / self.tokens, 5),
        )


def compare_logits(exact: F32, lossy: F32, token_ids: Sequence[int], total: LossSum) -> None:
    """Add the difference between two runs over the same tokens.

    Args:
        exact: float32 [token, vocab], logits after each token with the exact cache.
        lossy: the same with the lossy cache.
        token_ids: the tokens themselves; token i + 1 scores the logits after token i.
        total: gets KL(exact || lossy) in nats, log-perplexity difference and top-1 agreements.
    """
    for start in range(0, len(exact), 64):  # 64 rows at a time: a vocabulary is large
        p = _log_softmax(exact[start : start + 64])
        q = _log_softmax(lossy[start : start + 64])
        total.kl += float((np.exp(p) * (p - q)).sum(dtype=np.float64))
        total.agreements += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        total.tokens += len(p)
        targets = np.asarray(token_ids[start + 1 : start + 1 + len(p)], np.int64)
        rows = np.arange(len(targets))
        total.log_ppl_difference += float((p[rows, targets] - q[rows, targets]).sum())
        total.scored_tokens += len(targets)


def measure_levels(
    codec: Codec,
    model: MeasuredModel,
    contexts: Sequence[Sequence[int]],
    *,
    continuation_tokens: int,
    on_progress: Callable[[int], object] | None = None,
) -> tuple[LevelInfo, ...]:
    """Measure every level of a codec on real coded bytes.

    Args:
        codec: with the profiles whose levels are measured.
        model: the codec's model.
        contexts: token ids; the last `continuation_tokens` of each are predicted from the rest's cache.
        continuation_tokens: at least 2.
        on_progress: called with 1 after each context and level.

    Returns:
        The codec's levels with bits per element, KL, perplexity ratio and top-1 agreement.
    """
    levels = codec.levels()
    sums = [LossSum() for _ in levels]
    for token_ids in contexts:
        head, tail = token_ids[:-continuation_tokens], token_ids[-continuation_tokens:]
        kv = model.context_kv(head)
        exact = model.continuation_logits(kv, tail)
        layer0 = model.layer0_kv(head)
        for level, total in zip(levels, sums, strict=True):
            data = codec.encode(kv, level=level.name, token_start=0, layer0=layer0)
            decoded = codec.decode(data, dtype=np.float32, layer0=layer0)
            total.bits += 8 * len(data)
            total.elements += kv.size
            compare_logits(exact, model.continuation_logits(decoded.kv, tail), tail, total)
            if on_progress is not None:
                on_progress(1)
    return tuple(total.info(level) for level, total in zip(levels, sums, strict=True))


def _log_softmax(logits: F32) -> F32:
    """Float32 with sums in float64: a vocabulary's worth of float64 exponentials is most of the run."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total), np.float32)
