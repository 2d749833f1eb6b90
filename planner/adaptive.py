"""The policy `kvtide`: plan for what is likely, keep what is promised, change course when it pays.

Each decision solves the plan anew from the state as it is. Text chunks are recomputed from the front
while levels are sent from the back. The next chunk's level comes from the plan at the likely rate
(half of all futures), but never takes more than leaves room, at the promised probability, for every
other chunk at its smallest: later chunks can still change, this one cannot. Invariant: a decision is a
pure function of state, estimator and time. Must not know: clocks, the wire.

Source: docs/planner.md sections 4 and 5; compute-and-load order from Cake, arXiv:2410.03065.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner.curve import DeliveryCurve
from planner.model import (
    Choice,
    ChunkOptions,
    ChunkProgress,
    Decision,
    Reason,
    Stage,
    TransferState,
)
from planner.optimizer import (
    Plan,
    PlanRequest,
    choose,
    finish_first,
    room_for_first,
    text_that_fits,
)
from planner.policies import expected_ttft_s
from planner.samples import Estimator

DEFAULT_TARGET: Final = 0.95
"""P(TTFT <= deadline) that is promised where it can be."""
FIRST_TARGET: Final = 0.65
"""Probability kept by the first chunk's level. Sent at its smallest, one chunk of eight would lose as much
as the whole rest; given up after 0.2 s, it costs 0.2 s."""
LIKELY: Final = 0.5
"""Probability at which levels are chosen; the promise is kept by the limit on the next chunk."""
LOWEST_PROMISE: Final = 0.1
"""When the promise cannot be kept, the highest probability down to this that can be is kept instead."""
PROMISE_STEP: Final = 0.02
"""How finely that probability is searched."""
PREFILL_MARGIN: Final = 1.05
"""Text chunks are planned this much longer than predicted: one late chunk is a missed deadline."""
TEXT_LEAD_S: Final = 0.2
"""A text chunk is told to the worker when its engine runs out of work within this: a round trip with
a full window ahead of it (wire.md: 87-108 ms), doubled. Any earlier would fix the border too early."""
MAX_TEXT_AHEAD: Final = 2
"""Text chunks told to the worker and not yet done, however slow it turns out to be."""
ABANDON_BELOW: Final = 0.8
"""Going coarser: only when the deadline would be met with less probability than this. Above, it pays to
wait for what the next acknowledgements say."""
ABANDON_FIRST_BELOW: Final = 0.6
"""The same for the first chunk sent, while little is known: its estimate still moves the most."""
ABANDON_SAVES: Final = 0.15
"""Going coarser: only for a level with this share fewer bytes than are still to go ..."""
ABANDON_GAINS: Final = 0.03
"""... and only if it makes the deadline so much likelier."""
UPGRADE_GAINS: Final = 0.1
"""Going finer: only if the whole plan loses this share less, what was sent for nothing counted."""
MAX_EPOCHS: Final = 2
"""A chunk is given up at most so many times: what was sent is lost each time."""


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """What the policy aims at."""

    target: float = DEFAULT_TARGET
    """P(TTFT <= deadline) to hold."""
    first_target: float = FIRST_TARGET
    """The same for the first chunk sent, which can still be given up once the link has shown itself."""
    likely: float = LIKELY
    """Probability at which levels are chosen."""
    fastest_with_loss_per_token: float | None = None
    """Instead of least loss by the deadline: soonest, with levels that lose no more than this."""
    may_abandon: bool = True
    may_recompute: bool = True


class AdaptivePolicy:
    """Least loss by the deadline, with text from the front and levels from the back."""

    def __init__(self, config: AdaptiveConfig | None = None, *, name: str = "kvtide") -> None:
        self.config = config if config is not None else AdaptiveConfig()
        self.name = name

    def next_decision(
        self, state: TransferState, estimator: Estimator, now: float
    ) -> Decision | None:
        """Choose the next text chunk if the engine needs one, else the next chunk to send."""
        return self._next(state, estimator, now, link_is_free=True)

    def reconsider(self, state: TransferState, estimator: Estimator, now: float) -> Decision | None:
        """Feed the engine, or give up the chunk in flight, without beginning another one."""
        decision = self._next(state, estimator, now, link_is_free=False)
        if decision is not None or not self.config.may_abandon:
            return decision
        return self._abandon(state, estimator, now)

    # ---- inside ----------------------------------------------------------------------------------

    def _next(
        self, state: TransferState, estimator: Estimator, now: float, *, link_is_free: bool
    ) -> Decision | None:
        missing = state.missing
        if not missing:
            return None
        request = self._request(state, [chunk.options for chunk in missing])
        text_ahead = sum(
            c.stage is Stage.IN_FLIGHT and c.choice is not None and c.choice.is_text
            for c in state.chunks
        )
        feed = (
            text_ahead < MAX_TEXT_AHEAD
            and request.engine_free_s - state.worker.queue_delay_s <= TEXT_LEAD_S
        )
        if not feed and not link_is_free:
            return None
        if estimator.curve(LIKELY, now=now) is None:
            feed = feed and (text_that_fits(request) > 0 or not missing[0].options.levels)
            return self._blind(state, missing, feed, link_is_free, estimator, now)
        is_first = not any(c.choice is not None and not c.choice.is_text for c in state.chunks)
        plan, promised = self._plan(request, estimator, now, is_first=is_first)
        if plan.num_text > 0 and feed:
            chunk, choice = missing[0], missing[0].options.text
            assert choice is not None
            reason = Reason.RECOMPUTE_MEANWHILE
        elif link_is_free and plan.levels:
            chunk, choice = missing[-1], plan.levels[-1]
            reason = Reason.BEST_THAT_FITS if promised > 0.0 else Reason.FINISH_FIRST
        elif link_is_free and promised < self.config.target and missing[-1].options.levels:
            # The link seems too slow to be worth it, but the engine is busy and only use can tell.
            chunk, choice = missing[-1], _cheapest(missing[-1].options)
            reason = Reason.FINISH_FIRST
        else:
            return None
        return self._decision(state, missing, plan, promised, chunk, choice, reason, estimator, now)

    def _blind(
        self,
        state: TransferState,
        missing: Sequence[ChunkProgress],
        feed: bool,
        link_is_free: bool,
        estimator: Estimator,
        now: float,
    ) -> Decision | None:
        """Begin at both ends: the engine is known, and the link shows itself only when used.

        ``feed``: the engine wants work, and the first missing chunk is worth recomputing.
        """
        front, back = missing[0], missing[-1]
        text = front.options.text if self.config.may_recompute else None
        levels = sorted(back.options.levels, key=lambda c: (c.loss, c.num_bytes))
        if text is not None and feed and (len(missing) > 1 or not levels):
            plan = Plan(1, (), 0.0, math.inf, 0.0, 0.0)
            reason = Reason.RECOMPUTE_MEANWHILE
            return self._decision(
                state, missing[:1], plan, 0.0, front, text, reason, estimator, now
            )
        if not link_is_free or not levels:
            return None
        level = levels[len(levels) // 2]
        plan = Plan(0, (level,), 0.0, math.inf, level.loss, level.num_bytes)
        reason = Reason.DEFAULT_LEVEL
        return self._decision(state, missing[-1:], plan, 0.0, back, level, reason, estimator, now)

    def _request(self, state: TransferState, chunks: Sequence[ChunkOptions]) -> PlanRequest:
        """Describe what is left as seen from now."""
        num_bytes, decode_s, engine_s = float(state.bytes_in_flight), 0.0, 0.0
        for chunk in state.chunks:
            choice = chunk.choice
            if choice is None or chunk.stage not in (Stage.IN_FLIGHT, Stage.ARRIVED):
                continue
            if choice.is_text:
                engine_s += choice.prefill_s * PREFILL_MARGIN
            else:
                num_bytes += max(0, choice.num_bytes - chunk.bytes_sent)
                decode_s += choice.decode_s
        worker = state.worker
        engine_s = max(0.0, engine_s - worker.text_begun_s) + worker.prefill_busy_s
        return PlanRequest(
            chunks=tuple(_with_margin(chunk, self.config.may_recompute) for chunk in chunks),
            budget_s=state.remaining_s - worker.tail_prefill_s,
            bytes_before=num_bytes,
            decode_before_s=decode_s,
            engine_free_s=worker.queue_delay_s + engine_s,
            decoder_free_s=worker.queue_delay_s,
        )

    def _plan(
        self, request: PlanRequest, estimator: Estimator, now: float, *, is_first: bool = False
    ) -> tuple[Plan, float]:
        """Return the plan and the probability with which its deadline can be promised.

        ``is_first``: no level was chosen in this transfer yet.
        """
        cap = self.config.fastest_with_loss_per_token
        if cap is not None:
            curve = self._curve(estimator, self.config.likely, now)
            plan = finish_first(request, curve, max_loss_per_token=cap)
            return plan, self.config.target if plan.finish_s <= request.budget_s else 0.0
        promised, room = self._promise(request, estimator, now)
        if is_first:
            # The chunk that shows the link can be given up as soon as it has.
            curve = self._curve(estimator, self.config.first_target, now)
            room = max(room, room_for_first(request, curve))
        if promised > 0.0:
            likely = min(self.config.likely, promised)
            curve = self._curve(estimator, likely, now)
            found = choose(request, curve, quantile=likely, first_limit=room)
            if found is not None:
                return found, promised
        return finish_first(request, self._curve(estimator, LIKELY, now)), 0.0

    def _promise(
        self, request: PlanRequest, estimator: Estimator, now: float
    ) -> tuple[float, float]:
        """The highest probability, up to the target, with which the deadline can be met.

        Returns:
            The probability, 0 when it is below `LOWEST_PROMISE`, and the most bytes that the next
            chunk may have for it.
        """

        def room(quantile: float) -> float:
            return room_for_first(request, self._curve(estimator, quantile, now))

        high = self.config.target
        at_target = room(high)
        if at_target >= 0.0:
            return high, at_target
        low, best = LOWEST_PROMISE, room(LOWEST_PROMISE)
        if best < 0.0:
            return 0.0, -math.inf
        while high - low > PROMISE_STEP:
            middle = (low + high) / 2
            found = room(middle)
            low, high, best = (middle, high, found) if found >= 0.0 else (low, middle, best)
        return low, best

    @staticmethod
    def _curve(estimator: Estimator, quantile: float, now: float) -> DeliveryCurve:
        """The estimator's curve; one that never delivers while nothing is known."""
        curve = estimator.curve(quantile, now=now)
        return DeliveryCurve.straight(0.0) if curve is None else curve

    def _abandon(self, state: TransferState, estimator: Estimator, now: float) -> Decision | None:
        """Give up the chunk being sent, for a coarser or a finer level, when that pays."""
        victim = next((c for c in state.chunks if _unsent(c) > 0), None)
        if victim is None or victim.choice is None or victim.epoch >= MAX_EPOCHS:
            return None
        if estimator.curve(LIKELY, now=now) is None:
            return None
        missing = state.missing
        request = self._request(state, [c.options for c in missing])
        stay, _ = self._promise(request, estimator, now)
        unsent = _unsent(victim)
        cap = self.config.fastest_with_loss_per_token
        cap = math.inf if cap is None else cap
        num_sent = sum(c.choice is not None and not c.choice.is_text for c in state.chunks)
        bar = ABANDON_FIRST_BELOW if num_sent == 1 else ABANDON_BELOW
        if stay < min(self.config.target, bar):
            coarser = [
                c
                for c in victim.options.levels
                if c.num_bytes <= (1.0 - ABANDON_SAVES) * unsent
                and c.loss > victim.choice.loss
                and c.loss <= cap * victim.options.num_tokens
            ]
            if not coarser:
                return None
            choice = min(coarser, key=lambda c: (math.isinf(c.loss), c.num_bytes))
            changed = replace(
                request, bytes_before=request.bytes_before - unsent + choice.num_bytes
            )
            promised, _ = self._promise(changed, estimator, now)
            if promised < stay + ABANDON_GAINS and promised + stay > 0.0:
                return None
            plan, _ = self._plan(changed, estimator, now)
            reason = Reason.ABANDON_TOO_SLOW
        elif stay < self.config.target or victim.epoch > 0 or not missing or cap < math.inf:
            return None
        else:
            again = tuple(sorted((*missing, victim), key=lambda c: c.options.index))
            if again[-1] is not victim:
                return None
            redone = replace(
                self._request(state, [c.options for c in again]),
                bytes_before=request.bytes_before - unsent,
                decode_before_s=max(0.0, request.decode_before_s - victim.choice.decode_s),
            )
            kept, _ = self._plan(request, estimator, now)
            plan, promised = self._plan(redone, estimator, now)
            if promised < self.config.target or not plan.levels:
                return None
            choice = plan.levels[-1]
            before = kept.loss + victim.choice.loss
            if choice.loss >= victim.choice.loss or plan.loss > (1.0 - UPGRADE_GAINS) * before:
                return None
            missing, reason = again, Reason.UPGRADE
        return self._decision(
            state, missing, plan, promised, victim, choice, reason, estimator, now
        )

    def _decision(
        self,
        state: TransferState,
        missing: Sequence[ChunkProgress],
        plan: Plan,
        promised: float,
        chunk: ChunkProgress,
        choice: Choice,
        reason: Reason,
        estimator: Estimator,
        now: float,
    ) -> Decision:
        names = {
            c.options.index: "text"
            if row < plan.num_text
            else plan.levels[row - plan.num_text].name
            for row, c in enumerate(missing)
        }
        chosen = {
            c.options.index: c.options.choice(names[c.options.index]) or choice for c in missing
        }
        chosen[chunk.options.index] = choice
        names[chunk.options.index] = choice.name
        return Decision(
            chunk_index=chunk.options.index,
            choice=choice,
            reason=reason,
            expected_ttft_s=expected_ttft_s(state, chosen, estimator, now),
            ttft_quantiles=(
                (self.config.likely, state.elapsed_s + plan.finish_s + state.worker.tail_prefill_s),
            ),
            meets_deadline=promised >= self.config.target,
            abandons=reason in (Reason.ABANDON_TOO_SLOW, Reason.UPGRADE),
            rate_bytes_per_s=estimator.rate_bytes_per_s(now=now),
            plan=names,
            expected_loss=plan.loss,
        )


def _unsent(chunk: ChunkProgress) -> int:
    """Bytes of a chunk that was begun and is not yet handed to the link whole."""
    if chunk.stage is not Stage.IN_FLIGHT or chunk.choice is None:
        return 0
    return max(0, chunk.choice.num_bytes - chunk.bytes_sent)


def _with_margin(chunk: ChunkOptions, may_recompute: bool) -> ChunkOptions:
    """The chunk with its text choice made longer, or left out."""
    text = chunk.text
    if text is None:
        return chunk
    levels = chunk.levels
    if not may_recompute and levels:
        return ChunkOptions(chunk.index, chunk.token_start, chunk.token_stop, levels)
    slower = Choice(text.name, 0, 0.0, text.prefill_s * PREFILL_MARGIN, text.loss, is_text=True)
    return ChunkOptions(chunk.index, chunk.token_start, chunk.token_stop, (*levels, slower))


def _cheapest(chunk: ChunkOptions) -> Choice:
    """The level with the fewest bytes, one whose loss was measured if there is one."""
    return min(chunk.levels, key=lambda c: (math.isinf(c.loss), c.num_bytes, c.loss))
