"""Policies that need no plan: text, one fixed level, and the paper's adaptation.

Owns the `Policy` Protocol. A policy is asked each time the sender could begin another chunk; None
means that there is nothing (more) to begin now. Must not know: clocks, the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from planner.errors import LevelUnavailable
from planner.model import (
    Choice,
    ChunkOptions,
    ChunkProgress,
    Decision,
    Reason,
    Stage,
    TransferState,
)
from planner.samples import Estimator


class Policy(Protocol):
    """Decides what to send next."""

    name: str

    def next_decision(
        self, state: TransferState, estimator: Estimator, now: float
    ) -> Decision | None:
        """Return what to begin next, or None.

        Args:
            state: the transfer as it is.
            estimator: what is known about the link.
            now: seconds on the axis of the estimator's samples.

        Returns:
            A decision for a missing chunk, or one that abandons a chunk in flight; None when there
            is nothing to begin at this moment. A text decision costs no bytes: ask again at once.
        """

    def reconsider(self, state: TransferState, estimator: Estimator, now: float) -> Decision | None:
        """Return a change of course while the sender is busy, or None.

        To be asked when an acknowledgement came, when one is overdue, and when the worker has
        finished a chunk. The answer is either a text decision for a missing chunk or a decision that
        abandons a chunk in flight; never another chunk to send.
        """


class _Steady:
    """A policy that never changes its mind about what it has begun."""

    def reconsider(self, state: TransferState, estimator: Estimator, now: float) -> Decision | None:
        """Return None."""
        return None


class TextPolicy(_Steady):
    """Recompute everything: sends nothing but the tokens."""

    name = "text"

    def next_decision(
        self, state: TransferState, estimator: Estimator, now: float
    ) -> Decision | None:
        """Choose text for the first missing chunk."""
        for chunk in state.missing:
            choice = chunk.options.text
            if choice is None:
                raise LevelUnavailable("text", chunk.options.index, _names(chunk.options))
            expected = expected_ttft_s(state, {chunk.options.index: choice}, estimator, now)
            return decide(state, chunk, choice, Reason.FIXED, expected, estimator, now)
        return None


class FixedPolicy(_Steady):
    """One level for every chunk, first to last."""

    def __init__(self, level: str, *, name: str | None = None) -> None:
        self.level = level
        self.name = name or f"fixed:{level}"

    def next_decision(
        self, state: TransferState, estimator: Estimator, now: float
    ) -> Decision | None:
        """Choose the level for the first missing chunk.

        Raises:
            LevelUnavailable: the chunk does not have it.
        """
        for chunk in state.missing:
            choice = chunk.options.choice(self.level)
            if choice is None:
                raise LevelUnavailable(self.level, chunk.options.index, _names(chunk.options))
            expected = expected_ttft_s(state, {chunk.options.index: choice}, estimator, now)
            return decide(state, chunk, choice, Reason.FIXED, expected, estimator, now)
        return None


class CachegenPolicy(_Steady):
    """The paper's adaptation, as published.

    The last throughput is the future. The first chunk goes at a medium default level. Then each chunk
    takes the best level at which all remaining chunks would be sent and decoded in the time that is
    left; when none fits, text. Chunks go first to last and text chunks are recomputed in their turn.

    Source: CacheGen, arXiv:2310.07240, section 5.3 ("Adapting when streaming KV").
    """

    name = "cachegen"

    def __init__(self, *, default_level: str | None = None, level_set: str = "cachegen") -> None:
        self._default_level = default_level
        self._level_set = level_set

    def next_decision(
        self, state: TransferState, estimator: Estimator, now: float
    ) -> Decision | None:
        """Choose for the first missing chunk."""
        missing = state.missing
        if not missing:
            return None
        chunk = missing[0]
        levels = self._levels(chunk.options)
        rate = estimator.rate_bytes_per_s(now=now)
        if not levels:
            choice, reason = chunk.options.choices[0], Reason.ONLY_CHOICE
        elif rate is None:
            choice, reason = self._default(chunk.options, levels), Reason.DEFAULT_LEVEL
        else:
            choice, reason = self._best(state, missing, levels, estimator, now)
        expected = expected_ttft_s(state, {chunk.options.index: choice}, estimator, now)
        return decide(state, chunk, choice, reason, expected, estimator, now)

    def _levels(self, options: ChunkOptions) -> list[Choice]:
        """The level set's choices, best first; any KV choice where the set is absent."""
        own = [c for c in options.levels if c.name.split(":")[0] == self._level_set]
        return sorted(own or options.levels, key=lambda c: (c.loss, c.num_bytes))

    def _default(self, options: ChunkOptions, levels: Sequence[Choice]) -> Choice:
        if self._default_level is not None:
            choice = options.choice(self._default_level)
            if choice is None:
                raise LevelUnavailable(self._default_level, options.index, _names(options))
            return choice
        return levels[len(levels) // 2]

    def _best(
        self,
        state: TransferState,
        missing: Sequence[ChunkProgress],
        levels: Sequence[Choice],
        estimator: Estimator,
        now: float,
    ) -> tuple[Choice, Reason]:
        budget_s = state.remaining_s - state.worker.tail_prefill_s
        for level in levels:
            num_bytes = state.bytes_in_flight
            decode_s = level.decode_s
            for chunk in missing:
                same = chunk.options.choice(level.name)
                num_bytes += level.num_bytes if same is None else same.num_bytes
                # Decoding is pipelined with sending: only the last chunk's decode comes after it.
                decode_s = level.decode_s if same is None else same.decode_s
            if estimator.time_quantile_s(num_bytes, 0.5, now=now) + decode_s <= budget_s:
                return level, Reason.BEST_THAT_FITS
        text = missing[0].options.text
        if text is not None:
            return text, Reason.TEXT_NOTHING_FITS
        return min(levels, key=lambda c: c.num_bytes), Reason.FINISH_FIRST


def expected_ttft_s(
    state: TransferState, plan: dict[int, Choice], estimator: Estimator, now: float
) -> float:
    """Estimate the median TTFT when every missing chunk goes like the planned ones.

    Chunks without an entry in ``plan`` take the choice of the same name as the plan's last one, or
    their first. Link, decoder and engine work in parallel; the engine goes in token order.

    Returns:
        Seconds from the request's arrival; infinite when nothing is known about the link.
    """
    last = plan[max(plan)]
    num_bytes = float(state.bytes_in_flight)
    decode_s = 0.0
    prefill_s = state.worker.queue_delay_s + state.worker.prefill_busy_s
    for chunk in state.chunks:
        if chunk.stage is Stage.READY:
            continue
        if chunk.stage is Stage.MISSING:
            choice = plan.get(chunk.options.index)
            choice = choice or chunk.options.choice(last.name) or chunk.options.choices[0]
            num_bytes += choice.num_bytes
        else:
            choice = chunk.choice
            if choice is None:
                continue
            num_bytes += max(0, choice.num_bytes - chunk.bytes_sent)
        decode_s = choice.decode_s
        prefill_s += choice.prefill_s
    link_s = estimator.time_quantile_s(num_bytes, 0.5, now=now) if num_bytes > 0 else 0.0
    if math.isinf(link_s):
        return math.inf
    return state.elapsed_s + max(link_s + decode_s, prefill_s) + state.worker.tail_prefill_s


def decide(
    state: TransferState,
    chunk: ChunkProgress,
    choice: Choice,
    reason: Reason,
    expected: float,
    estimator: Estimator,
    now: float,
) -> Decision:
    """Fill in a decision of a policy that plans no further than this chunk."""
    return Decision(
        chunk_index=chunk.options.index,
        choice=choice,
        reason=reason,
        expected_ttft_s=expected,
        ttft_quantiles=((0.5, expected),),
        meets_deadline=expected <= state.deadline_s,
        rate_bytes_per_s=estimator.rate_bytes_per_s(now=now),
        plan={chunk.options.index: choice.name},
        expected_loss=choice.loss,
    )


def _names(options: ChunkOptions) -> tuple[str, ...]:
    return tuple(choice.name for choice in options.choices)
