from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from cloud_worker.errors import OrderError
from cloud_worker.order import AnswerStep, ChunkState, DecodeStep, PrefillStep, WorkOrder

RANGES = [(0, 4), (4, 8), (8, 10)]


def order(step_tokens: int = 100) -> WorkOrder:
    return WorkOrder(RANGES, step_tokens=step_tokens)


def decode(work: WorkOrder, chunk: int, epoch: int = 0) -> None:
    assert work.bitstream_arrived(chunk, epoch)
    step = work.next_decode()
    assert step == DecodeStep(chunk, epoch)
    work.decode_done(step)


def test_nothing_is_to_be_done_before_anything_arrives() -> None:
    work = order()
    work.question_arrived()
    assert work.next_decode() is None
    assert work.next_compute() is None
    assert work.front_tokens == 0


def test_bitstreams_are_decoded_in_order_of_arrival_wherever_they_lie() -> None:
    work = order()
    for chunk in (2, 0, 1):
        assert work.bitstream_arrived(chunk, 0)
    assert [work.next_decode() for _ in range(4)] == [
        DecodeStep(2, 0),
        DecodeStep(0, 0),
        DecodeStep(1, 0),
        None,
    ]


def test_the_front_moves_over_chunks_that_were_ready_before_it() -> None:
    work = order()
    decode(work, 2)
    assert work.front_tokens == 0
    decode(work, 0)
    assert work.front_tokens == 4
    decode(work, 1)
    assert work.front_tokens == 10
    assert work.is_context_ready


def test_a_text_chunk_waits_until_every_token_before_it_is_there() -> None:
    work = order()
    assert work.text_ordered(1, 0)
    assert work.next_compute() is None
    decode(work, 0)
    assert work.next_compute() == PrefillStep(1, 0, 4, 8, is_last=True)


def test_text_is_prefilled_from_the_front_while_bitstreams_fill_the_back() -> None:
    work = order()
    assert work.text_ordered(0, 0)
    assert work.text_ordered(1, 0)
    assert work.bitstream_arrived(2, 0)
    first = work.next_compute()
    assert first == PrefillStep(0, 0, 0, 4, is_last=True)
    behind = work.next_decode()
    assert behind == DecodeStep(2, 0)
    work.decode_done(behind)
    work.prefill_done(first)
    second = work.next_compute()
    assert second == PrefillStep(1, 0, 4, 8, is_last=True)
    work.prefill_done(second)
    assert work.is_context_ready


def test_a_long_text_chunk_is_prefilled_in_steps() -> None:
    work = order(step_tokens=3)
    assert work.text_ordered(0, 5)
    steps = []
    while (step := work.next_compute()) is not None:
        assert isinstance(step, PrefillStep)
        assert work.next_compute() is None, "one step at a time"
        steps.append((step.token_start, step.token_stop, step.is_last))
        work.prefill_done(step)
    assert steps == [(0, 3, False), (3, 4, True)]
    assert work.front_tokens == 4


def test_the_answer_comes_once_after_the_whole_context_and_the_question() -> None:
    work = order()
    for chunk in range(3):
        decode(work, chunk)
    assert work.next_compute() is None
    work.question_arrived()
    assert work.next_compute() == AnswerStep()
    assert work.next_compute() is None


def test_a_context_without_chunks_is_ready_at_once() -> None:
    work = WorkOrder([], step_tokens=1)
    work.question_arrived()
    assert work.next_compute() == AnswerStep()


def test_a_later_epoch_replaces_a_waiting_one() -> None:
    work = order()
    assert work.text_ordered(0, 0)
    assert work.bitstream_arrived(0, 1)
    assert work.next_compute() is None
    assert work.next_decode() == DecodeStep(0, 1)
    assert work.bitstream_arrived(1, 0)
    assert work.text_ordered(1, 1)
    assert work.next_decode() is None


def test_an_earlier_epoch_is_dropped() -> None:
    work = order()
    assert work.bitstream_arrived(0, 2)
    assert not work.bitstream_arrived(0, 2)
    assert not work.text_ordered(0, 1)
    assert work.next_decode() == DecodeStep(0, 2)


def test_work_that_has_started_is_finished_whatever_comes() -> None:
    work = order(step_tokens=2)
    assert work.text_ordered(0, 0)
    step = work.next_compute()
    assert isinstance(step, PrefillStep)
    assert not work.bitstream_arrived(0, 1)
    work.prefill_done(step)
    work.aborted(0, 1)
    assert not work.bitstream_arrived(0, 2)
    rest = work.next_compute()
    assert rest == PrefillStep(0, 0, 2, 4, is_last=True)


def test_an_aborted_epoch_is_not_worked_on_and_does_not_come_back() -> None:
    work = order()
    assert work.bitstream_arrived(0, 1)
    work.aborted(0, 1)
    assert work.state(0) is ChunkState.MISSING
    assert work.next_decode() is None
    assert not work.bitstream_arrived(0, 1)
    assert work.bitstream_arrived(0, 2)


def test_an_abort_that_overtakes_its_chunk_still_counts() -> None:
    work = order()
    work.aborted(0, 3)
    assert not work.bitstream_arrived(0, 3)
    assert work.bitstream_arrived(0, 4)


def test_an_abort_of_an_old_epoch_leaves_the_new_one() -> None:
    work = order()
    assert work.bitstream_arrived(0, 2)
    work.aborted(0, 1)
    assert work.next_decode() == DecodeStep(0, 2)


def test_a_failed_decode_leaves_the_chunk_missing_for_a_later_epoch() -> None:
    work = order()
    assert work.bitstream_arrived(0, 0)
    step = work.next_decode()
    assert step is not None
    work.decode_failed(step)
    assert work.front_tokens == 0
    assert not work.bitstream_arrived(0, 0)
    decode(work, 0, epoch=1)
    assert work.front_tokens == 4


@pytest.mark.parametrize("kind", ["bitstream", "text"])
def test_an_attempt_that_comes_during_a_decode_is_taken_up_when_the_decode_fails(
    kind: str,
) -> None:
    work = order()
    assert work.bitstream_arrived(0, 0)
    step = work.next_decode()
    assert step is not None
    offer = work.bitstream_arrived if kind == "bitstream" else work.text_ordered
    assert offer(0, 1)
    assert not offer(0, 1)
    assert work.next_decode() is None
    assert work.next_compute() is None
    work.decode_failed(step)
    if kind == "bitstream":
        assert work.next_decode() == DecodeStep(0, 1)
    else:
        assert work.next_compute() == PrefillStep(0, 1, 0, 4, is_last=True)


def test_an_attempt_that_comes_during_a_decode_is_dropped_when_the_decode_ends_well() -> None:
    work = order()
    assert work.bitstream_arrived(0, 0)
    step = work.next_decode()
    assert step is not None
    assert work.bitstream_arrived(0, 1)
    work.decode_done(step)
    assert work.ready_chunks() == (0,)
    assert work.next_decode() is None


def test_an_attempt_that_waits_behind_a_decode_can_be_aborted() -> None:
    work = order()
    assert work.bitstream_arrived(0, 0)
    step = work.next_decode()
    assert step is not None
    assert work.text_ordered(0, 1)
    work.aborted(0, 1)
    work.decode_failed(step)
    assert work.state(0) is ChunkState.MISSING
    assert work.bitstream_arrived(0, 2)


def test_a_ready_chunk_is_never_written_again() -> None:
    work = order()
    decode(work, 0)
    assert not work.bitstream_arrived(0, 9)
    assert not work.text_ordered(0, 9)
    work.aborted(0, 9)
    assert work.ready_chunks() == (0,)


def test_a_step_that_was_not_handed_out_is_an_error() -> None:
    work = order()
    with pytest.raises(OrderError, match="chunk 0 epoch 0 is missing"):
        work.decode_done(DecodeStep(0, 0))
    with pytest.raises(OrderError, match="not prefilling"):
        work.prefill_done(PrefillStep(0, 0, 0, 4, is_last=True))


@pytest.mark.parametrize("ranges", [[(1, 4)], [(0, 0)], [(0, 4), (5, 8)], [(0, 4), (3, 8)]])
def test_ranges_with_gaps_or_overlaps_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not start at"):
        WorkOrder(ranges, step_tokens=1)


def test_a_step_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens is 0"):
        WorkOrder(RANGES, step_tokens=0)


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_any_arrivals_in_any_order_fill_every_token_once_and_front_first(
    seed: int,
) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 7) for _ in range(rng.randint(1, 6))]
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    work = WorkOrder(ranges, step_tokens=rng.randint(1, 5))
    work.question_arrived()
    written = [0] * start
    epochs = dict.fromkeys(range(len(ranges)), 0)
    decoding: list[DecodeStep] = []
    computing: list[PrefillStep] = []
    answered = False
    while not answered:
        open_states = (ChunkState.MISSING, ChunkState.DECODING)
        missing = [i for i in epochs if work.state(i) in open_states]
        moves = ["offer"] * bool(missing) + ["decode", "finish", "compute", "abort"]
        move = rng.choice(moves)
        if move == "offer":
            chunk = rng.choice(missing)
            epochs[chunk] += 1
            arrive = rng.random() < 0.7
            offer = work.bitstream_arrived if arrive else work.text_ordered
            assert offer(chunk, epochs[chunk])
        elif move == "abort":
            chunk = rng.choice(sorted(epochs))
            work.aborted(chunk, epochs[chunk])
        elif move == "decode" and (step := work.next_decode()) is not None:
            decoding.append(step)
        elif move == "compute" and not computing:
            todo = work.next_compute()
            if isinstance(todo, AnswerStep):
                answered = True
            elif todo is not None:
                assert all(written[: todo.token_start]), "prefilled over a hole"
                computing.append(todo)
        elif move == "finish" and computing:
            prefill = computing.pop()
            for token in range(prefill.token_start, prefill.token_stop):
                written[token] += 1
            work.prefill_done(prefill)
        elif move == "finish" and decoding:
            done = decoding.pop(rng.randrange(len(decoding)))
            if rng.random() < 0.7:
                for token in range(*ranges[done.chunk]):
                    written[token] += 1
                work.decode_done(done)
            else:
                work.decode_failed(done)
        assert all(written[: work.front_tokens])
    assert written == [1] * start
