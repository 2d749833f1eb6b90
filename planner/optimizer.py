"""The plan: which chunks are recomputed from the front, and at which level the others are sent.

Pure functions. Invariants: a returned plan meets every limit it was given exactly (bytes and times
are never rounded); only losses are put on a grid, one that depends on the chunks alone and not on the
link or the deadline. So more bytes or more time only ever enlarge what is allowed, and the plan's loss
never rises with them. Must not know: how limits come about.

Source: docs/adr/0070-loss-grid.md; the knapsack recursion is Kellerer, Pferschy and Pisinger,
"Knapsack Problems" (2004), section 11.5 (multiple choice, by profits).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.curve import DeliveryCurve, FloatArray
from planner.model import Choice, ChunkOptions

LOSS_TICKS: Final = 4096
"""Grid of the total loss: 64 ticks for the coarsest level of each of 64 chunks."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A level for each chunk of a sequence."""

    choices: tuple[Choice, ...]
    """In the order of the chunks given."""
    num_bytes: int
    ticks: int
    """Total loss on the grid."""

    @property
    def loss(self) -> float:
        """Total loss, off the grid."""
        return sum(choice.loss for choice in self.choices)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned: the chunks for which nothing was decided."""

    chunks: tuple[ChunkOptions, ...]
    """In token order."""
    budget_s: float
    """From now until every chunk must be in the cache. Unit: seconds; may be negative."""
    bytes_before: float = 0.0
    """Bytes that go first: in flight, and the rest of chunks begun. Unit: bytes."""
    decode_before_s: float = 0.0
    """Decoding still to be done for chunks that were sent before."""
    engine_free_s: float = 0.0
    """When the engine can begin with another text chunk. Unit: seconds from now."""
    decoder_free_s: float = 0.0
    """When the decoder can begin at all. Unit: seconds from now."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Text for the first ``num_text`` chunks, levels for the rest, sent last chunk first."""

    num_text: int
    levels: tuple[Choice, ...]
    """One per chunk after the text ones, in token order."""
    quantile: float
    """Probability with which the plan meets its time limit, at least; 0: it does not."""
    finish_s: float
    """When every chunk is in the cache, at that probability. Unit: seconds from now."""
    loss: float
    num_bytes: float

    @property
    def is_feasible(self) -> bool:
        """Whether the plan meets its limit with the probability it was asked for."""
        return self.quantile > 0.0


def loss_grid(chunks: Sequence[ChunkOptions]) -> float:
    """Return the loss of one tick: the coarsest plan of these chunks has `LOSS_TICKS` in all."""
    total = sum(chunk.greatest_loss for chunk in chunks)
    return total / LOSS_TICKS if total > 0 else 1.0


def least_loss(
    chunks: Sequence[Sequence[Choice]], limits: Sequence[float], *, tick: float
) -> Assignment | None:
    """Choose one choice per chunk with the least total loss, within limits on the running bytes.

    Dynamic programming over the total loss: the fewest bytes with which the first k chunks lose
    exactly so many ticks. Fewest bytes are best for every limit that follows, so this is exact.

    Args:
        chunks: choices of each chunk, in the order of sending.
        limits: the most bytes that the first k + 1 chunks may have together, per k.
        tick: loss of one tick, positive; losses are rounded to the nearest.

    Returns:
        The assignment, or None when no choice meets the limits.
    """
    fronts = [_front(choices, tick) for choices in chunks]
    if not fronts:
        return Assignment((), 0, 0)
    if any(not front for front in fronts):
        return None
    bound = _bound(fronts, limits)
    if bound is None:
        return None
    size = bound + 1
    # Columns 0 to pad - 1 stay infinite, so that one step back from any state is a window to its left.
    pad = min(bound, max(front[-1][0] for front in fronts))
    table = np.full((len(fronts) + 1, pad + size), np.inf)
    table[0, pad] = 0.0
    windows = np.lib.stride_tricks.sliding_window_view(table, size, axis=1)
    least_after = list(
        itertools.accumulate((front[-1][1] for front in reversed(fronts)), initial=0)
    )[::-1]
    final = limits[-1]
    for row, front in enumerate(fronts):
        places = [pad - ticks for ticks, _, _ in front if ticks <= pad]
        sums = windows[row][places]
        sums += np.array([[float(num_bytes)] for _, num_bytes, _ in front[: len(places)]])
        after = table[row + 1, pad:]
        np.minimum.reduce(sums, axis=0, out=after)
        # A limit that what follows implies anyway need not be looked at.
        if limits[row] < final - least_after[row + 1]:
            after[after > limits[row]] = np.inf
    table = table[:, pad:]
    fits = np.flatnonzero(table[-1] <= final)
    return _trace_back(table, fronts, int(fits[0]))


def _bound(
    fronts: Sequence[Sequence[tuple[int, int, Choice]]], limits: Sequence[float]
) -> int | None:
    """Ticks of a good plan found quickly; None when nothing fits.

    The optimum loses no more, so the table need not go further. The plan takes the finest step of every
    front that fits for all, then a finer one for as many chunks as still fit.
    """
    for step in range(max(len(front) for front in fronts)):
        rows = [front[step] if step < len(front) else front[-1] for front in fronts]
        if not _fits(rows, limits):
            continue
        slack = limits[-1] - sum(row[1] for row in rows)
        mixed = list(rows)
        for place, front in enumerate(fronts):
            finer = front[min(step, len(front)) - 1]
            more = finer[1] - rows[place][1]
            if step > 0 and more <= slack:
                mixed[place] = finer
                slack -= more
        return sum(row[0] for row in (mixed if _fits(mixed, limits) else rows))
    return None


def _fits(rows: Sequence[tuple[int, int, Choice]], limits: Sequence[float]) -> bool:
    """Whether the running bytes are within the limits."""
    num_bytes = 0
    for row, limit in zip(rows, limits, strict=True):
        num_bytes += row[1]
        if num_bytes > limit:
            return False
    return True


def _front(choices: Sequence[Choice], tick: float) -> list[tuple[int, int, Choice]]:
    """(ticks, bytes, choice) of the choices that no other one beats, finest first.

    Levels whose loss nobody measured (infinite) are only looked at where there is nothing else.
    """
    rows = [
        (round(choice.loss / tick), choice.num_bytes, place)
        for place, choice in enumerate(choices)
        if choice.loss < math.inf
    ] or [(0, choice.num_bytes, place) for place, choice in enumerate(choices)]
    rows.sort()
    front: list[tuple[int, int, Choice]] = []
    fewest = math.inf
    for ticks, num_bytes, place in rows:
        if num_bytes < fewest:
            front.append((ticks, num_bytes, choices[place]))
            fewest = num_bytes
    return front


def _trace_back(
    table: FloatArray, fronts: Sequence[Sequence[tuple[int, int, Choice]]], state: int
) -> Assignment:
    """Read the choices off the table, last chunk first."""
    ticks_total, num_bytes_total = state, int(table[-1, state])
    chosen: list[Choice] = []
    value = float(table[-1, state])
    for row in range(len(fronts) - 1, -1, -1):
        before = table[row]
        for ticks, num_bytes, choice in fronts[row]:
            # Sums of whole numbers below 2**53 are exact, so equality finds the step taken.
            if ticks <= state and before[state - ticks] + num_bytes == value:
                state -= ticks
                value = float(before[state])
                chosen.append(choice)
                break
        else:
            raise AssertionError("the table has a state that no step leads to")
    return Assignment(tuple(reversed(chosen)), num_bytes_total, ticks_total)


def choose(
    request: PlanRequest,
    curve: DeliveryCurve,
    *,
    quantile: float,
    tick: float | None = None,
    first_limit: float = math.inf,
) -> Plan | None:
    """Return the plan of least loss that meets the time limit at the curve's probability.

    Text loses nothing and needs no bytes, so as many chunks as the engine can do in time are text,
    from the front, where attention makes them cheapest; the others are sent, last one first, so that
    the border can still move either way.

    Args:
        request: what is to be planned.
        curve: delivery at the probability to be met.
        quantile: that probability, for the plan's record.
        tick: loss grid; None takes the request's own.
        first_limit: the most bytes that may have gone after the first chunk sent, besides the limits
            that follow from the curve.

    Returns:
        The plan, or None when nothing meets the limit.
    """
    if request.budget_s < 0.0:
        return None
    num_text = text_that_fits(request)
    if num_text < 0:
        return None
    rest = request.chunks[num_text:]
    if any(not chunk.levels for chunk in rest):
        return None
    sending = rest[::-1]
    limits = _byte_limits(request, sending, curve)
    if limits is None:
        return None
    if limits:
        limits[0] = min(limits[0], first_limit)
    grid = loss_grid(request.chunks) if tick is None else tick
    found = least_loss([chunk.levels for chunk in sending], limits, tick=grid)
    if found is None:
        return None
    levels = found.choices[::-1]
    finish_s = finish_time_s(request, num_text, levels, curve)
    return Plan(num_text, levels, quantile, finish_s, found.loss, found.num_bytes)


def text_that_fits(request: PlanRequest) -> int:
    """Return how many chunks from the front the engine can recompute in time; -1 if it is late already."""
    if request.engine_free_s > request.budget_s:
        return -1
    engine_s = request.engine_free_s
    count = 0
    for chunk in request.chunks:
        text = chunk.text
        if text is None or engine_s + text.prefill_s > request.budget_s:
            break
        engine_s += text.prefill_s
        count += 1
    return count


def _byte_limits(
    request: PlanRequest, sending: Sequence[ChunkOptions], curve: DeliveryCurve
) -> list[float] | None:
    """Limits on the running bytes, so that what arrives is decoded in time as well.

    The decoder's time for a chunk is taken as the greatest over its levels: it depends on the KV that
    comes out, hardly on the level.
    """
    after_s = 0.0
    limits: list[float] = []
    for chunk in reversed(sending):
        after_s += chunk.longest_decode_s
        limits.append(curve.bytes_within(request.budget_s - after_s) - request.bytes_before)
    # What was sent before must be decoded before all of these.
    begin_s = after_s + request.decode_before_s
    if request.decoder_free_s + begin_s > request.budget_s:
        return None
    if request.bytes_before > 0.0 and (
        curve.time_s(request.bytes_before) + begin_s > request.budget_s
    ):
        return None
    return limits[::-1]


def room_for_first(request: PlanRequest, curve: DeliveryCurve) -> float:
    """Return the most bytes that the first chunk sent may have, if all others go at their smallest.

    Returns:
        Bytes; infinite when nothing has to be sent; negative when the limit cannot be met at all.
    """
    num_text = text_that_fits(request)
    if request.budget_s < 0.0 or num_text < 0:
        return -math.inf
    sending = request.chunks[num_text:][::-1]
    if any(not chunk.levels for chunk in sending):
        return -math.inf
    limits = _byte_limits(request, sending, curve)
    if limits is None:
        return -math.inf
    if not sending:
        return math.inf
    smallest = [_smallest_bytes(chunk) for chunk in sending]
    others = itertools.accumulate(smallest[1:], initial=0)
    room = min(limit - before for limit, before in zip(limits, others, strict=True))
    return room if room >= smallest[0] else -math.inf


def finish_time_s(
    request: PlanRequest, num_text: int, levels: Sequence[Choice], curve: DeliveryCurve
) -> float:
    """Return when a plan has every chunk in the cache, at the curve's probability."""
    engine_s = request.engine_free_s + sum(
        chunk.text.prefill_s if chunk.text else math.inf for chunk in request.chunks[:num_text]
    )
    num_bytes = request.bytes_before
    decoder_s = max(request.decoder_free_s, curve.time_s(num_bytes)) + request.decode_before_s
    for choice in reversed(levels):
        num_bytes += choice.num_bytes
        decoder_s = max(decoder_s, curve.time_s(num_bytes)) + choice.decode_s
    return max(engine_s, decoder_s)


def finish_first(
    request: PlanRequest, curve: DeliveryCurve, *, max_loss_per_token: float = math.inf
) -> Plan:
    """Return the plan that has every chunk in the cache soonest: the border where both sides meet.

    Args:
        request: what is to be planned.
        curve: delivery at the probability to be looked at.
        max_loss_per_token: levels that lose more are left out, where a chunk has others.

    Returns:
        A plan with ``quantile`` 0.
    """
    count = len(request.chunks)
    smallest = [_smallest(chunk, max_loss_per_token) for chunk in request.chunks]
    prefill = np.cumsum(
        [0.0, *(chunk.text.prefill_s if chunk.text else math.inf for chunk in request.chunks)]
    )
    engine_s = request.engine_free_s + prefill
    sizes = np.array([choice.num_bytes if choice else math.inf for choice in smallest])
    decodes = np.array([choice.decode_s if choice else math.inf for choice in smallest])
    # Row m: chunks m.. are sent. Bytes and decoding of the chunks from k on, for every k.
    bytes_from = np.append(np.cumsum(sizes[::-1])[::-1], 0.0)
    decode_from = np.append(np.cumsum(decodes[::-1])[::-1], 0.0)
    arrivals = np.array([curve.time_s(request.bytes_before + size) for size in bytes_from])
    first_s = max(request.decoder_free_s, float(arrivals[count])) + request.decode_before_s
    # The decoder is done with m.. at the latest of: arrival of k, then decoding of m..k.
    waits = arrivals[:count] - decode_from[1:]
    latest = np.maximum.accumulate(np.append(waits, -math.inf)[::-1])[::-1]
    with np.errstate(invalid="ignore"):
        decoder_s = np.maximum(first_s, latest) + decode_from
    decoder_s = np.where(np.isnan(decoder_s), math.inf, decoder_s)
    totals = np.maximum(engine_s, decoder_s)
    num_text = int(np.argmin(totals))
    levels = tuple(choice for choice in smallest[num_text:] if choice is not None)
    return Plan(
        num_text=num_text,
        levels=levels,
        quantile=0.0,
        finish_s=float(totals[num_text]),
        loss=sum(choice.loss for choice in levels),
        num_bytes=sum(choice.num_bytes for choice in levels),
    )


def _smallest(chunk: ChunkOptions, max_loss_per_token: float) -> Choice | None:
    """The level with the fewest bytes among those that lose no more than allowed, else the finest."""
    levels = chunk.levels
    measured = [c for c in levels if math.isfinite(c.loss)]
    allowed = [c for c in measured if c.loss <= max_loss_per_token * chunk.num_tokens]
    if measured and not allowed:
        return min(measured, key=lambda c: (c.loss, c.num_bytes))
    return min(allowed or levels, key=lambda c: (c.num_bytes, c.loss), default=None)


def _smallest_bytes(chunk: ChunkOptions) -> int:
    """The fewest bytes with which a chunk that has levels can be sent."""
    choice = _smallest(chunk, math.inf)
    assert choice is not None
    return choice.num_bytes
