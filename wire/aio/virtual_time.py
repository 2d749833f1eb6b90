"""An event loop whose clock jumps: hours of waiting run in milliseconds, and a hang is an error.

Owns the clock. Invariant: time moves only when nothing is ready to run, and then exactly to the next
timer. For programs without threads, sockets and processes only: nothing would wait for those.
Must not know: transports.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingToWaitFor(RuntimeError):
    """Every task waits and no timer is set: in real time this would hang for ever."""


class _JumpingSelector(selectors.SelectSelector):
    """Takes waiting as the clock's order to advance."""

    def __init__(self) -> None:
        super().__init__()
        self.advance: Callable[[float], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise NothingToWaitFor("every task waits for something that nothing will bring")
        if self.advance is not None:
            self.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time, which begins at 0."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        self._now_s = 0.0
        selector.advance = self._advance
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def _advance(self, duration_s: float) -> None:
        self._now_s += duration_s


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in virtual time.

    Raises:
        NothingToWaitFor: it would have hung.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
