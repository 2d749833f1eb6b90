"""The two threads' worth of work of a worker: decoding bitstreams, and running the model.

They overlap: the codec releases the GIL, torch does too. Everything that touches the model goes
through one compute thread, one step at a time, so sessions take turns step by step and the model
never runs twice at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A step's result, and when it ran by ``time.monotonic``."""

    value: T
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Executors:
    """Owns the worker's threads."""

    def __init__(self, *, decode_workers: int = 1) -> None:
        self._decode = ThreadPoolExecutor(decode_workers, thread_name_prefix="kvtide-decode")
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="kvtide-compute")
        self._pending_compute_s = 0.0

    @property
    def pending_compute_s(self) -> float:
        """Predicted time of the compute steps that run or wait now."""
        return max(0.0, self._pending_compute_s)

    async def decode(self, step: Callable[[], T]) -> Timed[T]:
        """Run a step on a decoder thread; see ``_run`` for cancellation."""
        return await _run(self._decode, step)

    async def compute(self, step: Callable[[], T], *, predicted_s: float = 0.0) -> Timed[T]:
        """Run a step on the compute thread, after the steps that wait there already."""
        self._pending_compute_s += predicted_s
        try:
            return await _run(self._compute, step)
        finally:
            self._pending_compute_s -= predicted_s

    def close(self) -> None:
        """Stop the threads once the running steps have ended; waiting ones are dropped."""
        self._decode.shutdown(wait=True, cancel_futures=True)
        self._compute.shutdown(wait=True, cancel_futures=True)


async def _run(executor: Executor, step: Callable[[], T]) -> Timed[T]:
    """Run a step in a thread.

    A cancelled caller returns only when its step has ended, or was never begun: until then the
    step may still write into the session's memory, which must not be granted to anyone else.
    """

    def timed() -> Timed[T]:
        start_s = time.monotonic()
        value = step()
        return Timed(value, start_s, time.monotonic())

    future = executor.submit(timed)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        while not future.done():
            # A second cancellation must not end the wait either; a step is short.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([asyncio.wrap_future(future)])
        raise
