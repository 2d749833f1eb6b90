"""The two threads' worth of work of a worker: decoding bitstreams, and running the model.

They overlap: the codec releases the GIL, torch does too. Everything that touches the model goes
through one compute thread, one step at a time, the step with the earliest deadline first: the model
never runs twice at once, and an evaluation never delays an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

BACKGROUND_S = math.inf
"""Deadline of work that nobody waits for: it runs when nothing else does."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A step's result, and when it ran by ``time.monotonic``."""

    value: T
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class DeadlineThread:
    """One thread that runs the step with the earliest deadline first; equal ones as they came."""

    def __init__(self, name: str) -> None:
        self._steps: queue.PriorityQueue[
            tuple[float, int, Future[Any] | None, Callable[[], Any] | None]
        ] = queue.PriorityQueue()
        self._counter = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Steps that wait for their turn."""
        return self._steps.qsize()

    def submit(self, step: Callable[[], T], deadline_s: float) -> Future[T]:
        """Queue a step; a future that is cancelled before its turn is never run."""
        if self._is_closed:
            raise RuntimeError("the thread is closed")
        future: Future[T] = Future()
        self._steps.put((deadline_s, next(self._counter), future, step))
        return future

    def close(self) -> None:
        """Cancel the waiting steps, and wait for the one that runs."""
        self._is_closed = True
        # Before every deadline, so that it is the next one taken.
        self._steps.put((-math.inf, -1, None, None))
        self._thread.join()

    def _loop(self) -> None:
        while True:
            _, _, future, step = self._steps.get()
            if future is None or step is None:
                break
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = step()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            # A finished step must not keep a session's cache alive until the next one comes.
            del future, step
        while not self._steps.empty():
            waiting = self._steps.get()[2]
            if waiting is not None:
                waiting.cancel()


class Executors:
    """Owns the worker's threads."""

    def __init__(self, *, decode_workers: int = 1) -> None:
        self._decode = ThreadPoolExecutor(decode_workers, thread_name_prefix="kvtide-decode")
        self._compute = DeadlineThread("kvtide-compute")
        self._pending_compute_s = 0.0

    @property
    def pending_compute_s(self) -> float:
        """Predicted time of the compute steps that run or wait now."""
        return max(0.0, self._pending_compute_s)

    @property
    def num_waiting(self) -> int:
        """Compute steps that wait for their turn."""
        return self._compute.num_waiting

    async def decode(self, step: Callable[[], T]) -> Timed[T]:
        """Run a step on a decoder thread; see ``_finish`` for cancellation."""
        return await _finish(self._decode.submit(_timed, step))

    async def compute(
        self, step: Callable[[], T], *, deadline_s: float, predicted_s: float = 0.0
    ) -> Timed[T]:
        """Run a step on the compute thread, after those with an earlier deadline.

        Args:
            step: what to run.
            deadline_s: when its result is due by ``time.monotonic``, or ``BACKGROUND_S``.
            predicted_s: how long it will take, for agents that ask how long they would wait.
        """
        self._pending_compute_s += predicted_s
        try:
            return await _finish(self._compute.submit(lambda: _timed(step), deadline_s))
        finally:
            self._pending_compute_s -= predicted_s

    def close(self) -> None:
        """Stop the threads once the running steps have ended; waiting ones are dropped."""
        self._decode.shutdown(wait=True, cancel_futures=True)
        self._compute.close()


def _timed(step: Callable[[], T]) -> Timed[T]:
    start_s = time.monotonic()
    value = step()
    return Timed(value, start_s, time.monotonic())


async def _finish(future: Future[Timed[T]]) -> Timed[T]:
    """Wait for a step.

    A cancelled caller returns only when its step has ended, or was never begun: until then the
    step may still write into the session's memory, which must not be granted to anyone else.
    """
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        while not future.done():
            # A second cancellation must not end the wait either; a step is short.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([asyncio.wrap_future(future)])
        raise
