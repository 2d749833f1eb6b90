"""From a chat request to an answer: which context, which tokens, which limits, then the transfer.

Invariant: a context that a running answer needs is pinned in the store from before its first chunk
is planned until the answer ends, however it ends. Must not know: aiohttp, NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from edge_agent.answer_text import AnswerText
from edge_agent.api import ChatRequest
from edge_agent.config import EdgeConfig
from edge_agent.errors import AgentError, BadRequest, ModelMismatch, TooLong, UnknownContext
from edge_agent.model import EdgeModel
from edge_agent.store import ContextStore, StoredContext, is_prefix_text
from edge_agent.threads import run_in
from edge_agent.timeline import Timeline
from engine import TokenizerError
from engine.prompt import Message, plain_prompt, question_token_ids, strip_context
from planner import default_estimator


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Everything that a transfer needs to know; text is tokens by now."""

    session: str
    """32 hex digits, fresh for each request."""
    context: StoredContext | None
    """What is asked about; None for a plain chat."""
    question_ids: tuple[int, ...]
    """Tokens behind the context, at least one."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    policy: str
    estimator: str
    deadline_s: float
    """Time to first token aimed at, from arrival on. Unit: seconds."""
    evaluate: bool
    arrived_at: float
    """Monotonic. Unit: seconds."""
    give_up_at: float
    """Monotonic time at which the request fails. Unit: seconds."""
    strict: bool = False
    """Refuse at once when the deadline cannot be met."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended."""

    finish_reason: str
    """stop or length."""
    timeline: Timeline


class Transfer(Protocol):
    """Runs answers over the transport."""

    @property
    def is_connected(self) -> bool:
        """Whether the broker can be reached now."""

    def set_model(self, model: EdgeModel) -> None:
        """Learn the model, once it is loaded; no answer is asked for before."""

    async def answer(self, request: AnswerRequest, on_token: Callable[[int], bool]) -> AnswerEnd:
        """Get the KV cache to a worker and its tokens back; cancelling frees the worker.

        ``on_token`` returns whether more tokens are wanted; the first False ends the answer.
        """


class Answer:
    """A running answer, read piece by piece."""

    def __init__(
        self,
        request: AnswerRequest,
        text: AnswerText,
        transfer: Transfer,
        *,
        trace: bool,
    ) -> None:
        self.request_id = "chatcmpl-" + request.session
        self.context_tokens = 0 if request.context is None else request.context.num_tokens
        self.prompt_tokens = self.context_tokens + len(request.question_ids)
        self.finish_reason = "stop"
        self._request = request
        self._text = text
        self._transfer = transfer
        self._trace = trace
        self._end: AnswerEnd | None = None
        self._failure: AgentError | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.text

    @property
    def completion_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def end(self) -> AnswerEnd | None:
        """How it ended; None while it runs."""
        return self._end

    @property
    def failure(self) -> AgentError | None:
        """Why the transfer failed; None while it runs, after a good end and after a cancel."""
        return self._failure

    def report_json(self) -> dict[str, Any]:
        """Return the ``kvtide`` object; empty before the answer has ended."""
        return {} if self._end is None else self._end.timeline.to_json(trace=self._trace)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Run the transfer and yield, for each token, the text that is certain by then.

        A piece may be empty: the first one still says that the first token is there.

        Raises:
            AgentError: the transfer failed.
        """
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def take(token_id: int) -> bool:
            pieces.put_nowait(self._text.push(token_id))
            # An evaluation compares whole answers, so it wants the tokens behind a stop string too.
            return self._request.evaluate or not self._text.is_stopped

        task = asyncio.create_task(self._transfer.answer(self._request, take))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            try:
                self._end = await task
            except AgentError as error:
                self._failure = error
                raise
            if rest := self._text.finish():
                yield rest
            self.finish_reason = "stop" if self._text.is_stopped else self._end.finish_reason
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class ChatService:
    """Turns chat requests into answers."""

    def __init__(
        self,
        *,
        config: EdgeConfig,
        model: EdgeModel,
        profile_digest: bytes,
        store: ContextStore,
        transfer: Transfer,
        disk: Executor,
    ) -> None:
        self._config = config
        self._model = model
        self._profile_digest = profile_digest
        self._store = store
        self._transfer = transfer
        self._disk = disk

    @contextlib.asynccontextmanager
    async def open(self, chat: ChatRequest, *, arrived_at: float) -> AsyncIterator[Answer]:
        """Prepare an answer; its context stays pinned until the block ends.

        Raises:
            UnknownContext, BadRequest, TooLong, ModelMismatch: before anything is sent.
        """
        if chat.model not in (None, "", self._config.model):
            raise ModelMismatch(
                f"this edge serves model {self._config.model!r}, not {chat.model!r}"
            )
        pins = ExitStack()
        try:
            context, messages = await run_in(self._disk, self._pin_context, chat, pins)
            question_ids = await run_in(self._disk, self._tokenize, messages, context)
            request = self._request(chat, context, question_ids, arrived_at)
            text = AnswerText(self._model.engine.tokenizer.decode, chat.stop)
            yield Answer(request, text, self._transfer, trace=chat.trace)
        finally:
            await run_in(self._disk, pins.close)

    def _pin_context(
        self, chat: ChatRequest, pins: ExitStack
    ) -> tuple[StoredContext | None, list[Message]]:
        messages = list(chat.messages)
        digest = self._model.engine.identity.digest
        if chat.context_id is not None:
            context = pins.enter_context(self._store.use(chat.context_id))
            self._check_identity(context)
            # A client may send the context along with its id; it is not to be asked about twice.
            if is_prefix_text(context, messages[0].content):
                messages = strip_context(messages, context.text_chars)
            return context, messages
        found = self._store.find_by_text(
            messages[0].content, tenant=self._config.tenant, model_digest=digest
        )
        if found is None:
            return None, messages
        try:
            context = pins.enter_context(self._store.use(found.context_id))
        except UnknownContext:
            # Evicted since it was found; the client named no context, so it is a plain chat.
            return None, messages
        self._check_identity(context)
        return context, strip_context(messages, context.text_chars)

    def _check_identity(self, context: StoredContext) -> None:
        digest = self._model.engine.identity.digest
        if context.model_digest != digest:
            raise ModelMismatch(
                f"context {context.context_id!r} was ingested with model identity"
                f" {context.model_digest.hex()}, this edge runs {digest.hex()}: ingest it again"
            )
        if context.profile_digest != self._profile_digest:
            raise ModelMismatch(
                f"context {context.context_id!r} was encoded with codec profiles"
                f" {context.profile_digest.hex()}, this edge has {self._profile_digest.hex()}:"
                " ingest it again"
            )

    def _tokenize(self, messages: list[Message], context: StoredContext | None) -> tuple[int, ...]:
        if not messages:
            raise BadRequest(
                "messages holds nothing but the context, so there is nothing to answer"
            )
        form = plain_prompt if context is None else question_token_ids
        try:
            return tuple(form(self._model.engine.tokenizer, messages))
        except TokenizerError as error:
            raise BadRequest(str(error)) from error

    def _request(
        self,
        chat: ChatRequest,
        context: StoredContext | None,
        question_ids: tuple[int, ...],
        arrived_at: float,
    ) -> AnswerRequest:
        limit = self._model.engine.geometry.context_tokens
        prompt_tokens = len(question_ids) + (0 if context is None else context.num_tokens)
        if prompt_tokens >= limit:
            raise TooLong.of(
                num_tokens=prompt_tokens,
                limit_tokens=limit - 1,
                what="the prompt (context and question)",
            )
        max_tokens = chat.max_tokens or self._config.default_max_tokens
        policy = chat.policy or self._config.policy
        return AnswerRequest(
            session=secrets.token_hex(16),
            context=context,
            question_ids=question_ids,
            max_tokens=min(max_tokens, limit - prompt_tokens),
            temperature=chat.temperature,
            top_p=chat.top_p,
            seed=chat.seed,
            policy=policy,
            estimator=chat.estimator or self._config.estimator or default_estimator(policy),
            deadline_s=chat.deadline_s or self._config.deadline_s,
            strict=chat.strict,
            evaluate=chat.evaluate,
            arrived_at=arrived_at,
            give_up_at=arrived_at + self._config.request_timeout_s,
        )
