"""RobustMPC carried over from video streaming: the best sequence of levels at a cautious rate.

In video, the horizon ends in a full buffer; here it ends at the deadline, so the horizon is all that is
left. In order, levels only, text when nothing fits, as the paper's policy does. Must not know: clocks.

Source: Yin et al., "A Control-Theoretic Approach for Dynamic Adaptive Video Streaming over HTTP",
SIGCOMM 2015.
"""

from __future__ import annotations

from planner.curve import DeliveryCurve
from planner.model import Decision, Reason, TransferState
from planner.optimizer import least_loss, loss_grid
from planner.policies import decide, expected_ttft_s
from planner.samples import Estimator


class MpcPolicy:
    """Least total loss over the remaining chunks at the estimated rate, replanned at each chunk."""

    name = "robust-mpc"

    def next_decision(
        self, state: TransferState, estimator: Estimator, now: float
    ) -> Decision | None:
        """Choose for the first missing chunk."""
        missing = state.missing
        if not missing:
            return None
        chunk = missing[0]
        curve = estimator.curve(0.5, now=now)
        levels = chunk.options.levels
        if not levels:
            choice, reason = chunk.options.choices[0], Reason.ONLY_CHOICE
        elif curve is None:
            ordered = sorted(levels, key=lambda c: c.loss)
            choice, reason = ordered[len(ordered) // 2], Reason.DEFAULT_LEVEL
        else:
            options = [c.options for c in missing]
            limits = self._limits(state, curve)
            found = least_loss(
                [o.levels for o in options], [limits] * len(options), tick=loss_grid(options)
            )
            text = chunk.options.text
            if found is not None:
                choice, reason = found.choices[0], Reason.BEST_THAT_FITS
            elif text is not None:
                choice, reason = text, Reason.TEXT_NOTHING_FITS
            else:
                choice, reason = min(levels, key=lambda c: c.num_bytes), Reason.FINISH_FIRST
        expected = expected_ttft_s(state, {chunk.options.index: choice}, estimator, now)
        return decide(state, chunk, choice, reason, expected, estimator, now)

    def reconsider(self, state: TransferState, estimator: Estimator, now: float) -> Decision | None:
        """Return None: a chunk begun is finished."""
        return None

    @staticmethod
    def _limits(state: TransferState, curve: DeliveryCurve) -> float:
        """Bytes that can still be sent so that the last chunk is also decoded in time."""
        last = state.missing[-1].options
        decode_s = max((choice.decode_s for choice in last.levels), default=0.0)
        budget_s = state.remaining_s - state.worker.tail_prefill_s - decode_s
        return curve.bytes_within(budget_s) - state.bytes_in_flight
