"""What a session's refinements build on, and which one is next.

Pure bookkeeping, like `WorkOrder`: no thread, no codec. A chunk that was decoded from a level that can be refined
keeps its bitstream; a refinement is decoded together with it and replaces the chunk in the cache. Invariants:
what is kept stays within a limit that the session was granted; a refinement of anything but what the cache
holds is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WaitingRefinement:
    """A refinement that arrived whole."""

    chunk: int
    part: int
    """1 refines the chunk's level, 2 what came out of 1, and so on."""
    epoch: int
    name: str
    """The codec's name, ``klt:6>4``."""
    payload: bytes
    arrived_s: float
    """``time.monotonic``."""


@dataclass(frozen=True, slots=True)
class RefineStep:
    """Decode a chunk again, finer."""

    item: WaitingRefinement
    parts: tuple[bytes, ...]
    """The chunk's bitstream and the refinements that it has had."""
    level: str
    """The level that comes out."""


@dataclass(frozen=True, slots=True)
class RefuseStep:
    """Tell the agent that a refinement is of no use."""

    item: WaitingRefinement
    reason: str


@dataclass(slots=True)
class _Base:
    level: str
    parts: list[bytes]


@dataclass(slots=True)
class Refinements:
    """One session's bases and waiting refinements."""

    steps: Iterable[tuple[str, str, str]]
    """(name, level before, level after) of every refinement that the codec reads."""
    limit_bytes: int
    """Most bytes of bitstreams that are kept to be refined."""
    _known: dict[str, tuple[str, str]] = field(init=False)
    _bases: dict[int, _Base] = field(default_factory=dict)
    _waiting: list[WaitingRefinement] = field(default_factory=list)
    _running: RefineStep | None = None

    def __post_init__(self) -> None:
        self._known = {name: (before, after) for name, before, after in self.steps}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the bitstreams that are kept."""
        return sum(len(part) for base in self._bases.values() for part in base.parts)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of refinements that wait or are being decoded."""
        running = 0 if self._running is None else len(self._running.item.payload)
        return running + sum(len(item.payload) for item in self._waiting)

    def decoded(self, chunk: int, level: str, payload: bytes) -> None:
        """A chunk is in the cache at a level; keep its bitstream if it can be refined and there is room."""
        can_refine = any(before == level for before, _ in self._known.values())
        if can_refine and self.kept_bytes + len(payload) <= self.limit_bytes:
            self._bases[chunk] = _Base(level, [payload])

    def arrived(self, item: WaitingRefinement) -> None:
        """Take in a refinement; a later epoch of the same part takes its place."""
        self.aborted(item.chunk, item.part, item.epoch)
        self._waiting.append(item)

    def aborted(self, chunk: int, part: int, epoch: int) -> None:
        """The agent gave this epoch up, and every one before."""
        self._waiting = [
            item
            for item in self._waiting
            if (item.chunk, item.part) != (chunk, part) or item.epoch > epoch
        ]

    def holds(self, chunk: int, part: int, epoch: int) -> bool:
        """Whether a refinement that was taken in is still in memory."""
        running = [] if self._running is None else [self._running.item]
        return any(
            (item.chunk, item.part, item.epoch) == (chunk, part, epoch)
            for item in (*self._waiting, *running)
        )

    def next_step(self, is_ready: Callable[[int], bool]) -> RefineStep | RefuseStep | None:
        """Take the next step, in order of arrival; None when all wait for their base.

        Args:
            is_ready: whether a chunk is in the cache.
        """
        for item in self._waiting:
            base = self._bases.get(item.chunk)
            if base is None and not is_ready(item.chunk):
                continue
            if base is not None and item.part > len(base.parts):
                continue  # the one before it may still come
            self._waiting.remove(item)
            before, after = self._known.get(item.name, ("", ""))
            if base is None:
                return RefuseStep(item, f"chunk {item.chunk} was not kept to be refined")
            if item.part < len(base.parts) or before != base.level:
                return RefuseStep(
                    item,
                    f"{item.name} does not refine chunk {item.chunk}, which is at {base.level}",
                )
            self._running = RefineStep(item, tuple(base.parts), after)
            return self._running
        return None

    def done(self, step: RefineStep) -> None:
        """The finer chunk is in the cache."""
        self._running = None
        base = self._bases[step.item.chunk]
        base.level = step.level
        if self.kept_bytes + len(step.item.payload) <= self.limit_bytes:
            base.parts.append(step.item.payload)
        else:
            del self._bases[step.item.chunk]

    def failed(self, step: RefineStep) -> None:
        """The refinement does not decode; the chunk stays as it is."""
        del step
        self._running = None

    def clear(self) -> None:
        """Let go of every bitstream."""
        self._bases.clear()
        self._waiting.clear()
        self._running = None
