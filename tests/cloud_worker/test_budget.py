from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cloud_worker.budget import MemoryBudget, SessionNeed
from cloud_worker.errors import NoMemory


def need(total: int) -> SessionNeed:
    return SessionNeed(cache_bytes=total, window_bytes=0, chunk_bytes=0)


def test_every_part_of_a_session_counts() -> None:
    assert SessionNeed(cache_bytes=1, window_bytes=10, chunk_bytes=100).total_bytes == 111


def test_a_session_that_does_not_fit_is_refused_with_the_numbers() -> None:
    budget = MemoryBudget(100)
    budget.reserve("a", need(60))
    with pytest.raises(NoMemory, match=r"needs 50 bytes .* 40 of 100 are free") as caught:
        budget.reserve("b", need(50))
    assert caught.value.can_ever_fit
    assert budget.reserved_bytes == 60


def test_a_session_larger_than_the_worker_never_fits() -> None:
    with pytest.raises(NoMemory) as caught:
        MemoryBudget(100).reserve("a", need(101))
    assert not caught.value.can_ever_fit


def test_released_memory_can_be_granted_again() -> None:
    budget = MemoryBudget(100)
    budget.reserve("a", need(100))
    budget.release("a")
    budget.release("a")
    budget.reserve("b", need(100))
    assert budget.cache_bytes == 100


def test_a_session_cannot_be_granted_twice() -> None:
    budget = MemoryBudget(100)
    budget.reserve("a", need(1))
    with pytest.raises(ValueError, match="holds memory already"):
        budget.reserve("a", need(1))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.booleans())))
def test_the_sum_of_grants_never_exceeds_the_total(
    moves: list[tuple[str, int, bool]],
) -> None:
    budget = MemoryBudget(100)
    held: dict[str, int] = {}
    for session, size, is_release in moves:
        if is_release:
            budget.release(session)
            held.pop(session, None)
        elif session not in held:
            try:
                budget.reserve(session, need(size))
                held[session] = size
            except NoMemory:
                assert sum(held.values()) + size > 100
        assert budget.reserved_bytes == sum(held.values()) <= 100
