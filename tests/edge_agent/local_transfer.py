"""Answers without any transport: the reference that every real answer is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edge_agent.chat import AnswerEnd, AnswerRequest
from edge_agent.errors import AgentError
from edge_agent.model import EdgeModel
from edge_agent.timeline import ChunkRecord, Timeline
from engine import Sampling


class LocalTransfer:
    """Prefills and generates on the edge's own engine."""

    is_connected = True

    def __init__(self) -> None:
        self.model: EdgeModel | None = None
        self.error: AgentError | None = None
        self.error_after_tokens = 0
        self.hold: asyncio.Event | None = None
        self.num_cancelled = 0

    def set_model(self, model: EdgeModel) -> None:
        self.model = model

    async def answer(self, request: AnswerRequest, on_token: Callable[[int], bool]) -> AnswerEnd:
        try:
            return await self._answer(request, on_token)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _answer(self, request: AnswerRequest, on_token: Callable[[int], bool]) -> AnswerEnd:
        assert self.model is not None
        engine = self.model.engine
        timeline = Timeline(
            arrived_at=request.arrived_at,
            session=request.session,
            policy=request.policy,
            estimator=request.estimator,
            deadline_s=request.deadline_s,
        )
        context = request.context
        for index, span in enumerate(context.spans if context else ()):
            timeline.chunks.append(
                ChunkRecord(index, span.token_start, span.token_stop, choice="text")
            )
        ids = [*(context.token_ids if context else ()), *request.question_ids]
        cache = engine.new_cache(min(len(ids) + request.max_tokens, engine.geometry.context_tokens))
        logits = engine.prefill(cache, ids)
        sampling = Sampling(request.temperature, request.top_p, request.seed)
        num_tokens = 0
        if self.error is not None and self.error_after_tokens == 0:
            raise self.error
        for token_id in engine.generate(cache, logits, len(ids), sampling, request.max_tokens):
            timeline.token(request.arrived_at + 0.5)
            num_tokens += 1
            if not on_token(token_id):
                break
            await asyncio.sleep(0)
            if self.error is not None and num_tokens == self.error_after_tokens:
                raise self.error
            if self.hold is not None:
                await self.hold.wait()
        reason = "length" if num_tokens == request.max_tokens else "stop"
        return AnswerEnd(reason, timeline)
