"""A small agent for tests: drives the real sender session over a transport, with a fixed plan."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from codec import Codec
from engine import TorchEngine
from engine.chunk_keys import derive_chunk_keys, profile_set_digest
from wire import (
    Accept,
    Ask,
    ChunkBad,
    ChunkRange,
    ChunkReady,
    Done,
    Failed,
    FrameError,
    Lane,
    Open,
    OutgoingChunk,
    Refuse,
    SenderSession,
    Token,
    control_subject,
    data_subject,
    open_subject,
    reply_subject,
)
from wire.aio import Message, Transport, TransportError

TENANT = "clinic"
CONTEXT = tuple(int(i) for i in np.random.default_rng(7).integers(3, 256, 90))
QUESTION = tuple(int(i) for i in np.random.default_rng(8).integers(3, 256, 9))
RANGES = ((0, 40), (40, 80), (80, 90))
MAX_TOKENS = 8


@dataclass
class Agent:
    """One request of an agent."""

    engine: TorchEngine
    codec: Codec
    data: Transport
    control: Transport
    level: str = "fp16"
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the opening to replace."""
    session_id: bytes = field(default_factory=lambda: os.urandom(16))
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        identity = self.engine.identity.digest
        profiles = profile_set_digest(profile.digest for profile in self.codec.profiles)
        keys = derive_chunk_keys(
            CONTEXT, RANGES, model_digest=identity, profile_digest=profiles, tenant=TENANT
        )
        self.streams = self._encode()
        open_ = Open(
            tenant=TENANT,
            inbox=self.control.inbox,
            model_name="tiny",
            model_digest=identity,
            profile_digest=profiles,
            chunks=tuple(
                ChunkRange(start, stop, key)
                for (start, stop), key in zip(RANGES, keys, strict=True)
            ),
            max_chunk_bytes=max(map(len, self.streams)),
            question_tokens=len(QUESTION),
            max_tokens=MAX_TOKENS,
            deadline_s=5.0,
        )
        self.sender = SenderSession(
            replace(open_, **self.changes),
            CONTEXT,
            session=self.session_id,
            now=time.monotonic(),
            max_payload=self.control.max_payload,
        )
        self._wake = asyncio.Event()
        self._plan: list[tuple[int, str]] = []
        self.subscription: Any = None

    def _encode(self) -> list[bytes]:
        cache = self.engine.new_cache(len(CONTEXT))
        self.engine.fill(cache, CONTEXT, 0)
        return [
            self.codec.encode(
                cache.read(start, stop),
                level=self.level,
                token_start=start,
                layer0=self.engine.layer0_kv(CONTEXT[start:stop]),
            )
            for start, stop in RANGES
        ]

    async def open(self) -> Accept | Refuse:
        """Ask for a worker."""
        self.subscription = await self.control.subscribe(
            reply_subject(self.control.inbox, self.session_id), self._on_frame
        )
        reply = await self.control.request(
            open_subject(TENANT), self.sender.open_frame(), timeout_s=1.0
        )
        self.sender.receive(reply, now=time.monotonic())
        answer = self.sender.next_event()
        assert isinstance(answer, Accept | Refuse)
        return answer

    def ask(self, **changes: Any) -> None:
        """Send the question."""
        ask = replace(Ask(max_tokens=MAX_TOKENS), **changes)
        self.sender.ask(ask, QUESTION, now=time.monotonic())
        self._wake.set()

    def send(self, chunk: int, payload: bytes | None = None) -> None:
        """Offer a chunk's bitstream."""
        self.sender.offer(
            OutgoingChunk(chunk, self.level, self.streams[chunk] if payload is None else payload),
            now=time.monotonic(),
        )
        self._wake.set()

    def recompute(self, chunk: int) -> None:
        """Order a chunk to be recomputed."""
        self.sender.recompute(chunk, now=time.monotonic())
        self._wake.set()

    def cancel(self) -> None:
        """Want nothing more."""
        self.sender.cancel("the client went away", now=time.monotonic())
        self._wake.set()

    async def run(self, until: type | tuple[type, ...] = (Done, Failed)) -> Any:
        """Drive the session until an event of a kind comes; return it."""
        async with asyncio.timeout(30):
            while True:
                self._wake.clear()
                now = time.monotonic()
                timer = self.sender.next_timer()
                if timer is not None and timer <= now:
                    self.sender.handle_timer(now=now)
                found = None
                while (event := self.sender.next_event()) is not None:
                    self.events.append(event)
                    if found is None and isinstance(event, until):
                        found = event
                await self.flush()
                if found is not None:
                    return found
                timer = self.sender.next_timer()
                delay_s = None if timer is None else max(0.0, timer - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._wake.wait()

    async def flush(self) -> None:
        """Publish what is due."""
        assert self.sender.accept is not None
        worker = self.sender.accept.worker
        for outgoing in self.sender.frames_to_send(now=time.monotonic()):
            is_data = outgoing.lane is Lane.DATA
            subject_of = data_subject if is_data else control_subject
            transport = self.data if is_data else self.control
            with contextlib.suppress(TransportError):  # lost; the session sends it again
                await transport.publish(subject_of(TENANT, worker, self.session_id), outgoing.data)

    @property
    def is_connected(self) -> bool:
        """Whether both connections are up."""
        return self.data.is_connected and self.control.is_connected

    def on_connection(self, *, is_up: bool) -> None:
        """Take in that a connection went down, or that both are up again."""
        self.sender.on_connection(is_up=is_up, now=time.monotonic())
        self._wake.set()

    def ready_parts(self) -> set[tuple[int, int]]:
        """Chunks and parts that the worker has decoded so far."""
        return {(e.chunk, e.part) for e in self.events if isinstance(e, ChunkReady)}

    def tokens(self) -> tuple[int, ...]:
        """The answer so far."""
        return tuple(e.token_id for e in self.events if isinstance(e, Token))

    def ready(self) -> dict[int, str]:
        """Level of each chunk that is ready."""
        return {e.chunk: e.level for e in self.events if isinstance(e, ChunkReady)}

    def bad(self) -> list[ChunkBad]:
        """Chunks that the worker could not use."""
        return [e for e in self.events if isinstance(e, ChunkBad)]

    def _on_frame(self, message: Message) -> None:
        with contextlib.suppress(FrameError):  # damaged on its way
            self.sender.receive(message.data, now=time.monotonic())
        self._wake.set()


def exact_answer(engine: TorchEngine) -> tuple[int, ...]:
    """The greedy answer over a full prefill."""
    from engine import Sampling

    cache = engine.new_cache(len(CONTEXT) + len(QUESTION) + MAX_TOKENS)
    logits = engine.prefill(cache, CONTEXT + QUESTION, 0)
    start = len(CONTEXT) + len(QUESTION)
    return tuple(engine.generate(cache, logits, start, Sampling(), MAX_TOKENS))
