"""Blocking steps in threads, safe under cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


async def run_in(executor: Executor, work: Callable[[*_Args], _T], *args: *_Args) -> _T:
    """Run a step in a thread; on cancellation wait for the thread before passing it on.

    A thread cannot be stopped, and it holds what it works on (a KV cache, a store job): to leave
    while it runs would clean up under its feet. Steps are short, seconds at most.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, work, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            # Retrieved, so that asyncio does not complain about a lost exception.
            future.exception()
        raise
