from __future__ import annotations

import asyncio
import threading

import pytest

from cloud_worker.executors import BACKGROUND_S, Executors
from tests.cloud_worker.bench import until


async def occupied(executors: Executors) -> tuple[threading.Event, asyncio.Task[object]]:
    """Keep the compute thread busy until the event is set."""
    go, started = threading.Event(), threading.Event()

    def step() -> None:
        started.set()
        go.wait(30)

    task: asyncio.Task[object] = asyncio.create_task(executors.compute(step, deadline_s=0.0))
    await asyncio.to_thread(started.wait, 30)
    return go, task


async def test_a_step_gives_its_result_and_times(executors: Executors) -> None:
    timed = await executors.compute(lambda: 42, deadline_s=0.0)
    assert timed.value == 42
    assert timed.seconds == timed.end_s - timed.start_s >= 0
    assert (await executors.decode(lambda: "x")).value == "x"


async def test_an_error_of_a_step_comes_back(executors: Executors) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await executors.compute(fail, deadline_s=0.0)
    with pytest.raises(KeyError):
        await executors.decode(fail)
    assert (await executors.compute(lambda: 1, deadline_s=0.0)).value == 1


async def test_the_earliest_deadline_goes_first_and_equal_ones_as_they_came(
    executors: Executors,
) -> None:
    go, busy = await occupied(executors)
    order: list[str] = []
    waiting = [
        asyncio.create_task(executors.compute(lambda n=name: order.append(n), deadline_s=due))  # type: ignore[misc]
        for name, due in (("c", BACKGROUND_S), ("b1", 9.0), ("a", 1.0), ("b2", 9.0))
    ]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(busy, *waiting)
    assert order == ["a", "b1", "b2", "c"]


async def test_a_cancelled_step_that_waits_is_never_run(executors: Executors) -> None:
    go, busy = await occupied(executors)
    ran: list[int] = []
    waiting = asyncio.create_task(executors.compute(lambda: ran.append(1), deadline_s=1.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    await busy
    await executors.compute(lambda: None, deadline_s=2.0)
    assert not ran


async def test_a_cancelled_step_that_runs_is_waited_for(executors: Executors) -> None:
    go, busy = await occupied(executors)
    for _ in range(2):
        busy.cancel()
        await asyncio.sleep(0)
    assert not busy.done(), "it came back while its step may still write into memory"
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await busy


async def test_predicted_times_of_waiting_steps_add_up(executors: Executors) -> None:
    go, busy = await occupied(executors)
    waiting = [
        asyncio.create_task(executors.compute(lambda: None, deadline_s=1.0, predicted_s=seconds))
        for seconds in (1.5, 2.0)
    ]
    await asyncio.sleep(0)
    assert executors.pending_compute_s == 3.5
    go.set()
    await asyncio.gather(busy, *waiting)
    assert executors.pending_compute_s == 0.0


async def test_closing_drops_what_waits() -> None:
    executors = Executors()
    go, busy = await occupied(executors)
    waiting = asyncio.create_task(executors.compute(lambda: None, deadline_s=1.0))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(executors.close))
    await until(lambda: executors._compute._steps.qsize() == 2, within_s=10)
    go.set()
    await closing
    await busy
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(RuntimeError, match="closed"):
        await executors.compute(lambda: None, deadline_s=1.0)
