"""The capacity of a link over time, with exact integration.

Owns the one type `Trace`: piecewise constant capacity in bytes per second. Invariant: what a trace
delivers in an interval is an integral in closed form, never a sum over small steps, so that the
same question has the same answer however finely it is asked. Must not know: clocks, files, sockets.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scenarios.errors import TraceError

BITS_PER_BYTE = 8
BYTES_PER_S_PER_MBPS = 1e6 / BITS_PER_BYTE
"""Bytes per second in one Mbit/s; network rates are decimal."""


def mbps(bytes_per_s: float) -> float:
    """Convert bytes per second to Mbit/s, for people."""
    return bytes_per_s / BYTES_PER_S_PER_MBPS


@dataclass(frozen=True, slots=True)
class Outage:
    """A stretch in which the link carries nothing."""

    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        """Length of the stretch in seconds."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Piecewise constant capacity from 0 to ``duration_s``, looping at the end unless told not to."""

    name: str
    """What people call it; usually the file's name."""
    starts_s: tuple[float, ...]
    """Start of each piece, strictly ascending, the first one 0.0. Unit: seconds."""
    bytes_per_s: tuple[float, ...]
    """Capacity of each piece, at least 0."""
    duration_s: float
    """End of the last piece. Unit: seconds."""
    loops: bool = True
    """Whether the trace starts over at its end (as Mahimahi does); otherwise it carries nothing after."""
    delay_s: float | None = None
    """One-way delay that was measured with the trace, if it was. Unit: seconds."""
    _cumulative: tuple[float, ...] = field(init=False, repr=False)
    """Bytes deliverable from 0 to the start of each piece, and to the end."""

    def __post_init__(self) -> None:
        if not self.starts_s or len(self.starts_s) != len(self.bytes_per_s):
            raise TraceError(
                f"trace {self.name!r} has {len(self.starts_s)} times and {len(self.bytes_per_s)} rates"
            )
        edges = (*self.starts_s, self.duration_s)
        if edges[0] != 0.0 or not all(map(math.isfinite, edges)):
            raise TraceError(f"trace {self.name!r} must start at 0 s and end at a finite time")
        if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
            raise TraceError(f"trace {self.name!r} has times that do not ascend")
        if not all(math.isfinite(rate) and rate >= 0 for rate in self.bytes_per_s):
            raise TraceError(f"trace {self.name!r} has a rate that is negative or not finite")
        steps = (
            rate * (stop - start)
            for rate, (start, stop) in zip(self.bytes_per_s, itertools.pairwise(edges), strict=True)
        )
        cumulative = (0.0, *itertools.accumulate(steps))
        if cumulative[-1] <= 0:
            raise TraceError(f"trace {self.name!r} never carries a byte")
        object.__setattr__(self, "_cumulative", cumulative)

    @classmethod
    def constant(cls, bytes_per_s: float, *, name: str = "constant") -> Trace:
        """Return a link of one unchanging capacity."""
        return cls(name, (0.0,), (bytes_per_s,), 1.0)

    @classmethod
    def from_samples(
        cls,
        name: str,
        times_s: Sequence[float],
        bytes_per_s: Sequence[float],
        *,
        duration_s: float,
        delay_s: float | None = None,
    ) -> Trace:
        """Build a trace from samples that hold until the next one; equal neighbours are merged.

        Args:
            name: what people call it.
            times_s: strictly ascending; the first may be anything and becomes 0.
            bytes_per_s: one capacity per time.
            duration_s: end of the last sample, on the axis of ``times_s``.
            delay_s: one-way delay measured with the trace.

        Raises:
            TraceError: the samples make no trace.
        """
        origin = times_s[0] if times_s else 0.0
        starts: list[float] = []
        rates: list[float] = []
        for time_s, rate in zip(times_s, bytes_per_s, strict=True):
            if not rates or rate != rates[-1]:
                starts.append(time_s - origin)
                rates.append(rate)
        return cls(name, tuple(starts), tuple(rates), duration_s - origin, delay_s=delay_s)

    @property
    def total_bytes(self) -> float:
        """Bytes deliverable in one pass."""
        return self._cumulative[-1]

    @property
    def mean_bytes_per_s(self) -> float:
        """Mean capacity over one pass."""
        return self.total_bytes / self.duration_s

    def rate_at(self, time_s: float) -> float:
        """Return the capacity at a moment, in bytes per second; 0 after the end of one that does not loop."""
        if time_s < 0:
            raise TraceError(f"trace {self.name!r} has no capacity before 0 s, asked at {time_s} s")
        if self.loops:
            time_s = math.fmod(time_s, self.duration_s)
        elif time_s >= self.duration_s:
            return 0.0
        return self.bytes_per_s[bisect.bisect_right(self.starts_s, time_s) - 1]

    def bytes_until(self, time_s: float) -> float:
        """Return the bytes deliverable from 0 to a moment, at least 0."""
        if time_s <= 0:
            return 0.0
        passes, local_s = 0.0, time_s
        if self.loops:
            passes, local_s = divmod(time_s, self.duration_s)
        if local_s >= self.duration_s:
            return self.total_bytes * (passes + 1)
        piece = bisect.bisect_right(self.starts_s, local_s) - 1
        inside = (local_s - self.starts_s[piece]) * self.bytes_per_s[piece]
        return passes * self.total_bytes + self._cumulative[piece] + inside

    def bytes_between(self, start_s: float, stop_s: float) -> float:
        """Return the bytes deliverable in an interval; 0 for an empty one."""
        if stop_s <= start_s:
            return 0.0
        return self.bytes_until(stop_s) - self.bytes_until(start_s)

    def finish_s(self, start_s: float, num_bytes: float) -> float:
        """Return the earliest moment by which ``num_bytes`` can have been delivered from ``start_s`` on.

        Returns:
            Seconds on the trace's axis, at least ``start_s``; infinity when the trace ends before.
        """
        if num_bytes <= 0:
            return start_s
        target = self.bytes_until(start_s) + num_bytes
        passes = 0.0
        if self.loops:
            passes, target = divmod(target, self.total_bytes)
            if target == 0.0:  # the earliest moment is in the pass before, not at this one's start
                passes, target = passes - 1, self.total_bytes
        elif target > self.total_bytes:
            return math.inf
        after = bisect.bisect_left(self._cumulative, target)
        piece = after - 1
        inside_s = (target - self._cumulative[piece]) / self.bytes_per_s[piece]
        return max(start_s, passes * self.duration_s + self.starts_s[piece] + inside_s)

    def shifted(self, offset_s: float) -> Trace:
        """Return the trace as seen by somebody who starts ``offset_s`` into it; a looping one wraps."""
        if offset_s < 0 or (not self.loops and offset_s >= self.duration_s):
            raise TraceError(f"trace {self.name!r} cannot start at {offset_s} s")
        offset_s = math.fmod(offset_s, self.duration_s)
        if offset_s == 0.0:
            return self
        piece = bisect.bisect_right(self.starts_s, offset_s) - 1
        starts = [0.0, *(start - offset_s for start in self.starts_s[piece + 1 :])]
        rates = list(self.bytes_per_s[piece:])
        duration_s = self.duration_s - offset_s
        if self.loops:
            wrapped = [start for start in self.starts_s if start < offset_s]
            starts += [duration_s + start for start in wrapped]
            rates += self.bytes_per_s[: len(wrapped)]
            duration_s = self.duration_s
        # Rounding may leave a piece without length; it carries nothing.
        kept = [
            (start, rate)
            for start, rate, stop in zip(starts, rates, [*starts[1:], duration_s], strict=True)
            if start < stop
        ]
        return Trace(
            self.name,
            tuple(start for start, _ in kept),
            tuple(rate for _, rate in kept),
            duration_s,
            self.loops,
            delay_s=self.delay_s,
        )

    def scaled(self, factor: float) -> Trace:
        """Return the trace with every rate multiplied by ``factor``, which is positive."""
        rates = tuple(rate * factor for rate in self.bytes_per_s)
        return Trace(
            self.name, self.starts_s, rates, self.duration_s, self.loops, delay_s=self.delay_s
        )

    def looped(self, *, loops: bool) -> Trace:
        """Return the trace with or without looping at its end."""
        return Trace(
            self.name,
            self.starts_s,
            self.bytes_per_s,
            self.duration_s,
            loops,
            delay_s=self.delay_s,
        )

    def binned(self, start_s: float, stop_s: float, step_s: float) -> list[float]:
        """Return the mean capacity of each step of an interval, in bytes per second."""
        count = max(1, math.ceil((stop_s - start_s) / step_s - 1e-9))
        edges = [start_s + step_s * index for index in range(count)] + [stop_s]
        return [
            self.bytes_between(left, right) / (right - left)
            for left, right in itertools.pairwise(edges)
        ]

    def percentile(self, fraction: float, *, step_s: float = 1.0) -> float:
        """Return a percentile of the mean capacity over steps, in bytes per second.

        Args:
            fraction: from 0 to 1; nearest rank.
            step_s: length of a step; a packet trace has no percentile at a point.
        """
        bins = sorted(self.binned(0.0, self.duration_s, min(step_s, self.duration_s)))
        rank = max(0, math.ceil(fraction * len(bins)) - 1)
        return bins[rank]

    def outages(self, *, min_s: float = 1.0) -> list[Outage]:
        """Return the stretches of at least ``min_s`` in which nothing is carried, in one pass."""
        found: list[Outage] = []
        begin: float | None = None
        edges = (*self.starts_s, self.duration_s)
        for rate, start_s in zip((*self.bytes_per_s, math.inf), edges, strict=True):
            if rate == 0.0:
                begin = start_s if begin is None else begin
            elif begin is not None:
                found.append(Outage(begin, start_s))
                begin = None
        return [outage for outage in found if outage.duration_s >= min_s]
