"""What a session keeps to be refined, and which refinement is next."""

from __future__ import annotations

from cloud_worker.refinements import Refinements, RefineStep, RefuseStep, WaitingRefinement

STEPS = [("klt:6>4", "klt:6", "klt:4"), ("klt:4>2", "klt:4", "klt:2")]


def item(chunk: int, part: int, name: str, *, epoch: int = 0, size: int = 5) -> WaitingRefinement:
    return WaitingRefinement(chunk, part, epoch, name, bytes(size), 0.0)


def made(limit: int = 100) -> Refinements:
    return Refinements(STEPS, limit)


def never(chunk: int) -> bool:
    del chunk
    return False


def always(chunk: int) -> bool:
    del chunk
    return True


def test_a_chain_is_refined_in_order_whatever_came_first() -> None:
    refinements = made()
    refinements.arrived(item(0, 2, "klt:4>2"))
    refinements.arrived(item(0, 1, "klt:6>4"))
    assert refinements.next_step(never) is None
    refinements.decoded(0, "klt:6", b"base")
    first = refinements.next_step(always)
    assert isinstance(first, RefineStep)
    assert (first.level, first.parts) == ("klt:4", (b"base",))
    assert refinements.holds(0, 1, 0)
    refinements.done(first)
    assert not refinements.holds(0, 1, 0)
    second = refinements.next_step(always)
    assert isinstance(second, RefineStep)
    assert (second.level, second.parts) == ("klt:2", (b"base", bytes(5)))
    refinements.done(second)
    assert refinements.next_step(always) is None
    assert refinements.waiting_bytes == 0


def test_what_does_not_fit_is_refused() -> None:
    refinements = made()
    refinements.decoded(0, "klt:6", b"base")
    refinements.decoded(1, "klt:2", b"nothing refines it")
    refinements.arrived(item(0, 1, "klt:4>2"))
    refinements.arrived(item(1, 1, "klt:4>2"))
    refinements.arrived(item(0, 1, "unknown", epoch=1))
    reasons = []
    while (step := refinements.next_step(always)) is not None:
        assert isinstance(step, RefuseStep)
        reasons.append(step.reason)
    assert reasons == [
        "chunk 1 was not kept to be refined",
        "unknown does not refine chunk 0, which is at klt:6",
    ]


def test_a_second_attempt_after_a_failure_is_taken() -> None:
    refinements = made()
    refinements.decoded(0, "klt:6", b"base")
    refinements.arrived(item(0, 1, "klt:6>4"))
    step = refinements.next_step(always)
    assert isinstance(step, RefineStep)
    refinements.failed(step)
    refinements.arrived(item(0, 1, "klt:6>4", epoch=1))
    again = refinements.next_step(always)
    assert isinstance(again, RefineStep)
    assert again.item.epoch == 1


def test_what_is_kept_stays_within_its_limit() -> None:
    refinements = made(limit=10)
    refinements.decoded(0, "klt:6", bytes(6))
    refinements.decoded(1, "klt:6", bytes(6))
    assert refinements.kept_bytes == 6
    refinements.arrived(item(0, 1, "klt:6>4", size=5))
    step = refinements.next_step(always)
    assert isinstance(step, RefineStep)
    refinements.done(step)  # decoded, but there is no room for refining it further
    assert refinements.kept_bytes == 0
    refinements.arrived(item(1, 1, "klt:6>4"))
    assert isinstance(refinements.next_step(always), RefuseStep)
    refinements.clear()


def test_an_aborted_refinement_is_let_go() -> None:
    refinements = made()
    refinements.arrived(item(0, 1, "klt:6>4", epoch=3))
    refinements.aborted(0, 1, 2)
    assert refinements.holds(0, 1, 3)
    refinements.aborted(0, 1, 3)
    assert not refinements.holds(0, 1, 3)
    assert refinements.waiting_bytes == 0
