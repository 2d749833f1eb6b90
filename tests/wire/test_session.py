"""Both ends together: whatever the link does, the same things happen, each once."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.wire.duet import LATENCY_S, Duet, Parcel
from wire import (
    Answered,
    Ask,
    Asked,
    ChunkComplete,
    ChunkReady,
    ChunkSent,
    Done,
    Failed,
    Lane,
    OutgoingChunk,
    Recompute,
    SenderState,
    Token,
)

CHUNKS = [bytes([index]) * size for index, size in enumerate((5000, 1, 3300))]
QUESTION = (7, 8, 9)


def wire_up(duet: Duet) -> None:
    """Offer every chunk and ask, all at once."""
    duet.accept()
    for index, payload in enumerate(CHUNKS):
        duet.sender.offer(OutgoingChunk(index, f"level:{index}", payload), now=duet.now)
    duet.sender.ask(Ask(max_tokens=3), QUESTION, now=duet.now)
    duet.collect()


def work(duet: Duet, seen: list[int]) -> None:
    """Decode what is complete, once, and answer when everything is there."""
    complete = [event for event in duet.received if isinstance(event, ChunkComplete)]
    for event in complete[len(seen) :]:
        seen.append(event.chunk)
        duet.consume(event)
    has_question = any(isinstance(event, Asked) for event in duet.received)
    if len(seen) == len(CHUNKS) and has_question and not duet.receiver.is_over:
        for index in range(3):
            duet.receiver.send_token(Token(index, 100 + index, 0.0), now=duet.now)
        duet.receiver.answered(Answered("length", 0.0, 0.0), now=duet.now)
        duet.receiver.finish(Done(), now=duet.now)


def check_outcome(duet: Duet) -> None:
    """What a request without any trouble looks like, too."""
    complete = [event for event in duet.received if isinstance(event, ChunkComplete)]
    assert {event.chunk: event.payload for event in complete} == dict(enumerate(CHUNKS))
    assert len(complete) == len(CHUNKS)
    assert [event for event in duet.received if isinstance(event, Asked)] == [
        Asked(Ask(max_tokens=3), QUESTION)
    ]
    tokens = [event.token_id for event in duet.sent if isinstance(event, Token)]
    assert tokens == [100, 101, 102]
    ready = [event.chunk for event in duet.sent if isinstance(event, ChunkReady)]
    assert sorted(ready) == [0, 1, 2]
    sent = [event.chunk for event in duet.sent if isinstance(event, ChunkSent)]
    assert len(sent) == len(set(sent))
    assert duet.sender.state is SenderState.DONE
    assert duet.receiver.is_closed(now=duet.now)
    assert duet.receiver.held_bytes == 0


def finish(duet: Duet, seen: list[int]) -> None:
    duet.settle(
        lambda: duet.sender.is_over and duet.receiver.is_closed(now=duet.now),
        on_step=lambda: work(duet, seen),
    )
    check_outcome(duet)


def test_a_good_link_carries_a_request() -> None:
    duet = Duet()
    wire_up(duet)
    finish(duet, [])
    assert duet.sender.num_bytes_resent == 0
    assert duet.receiver.num_bytes_received == sum(map(len, CHUNKS))
    assert duet.receiver.num_bytes_repeated == 0
    assert duet.sender.bytes_in_flight == 0


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.booleans())
def test_loss_repetition_and_any_order_give_the_same_events(
    source: random.Random, loss: float, repetition: float, is_shuffled: bool
) -> None:
    duet = Duet()
    wire_up(duet)
    seen: list[int] = []
    for _ in range(40):
        duet.tick(LATENCY_S)
        batch = [parcel for parcel in duet.parcels if source.random() >= loss]
        batch += [parcel for parcel in batch if source.random() < repetition]
        duet.parcels.clear()
        if is_shuffled:
            source.shuffle(batch)
        for parcel in batch:
            duet.deliver(parcel)
        work(duet, seen)
        duet.collect()
    finish(duet, seen)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_damaged_frames_change_nothing(source: random.Random) -> None:
    duet = Duet()
    wire_up(duet)
    seen: list[int] = []
    for _ in range(20):
        duet.tick(LATENCY_S)
        batch, duet.parcels = duet.parcels, []
        for parcel in batch:
            if source.random() < 0.3:
                data = bytearray(parcel.data)
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
                parcel = Parcel(parcel.to_worker, parcel.lane, bytes(data))
            duet.deliver(parcel)
        work(duet, seen)
        duet.collect()
    finish(duet, seen)


def test_every_single_frame_may_be_lost() -> None:
    for victim in itertools.count():
        duet = Duet()
        wire_up(duet)
        seen: list[int] = []
        number = 0
        while not (duet.sender.is_over and duet.receiver.is_closed(now=duet.now)):
            assert duet.now < 160
            duet.tick(LATENCY_S)
            batch, duet.parcels = duet.parcels, []
            for parcel in batch:
                if number != victim:
                    duet.deliver(parcel)
                number += 1
            work(duet, seen)
            duet.collect()
        check_outcome(duet)
        if number <= victim:
            assert victim > 30
            break


def test_every_single_frame_may_be_the_last_before_an_outage() -> None:
    """After the n-th frame everything under way is lost; then both ends hear that they are back."""
    for victim in itertools.count():
        duet = Duet()
        wire_up(duet)
        seen: list[int] = []
        number = 0
        while not (duet.sender.is_over and duet.receiver.is_closed(now=duet.now)):
            assert duet.now < 160
            duet.tick(LATENCY_S)
            batch, duet.parcels = duet.parcels, []
            for parcel in batch:
                if number == victim:
                    in_flight = duet.sender.bytes_in_flight
                    for end in (duet.sender, duet.receiver):
                        end.on_connection(is_up=False, now=duet.now)
                    duet.parcels.clear()
                    duet.tick(5.0)
                    assert duet.parcels == []
                    for end in (duet.sender, duet.receiver):
                        end.on_connection(is_up=True, now=duet.now)
                    duet.collect()
                    number += 1
                    break
                duet.deliver(parcel)
                number += 1
            work(duet, seen)
            duet.collect()
        check_outcome(duet)
        if number <= victim:
            break
        assert duet.sender.num_bytes_resent <= in_flight
        # Back within a few round trips, not after some timer.
        assert duet.now < 100 + 5 + 2
    assert victim > 30


@pytest.mark.parametrize("lane", list(Lane))
def test_each_lane_alone_may_be_slow(lane: Lane) -> None:
    duet = Duet()
    wire_up(duet)
    seen: list[int] = []
    for _ in range(10):
        duet.tick(LATENCY_S)
        due = [parcel for parcel in duet.parcels if parcel.lane is not lane or not parcel.to_worker]
        duet.parcels = [parcel for parcel in duet.parcels if parcel not in due]
        for parcel in due:
            duet.deliver(parcel)
        work(duet, seen)
        duet.collect()
    finish(duet, seen)


@dataclass
class Attempt:
    """What the sender did last with a chunk."""

    epoch: int
    payload: bytes
    is_text: bool


class SessionMachine(RuleBasedStateMachine):
    """Any sequence of offers, aborts, orders, losses, outages and pauses; in the end all is well."""

    parcels = Bundle("parcels")

    @initialize(window_bytes=st.sampled_from([8000, 12_000, 1 << 20]))
    def start(self, window_bytes: int) -> None:
        self.duet = Duet(
            num_chunks=4, window_bytes=window_bytes, max_chunk_bytes=8000, peer_timeout_s=1e6
        )
        self.duet.accept()
        self.duet.deliver(self.duet.parcels.pop())
        self.attempts: dict[int, Attempt] = {}
        self.offered: dict[tuple[int, int], bytes] = {}
        self.complete: set[tuple[int, int]] = set()
        self.unconsumed: list[ChunkComplete] = []
        self.ready: dict[int, int] = {}
        self.num_seen = 0
        self.is_up = True
        self.source = random.Random(0)

    def look(self) -> None:
        """Take in what the worker was told; every whole chunk must be exactly what was offered."""
        self.duet.collect()
        # Silence may end a session; nothing that a link does may look like a breach of the protocol.
        assert not any(isinstance(event, Failed) for event in self.duet.sent)
        for event in self.duet.received[self.num_seen :]:
            assert not isinstance(event, Failed)
            if isinstance(event, ChunkComplete):
                key = event.chunk, event.epoch
                assert event.payload == self.offered[key]
                assert event.level == f"level:{event.epoch}"
                assert key not in self.complete, "handed up twice"
                self.complete.add(key)
                self.unconsumed.append(event)
            elif (
                isinstance(event, Recompute)
                and event.chunk not in self.ready
                and not self.duet.receiver.is_over
            ):
                self.ready[event.chunk] = event.epoch
                self.duet.receiver.chunk_ready(
                    ChunkReady(event.chunk, 0, event.epoch, "text", 0.0, 0.0, 0.0),
                    now=self.duet.now,
                )
        self.num_seen = len(self.duet.received)

    @property
    def is_over(self) -> bool:
        return self.duet.sender.is_over or self.duet.receiver.is_over

    def is_live(self, chunk: int) -> bool:
        return self.duet.sender.progress(chunk) is not None

    @precondition(lambda self: not self.is_over)
    @rule(chunk=st.integers(0, 3), size=st.integers(1, 8000))
    def offer(self, chunk: int, size: int) -> None:
        if self.is_live(chunk):
            return
        payload = self.source.randbytes(size)
        epoch = self.attempts[chunk].epoch + 1 if chunk in self.attempts else 0
        given = self.duet.sender.offer(
            OutgoingChunk(chunk, f"level:{epoch}", payload), now=self.duet.now
        )
        assert given == epoch
        self.attempts[chunk] = Attempt(epoch, payload, is_text=False)
        self.offered[chunk, epoch] = payload
        self.look()

    @precondition(lambda self: not self.is_over)
    @rule(chunk=st.integers(0, 3))
    def abort(self, chunk: int) -> None:
        if self.is_live(chunk):
            self.duet.sender.abort(chunk, now=self.duet.now)
            self.look()

    @precondition(lambda self: not self.is_over)
    @rule(chunk=st.integers(0, 3))
    def recompute(self, chunk: int) -> None:
        if not self.is_live(chunk):
            epoch = self.duet.sender.recompute(chunk, now=self.duet.now)
            self.attempts[chunk] = Attempt(epoch, b"", is_text=True)
            self.look()

    @precondition(lambda self: not self.is_over)
    @rule()
    def consume(self) -> None:
        if self.unconsumed:
            event = self.unconsumed.pop(0)
            self.duet.receiver.consumed(event.chunk, epoch=event.epoch, now=self.duet.now)
            if event.chunk not in self.ready:
                self.ready[event.chunk] = event.epoch
                self.duet.receiver.chunk_ready(
                    ChunkReady(event.chunk, 0, event.epoch, event.level, 0.0, 0.0, 0.0),
                    now=self.duet.now,
                )
            self.look()

    @precondition(lambda self: not self.is_over)
    @rule()
    def reject(self) -> None:
        if self.unconsumed:
            event = self.unconsumed.pop(0)
            self.duet.receiver.reject(
                event.chunk, epoch=event.epoch, sentence="bad", now=self.duet.now
            )
            self.look()

    @rule(which=st.integers(0, 30))
    def deliver(self, which: int) -> None:
        if self.duet.parcels and self.is_up:
            self.duet.deliver(self.duet.parcels.pop(which % len(self.duet.parcels)))
            self.look()

    @rule()
    def deliver_all(self) -> None:
        if self.is_up:
            batch, self.duet.parcels = self.duet.parcels, []
            for parcel in batch:
                self.duet.deliver(parcel)
            self.look()

    @rule(which=st.integers(0, 30))
    def lose(self, which: int) -> None:
        if self.duet.parcels:
            self.duet.parcels.pop(which % len(self.duet.parcels))

    @rule(which=st.integers(0, 30))
    def repeat(self, which: int) -> None:
        if self.duet.parcels and self.is_up:
            self.duet.deliver(self.duet.parcels[which % len(self.duet.parcels)])
            self.look()

    @rule(duration_s=st.floats(0.0, 2.0))
    def wait(self, duration_s: float) -> None:
        self.duet.tick(duration_s)
        self.look()

    @precondition(lambda self: self.is_up)
    @rule()
    def go_down(self) -> None:
        self.is_up = False
        self.duet.parcels.clear()
        for end in (self.duet.sender, self.duet.receiver):
            end.on_connection(is_up=False, now=self.duet.now)
        self.look()

    @precondition(lambda self: not self.is_up)
    @rule()
    def come_back(self) -> None:
        self.is_up = True
        for end in (self.duet.sender, self.duet.receiver):
            end.on_connection(is_up=True, now=self.duet.now)
        self.look()

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "duet"):
            return
        assert 0 <= self.duet.receiver.held_bytes <= self.duet.window_bytes
        assert self.duet.sender.bytes_in_flight >= 0
        held = sum(len(event.payload) for event in self.unconsumed)
        assert self.duet.receiver.held_bytes >= held

    def teardown(self) -> None:
        if not hasattr(self, "duet") or self.is_over:
            return
        if not self.is_up:
            self.come_back()

        def step() -> None:
            self.look()
            while self.unconsumed:
                self.consume()
            for chunk in range(4):
                is_missing = chunk not in self.ready
                if is_missing and not self.is_live(chunk) and self.is_sent(chunk):
                    self.offer(chunk, 100)

        asked = False

        def is_done() -> bool:
            nonlocal asked
            if not asked:
                asked = True
                self.duet.sender.ask(Ask(max_tokens=1), (1,), now=self.duet.now)
            return (
                len(self.ready) == 4
                and not any(self.is_live(chunk) for chunk in range(4))
                and any(isinstance(event, Asked) for event in self.duet.received)
                and {event.chunk for event in self.duet.sent if isinstance(event, ChunkReady)}
                == {0, 1, 2, 3}
                # Also what was given up comes to an end, and every byte of credit comes back.
                and self.duet.sender.bytes_in_flight == 0
                and self.duet.sender.credit_bytes == self.duet.window_bytes
            )

        self.duet.settle(is_done, on_step=step, limit_s=120.0)
        assert self.duet.receiver.held_bytes == 0

    def is_sent(self, chunk: int) -> bool:
        """Whether nothing of this chunk is under way any more that could still complete it."""
        attempt = self.attempts.get(chunk)
        return attempt is None or not attempt.is_text


def test_any_sequence_of_moves_ends_well() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
