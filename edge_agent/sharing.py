"""Requests that share the uplink: who may have how much in flight, and who is refused at the door.

Translates running sessions into the planner's demands. Invariant: with a single session nothing is
limited. Must not know: HTTP, policies.
"""

from __future__ import annotations

from edge_agent.errors import DeadlineRefused
from planner import Estimator, TransferState
from planner.fleet import Demand, admit, demand_of, divide_window
from wire import SenderSession

PROMISED = 0.5
"""Probability at which a strict deadline is looked at: who is likelier late than not is refused."""
DIVIDE_EVERY_S = 0.1
"""Least time between two divisions of the window. Unit: seconds."""
WINDOW_GAIN = 1.25
EXTRA_SEGMENTS = 2
"""The window rule of docs/wire-protocol.md, here for the uplink as a whole."""


class UplinkShares:
    """All sessions that send over this agent's uplink."""

    def __init__(self) -> None:
        self._sessions: dict[str, SenderSession] = {}
        self._demands: dict[str, Demand] = {}
        self._divided_at = 0.0

    def enter(
        self,
        name: str,
        session: SenderSession,
        state: TransferState,
        estimator: Estimator,
        *,
        is_strict: bool,
        now: float,
    ) -> None:
        """Let a session in.

        Raises:
            DeadlineRefused: it wants its deadline or nothing, and cannot have it.
        """
        demand = demand_of(name, state)
        if is_strict:
            curve = estimator.curve(PROMISED, now=now)
            admission = admit(demand, list(self._demands.values()), curve)
            if not admission.is_admitted:
                raise DeadlineRefused(
                    f"the deadline of {state.deadline_s:g} s cannot be met: {admission.sentence}",
                    admission.retry_after_s,
                )
        self._sessions[name], self._demands[name] = session, demand

    def leave(self, name: str) -> None:
        """Let go of a session; the others may have its share."""
        self._sessions.pop(name, None)
        self._demands.pop(name, None)
        if len(self._sessions) == 1:
            for session in self._sessions.values():
                session.window_share_bytes = None

    def update(self, name: str, state: TransferState, *, now: float) -> None:
        """Take in how far a session is, and divide the window anew when it is time."""
        if len(self._sessions) < 2 or name not in self._sessions:
            return
        if now - self._divided_at < DIVIDE_EVERY_S:
            return
        self._divided_at = now
        # The others' deadlines have come nearer since they said what they need.
        self._demands[name] = demand_of(name, state)
        meters = [session.meter for session in self._sessions.values()]
        rate = sum(meter.rate_bytes_per_s or 0.0 for meter in meters)
        rtts = [meter.min_rtt_s for meter in meters if meter.min_rtt_s is not None]
        if rate <= 0.0 or not rtts:
            return
        segment = max(session.segment_bytes for session in self._sessions.values())
        window = WINDOW_GAIN * rate * min(rtts) + EXTRA_SEGMENTS * segment * len(self._sessions)
        shares = divide_window(list(self._demands.values()), int(window), bytes_per_s=rate)
        for other, session in self._sessions.items():
            session.window_share_bytes = shares[other]
