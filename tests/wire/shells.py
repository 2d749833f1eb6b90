"""Small complete shells for both ends, as the docstring of ``wire.session`` describes them.

The agent moves a context of random chunks and asks; the worker "answers" with numbers that depend on
every byte it was given, so a wrong, missing or mixed-up chunk gives a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wire import (
    WORKER_QUEUE,
    Abort,
    Accept,
    Answered,
    Ask,
    Asked,
    Cancel,
    ChunkBad,
    ChunkComplete,
    ChunkRange,
    ChunkReady,
    Credit,
    Delivered,
    Done,
    Failed,
    FrameError,
    Lane,
    Open,
    OutgoingChunk,
    PeerLost,
    PeerSilent,
    ReceiverSession,
    Recompute,
    Refuse,
    SenderSession,
    Speeds,
    Token,
    control_subject,
    data_subject,
    open_subject,
    parse_open,
    reply_subject,
)
from wire.aio import (
    ConnectionChange,
    Message,
    RequestTimeout,
    Subscription,
    Transport,
    TransportError,
)

TENANT = "clinic"
CHUNK_TOKENS = 10
SPEEDS = Speeds(decode_bytes_per_s=1e9, prefill_base_s=1e-3, prefill_slope_s=1e-7)


def make_payloads(sizes: Sequence[int], *, seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


def expected_answer(
    payloads: Sequence[bytes], token_ids: Sequence[int], question: Sequence[int], *, num_tokens: int
) -> list[int]:
    """The answer that exactly these chunks, tokens and question give."""
    hasher = hashlib.blake2b(repr((list(token_ids), list(question))).encode())
    for payload in payloads:
        hasher.update(hashlib.blake2b(payload).digest())
    digest = hasher.digest()
    return [digest[index % len(digest)] * 256 + index for index in range(num_tokens)]


def make_open(
    num_chunks: int,
    *,
    inbox: str = "_INBOX.agent",
    max_chunk_bytes: int = 1 << 20,
    question_tokens: int = 3,
    max_tokens: int = 8,
) -> tuple[Open, tuple[int, ...]]:
    open_ = Open(
        tenant=TENANT,
        inbox=inbox,
        model_name="tiny",
        model_digest=b"m" * 32,
        profile_digest=b"p" * 32,
        chunks=tuple(
            ChunkRange(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS, bytes([index]) * 32)
            for index in range(num_chunks)
        ),
        max_chunk_bytes=max_chunk_bytes,
        question_tokens=question_tokens,
        max_tokens=max_tokens,
        deadline_s=5.0,
    )
    return open_, tuple(range(num_chunks * CHUNK_TOKENS))


def make_accept(
    *, worker: str = "w-1", window_bytes: int = 4 << 20, segment_bytes: int = 64 << 10
) -> Accept:
    return Accept(
        worker=worker,
        window_bytes=window_bytes,
        segment_bytes=segment_bytes,
        speeds=SPEEDS,
        queue_delay_s=0.0,
        backend="test",
    )


class SessionEndedError(Exception):
    """The session ended without an answer; the message says why."""


@dataclass
class AgentShell:
    """One request."""

    data: Transport
    control: Transport
    payloads: Sequence[bytes]
    question: Sequence[int] = (1, 2, 3)
    num_tokens: int = 8
    seed: int = 0
    claim_timeout_s: float = 2.0
    num_claims: int = 1
    """A claim that a dying worker swallowed is asked again, for another one to take."""
    peer_timeout_s: float = 60.0
    abort_first: bool = False
    """Give every even chunk up once while it is under way, and send it again."""
    recompute: frozenset[int] = frozenset()
    """Chunks that are sent as text; the worker takes its payload from ``WorkerShell.texts``."""
    on_event: Callable[[object], None] | None = None
    num_silent: int = 0
    answer: list[int] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    session: SenderSession | None = None
    worker_ids: list[str] = field(default_factory=list)

    async def run(self) -> list[int]:
        """Return the answer's tokens, or raise a typed error."""
        loop = asyncio.get_running_loop()
        self.answer.clear()
        session_id = random.Random(f"{self.seed}/{len(self.worker_ids)}").randbytes(16)
        open_, token_ids = make_open(
            len(self.payloads),
            inbox=self.control.inbox,
            max_chunk_bytes=max((len(payload) for payload in self.payloads), default=1),
            question_tokens=len(self.question),
            max_tokens=self.num_tokens,
        )
        session = self.session = SenderSession(
            open_,
            token_ids,
            session=session_id,
            now=loop.time(),
            max_payload=self.data.max_payload,
            peer_timeout_s=self.peer_timeout_s,
        )
        wake = asyncio.Event()

        def take(message: Message) -> None:
            with contextlib.suppress(FrameError):
                session.receive(message.data, now=loop.time())
            wake.set()

        def changed(_change: ConnectionChange) -> None:
            session.on_connection(
                is_up=self.data.is_connected and self.control.is_connected, now=loop.time()
            )
            wake.set()

        unwatch = [self.data.watch(changed), self.control.watch(changed)]
        subscription: Subscription | None = None
        try:
            subscription = await self.control.subscribe(
                reply_subject(self.control.inbox, session_id), take
            )
            session.receive(await self._claim(session), now=loop.time())
            await self._loop(session, wake)
        except asyncio.CancelledError:
            session.cancel("the client went away", now=loop.time())
            await self._send(session)
            raise
        finally:
            for end in unwatch:
                end()
            if subscription is not None:
                with contextlib.suppress(TransportError):
                    await subscription.unsubscribe()
        return self.answer

    async def _claim(self, session: SenderSession) -> bytes:
        for _ in range(self.num_claims - 1):
            with contextlib.suppress(RequestTimeout):
                return await self.control.request(
                    open_subject(TENANT), session.open_frame(), timeout_s=self.claim_timeout_s
                )
        return await self.control.request(
            open_subject(TENANT), session.open_frame(), timeout_s=self.claim_timeout_s
        )

    async def _loop(self, session: SenderSession, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        to_send = list(range(len(self.payloads)))
        to_abort = {index for index in to_send if index % 2 == 0} if self.abort_first else set()
        ready: set[int] = set()
        is_asked = False
        end: Exception | None = None
        while True:
            wake.clear()
            session.handle_timer(now=loop.time())
            while (event := session.next_event()) is not None:
                self.events.append(event)
                if self.on_event is not None:
                    self.on_event(event)
                match event:
                    case Accept():
                        self.worker_ids.append(event.worker)
                    case ChunkReady():
                        ready.add(event.chunk)
                    case ChunkBad():
                        to_send.insert(0, event.chunk)
                    case Token():
                        assert event.index == len(self.answer)
                        self.answer.append(event.token_id)
                    case PeerSilent():
                        self.num_silent += 1
                    case Refuse() | Failed() | PeerLost():
                        end = SessionEndedError(repr(event))
                    case Done() | Answered() | Delivered() | Credit():
                        pass
            while session.wants_chunk and to_send:
                index = to_send.pop(0)
                if index in self.recompute:
                    session.recompute(index, now=loop.time())
                else:
                    chunk = OutgoingChunk(index, f"level:{index}", self.payloads[index])
                    session.offer(chunk, now=loop.time())
            for index in sorted(to_abort):
                progress = session.progress(index)
                if progress is not None and progress[1] > 0 and index not in ready:
                    to_abort.discard(index)
                    session.abort(index, now=loop.time())
                    to_send.insert(0, index)
            if not to_send and not is_asked and not session.is_over:
                is_asked = True
                session.ask(Ask(max_tokens=self.num_tokens), self.question, now=loop.time())
            await self._send(session)
            for transport in (self.data, self.control):
                if transport.failure is not None:
                    raise transport.failure
            if session.is_closed(now=loop.time()):
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(session.next_timer()):
                    await wake.wait()
        if end is not None:
            raise end

    async def _send(self, session: SenderSession) -> None:
        now = asyncio.get_running_loop().time()
        if session.accept is None:
            return
        worker = session.accept.worker
        for outgoing in session.frames_to_send(now=now):
            with contextlib.suppress(TransportError):
                if outgoing.lane is Lane.DATA:
                    subject = data_subject(TENANT, worker, session.session)
                    await self.data.publish(subject, outgoing.data)
                else:
                    subject = control_subject(TENANT, worker, session.session)
                    await self.control.publish(subject, outgoing.data)


@dataclass
class WorkerShell:
    """A worker that serves any number of sessions until it is closed."""

    data: Transport
    control: Transport
    worker: str = "w-1"
    window_bytes: int = 4 << 20
    segment_bytes: int = 64 << 10
    decode_s: float = 0.0
    """Time per chunk; 0 decodes within the loop's turn."""
    texts: dict[int, bytes] = field(default_factory=dict)
    peer_timeout_s: float = 60.0
    sessions: dict[bytes, ReceiverSession] = field(default_factory=dict)
    endings: list[object] = field(default_factory=list)
    max_held_bytes: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        await self.control.subscribe(open_subject(TENANT), self._on_open, queue=WORKER_QUEUE)

    async def close(self) -> None:
        """End everything at once, as a kill would: nobody is told."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _on_open(self, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(message))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        try:
            open_, token_ids, session_id = parse_open(message.data)
        except FrameError:
            return
        if session_id in self.sessions:
            with contextlib.suppress(TransportError):
                await self.control.publish(message.reply, self.sessions[session_id].accept_frame())
            return
        receiver = ReceiverSession(
            open_,
            make_accept(
                worker=self.worker,
                window_bytes=max(self.window_bytes, open_.max_chunk_bytes),
                segment_bytes=self.segment_bytes,
            ),
            session=session_id,
            now=loop.time(),
            max_payload=self.data.max_payload,
            peer_timeout_s=self.peer_timeout_s,
        )
        self.sessions[session_id] = receiver
        work = _Work(self, receiver, open_, token_ids)
        unwatch = [self.data.watch(work.changed), self.control.watch(work.changed)]
        subscriptions: list[Subscription] = []
        try:
            for transport, subject in (
                (self.data, data_subject(TENANT, self.worker, session_id)),
                (self.control, control_subject(TENANT, self.worker, session_id)),
            ):
                subscriptions.append(await transport.subscribe(subject, work.take))
            await self.control.publish(message.reply, receiver.accept_frame())
            await work.run()
        except TransportError as error:
            # The agent's request times out.
            self.endings.append(error)
        finally:
            del self.sessions[session_id]
            for end in unwatch:
                end()
            for subscription in subscriptions:
                with contextlib.suppress(TransportError):
                    await subscription.unsubscribe()


class _Work:
    def __init__(
        self, shell: WorkerShell, receiver: ReceiverSession, open_: Open, token_ids: Sequence[int]
    ) -> None:
        self.shell = shell
        self.receiver = receiver
        self.open_ = open_
        self.token_ids = token_ids
        self.wake = asyncio.Event()
        self.chunks: dict[int, bytes] = {}
        self.waiting: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self.asked: Asked | None = None
        self.is_answered = False

    def take(self, message: Message) -> None:
        with contextlib.suppress(FrameError):
            self.receiver.receive(message.data, now=asyncio.get_running_loop().time())
        shell = self.shell
        shell.max_held_bytes = max(shell.max_held_bytes, self.receiver.held_bytes)
        self.wake.set()

    def changed(self, _change: ConnectionChange) -> None:
        is_up = self.shell.data.is_connected and self.shell.control.is_connected
        self.receiver.on_connection(is_up=is_up, now=asyncio.get_running_loop().time())
        self.wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        receiver = self.receiver
        try:
            while True:
                self.wake.clear()
                receiver.handle_timer(now=loop.time())
                while (event := receiver.next_event()) is not None:
                    self._on_event(event)
                self._answer()
                for outgoing in receiver.frames_to_send(now=loop.time()):
                    with contextlib.suppress(TransportError):
                        subject = reply_subject(self.open_.inbox, receiver.session)
                        await self.shell.control.publish(subject, outgoing.data)
                if receiver.is_closed(now=loop.time()):
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(receiver.next_timer()):
                        await self.wake.wait()
        finally:
            for handle in self.waiting.values():
                handle.cancel()

    def _on_event(self, event: object) -> None:
        loop = asyncio.get_running_loop()
        match event:
            case ChunkComplete():
                if self.shell.decode_s:
                    handle = loop.call_later(self.shell.decode_s, self._decoded, event)
                    self.waiting[event.chunk, event.epoch] = handle
                else:
                    self._decoded(event)
            case Recompute():
                self._ready(event.chunk, event.epoch, self.shell.texts[event.chunk])
            case Abort():
                key = event.chunk, event.epoch
                if key in self.waiting:
                    self.waiting.pop(key).cancel()
                    self.receiver.consumed(event.chunk, epoch=event.epoch, now=loop.time())
            case Asked():
                self.asked = event
            case Cancel() | PeerLost() | Failed():
                self.shell.endings.append(event)

    def _decoded(self, event: ChunkComplete) -> None:
        self.waiting.pop((event.chunk, event.epoch), None)
        now = asyncio.get_running_loop().time()
        assert event.level == f"level:{event.chunk}"
        self.receiver.consumed(event.chunk, epoch=event.epoch, now=now)
        if not self.receiver.is_over:
            self._ready(event.chunk, event.epoch, event.payload)

    def _ready(self, chunk: int, epoch: int, payload: bytes) -> None:
        # A chunk that is in the cache is never written again.
        if chunk not in self.chunks:
            self.chunks[chunk] = payload
            ready = ChunkReady(chunk, 0, epoch, "any", 0.0, 0.0, 0.0)
            self.receiver.chunk_ready(ready, now=asyncio.get_running_loop().time())
        self.wake.set()

    def _answer(self) -> None:
        receiver, asked = self.receiver, self.asked
        is_complete = len(self.chunks) == len(self.open_.chunks)
        if asked is None or not is_complete or self.is_answered or receiver.is_over:
            return
        self.is_answered = True
        now = asyncio.get_running_loop().time()
        payloads = [self.chunks[index] for index in range(len(self.chunks))]
        tokens = expected_answer(
            payloads, self.token_ids, asked.token_ids, num_tokens=asked.ask.max_tokens
        )
        for index, token_id in enumerate(tokens):
            receiver.send_token(Token(index, token_id, 0.0), now=now)
        receiver.answered(Answered("length", 0.0, 0.0), now=now)
        receiver.finish(Done(), now=now)
