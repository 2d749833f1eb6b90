"""Shadow evaluation: how far was the answer's KV cache from the exact one?

After an answer is sent, the same context is prefilled exactly, the exact greedy answer is generated,
and both caches are read along that answer (teacher-forced). Runs on the compute thread in steps, so
other sessions go on. Exact caches are kept by context key, within a byte bound, least recently used
first out.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cloud_worker.errors import NoMemory
from cloud_worker.executors import BACKGROUND_S, Executors, Timed
from engine import KvCache, Sampling, TorchEngine

F32Array = NDArray[np.float32]
T = TypeVar("T")

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Exact against lossy, along the exact greedy answer."""

    kl: float
    """Mean KL(exact || lossy) of the next-token distributions, nats, one per answer token."""
    top1: float
    """Share of those tokens whose likeliest successor is the same, 0 to 1."""
    greedy_match: float
    """Share of the exact greedy answer's tokens, from its beginning, that the lossy cache gives too;
    1 only if the answers are the same, end included."""
    exact_token_ids: tuple[int, ...]
    """The exact greedy answer."""
    num_tokens: int
    """Distributions compared: one per token of the exact answer, at least one."""


class ExactCaches:
    """Exact KV caches by context key, within a byte bound."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._caches: OrderedDict[bytes, KvCache] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches kept."""
        return sum(cache.num_bytes for cache in self._caches.values())

    def get(self, key: bytes, *, capacity_tokens: int) -> KvCache | None:
        """Return the cache of a context when it has at least this much room."""
        cache = self._caches.get(key)
        if cache is None or cache.capacity_tokens < capacity_tokens:
            return None
        self._caches.move_to_end(key)
        return cache

    def make_room(self, num_bytes: int) -> None:
        """Drop the least recently used caches until this many bytes fit.

        Raises:
            NoMemory: they never will.
        """
        if num_bytes > self.max_bytes:
            raise NoMemory(
                needed_bytes=num_bytes, free_bytes=self.max_bytes, total_bytes=self.max_bytes
            )
        while self._caches and self.num_bytes + num_bytes > self.max_bytes:
            self._caches.popitem(last=False)

    def put(self, key: bytes, cache: KvCache) -> None:
        """Keep a cache, in place of an older one of the same context."""
        self._caches.pop(key, None)
        self.make_room(cache.num_bytes)
        self._caches[key] = cache


class Evaluator:
    """Runs evaluations on the compute thread, one after the other."""

    def __init__(
        self, *, engine: TorchEngine, executors: Executors, caches: ExactCaches, step_tokens: int
    ) -> None:
        self._engine = engine
        self._executors = executors
        self._caches = caches
        self._step_tokens = step_tokens
        # The room behind the context in an exact cache is scratch space of the evaluation that runs.
        self._turn = asyncio.Lock()

    async def evaluate(
        self,
        lossy: KvCache,
        *,
        context_key: bytes,
        context_ids: tuple[int, ...],
        question_ids: tuple[int, ...],
        max_tokens: int,
        greedy_answer: tuple[int, ...] | None,
    ) -> Evaluation:
        """Compare a session's cache with the exact one.

        Args:
            lossy: the session's cache; what follows the context in it is overwritten.
            context_key: names the context and everything that its KV depends on.
            context_ids: the context's tokens.
            question_ids: the question's tokens, at least 1.
            max_tokens: most tokens of the answer; the cache has room for them.
            greedy_answer: the session's answer if it was greedy, else None: it is generated again.

        Raises:
            NoMemory: the exact cache is larger than the bound.
        """
        async with self._turn:
            exact = await self._exact_cache(
                context_key, context_ids, capacity_tokens=lossy.capacity_tokens
            )
            exact_answer = await self._greedy(exact, len(context_ids), question_ids, max_tokens)
            if greedy_answer is None:
                greedy_answer = await self._greedy(
                    lossy, len(context_ids), question_ids, max_tokens
                )
            # The distribution behind the question, and the one behind each answer token but the last.
            forced = question_ids + exact_answer[:-1]
            num_rows = max(1, len(exact_answer))
            exact_logits = await self._logits(exact, forced, len(context_ids), num_rows)
            lossy_logits = await self._logits(lossy, forced, len(context_ids), num_rows)
            kl, top1 = compare_distributions(exact_logits, lossy_logits)
            return Evaluation(
                kl=kl,
                top1=top1,
                greedy_match=matching_share(exact_answer, greedy_answer),
                exact_token_ids=exact_answer,
                num_tokens=num_rows,
            )

    async def _compute(self, step: Callable[[], T]) -> Timed[T]:
        return await self._executors.compute(step, deadline_s=BACKGROUND_S)

    async def _exact_cache(
        self, key: bytes, token_ids: tuple[int, ...], *, capacity_tokens: int
    ) -> KvCache:
        cache = self._caches.get(key, capacity_tokens=capacity_tokens)
        if cache is not None:
            return cache
        geometry = self._engine.geometry
        element_bytes = self._engine.dtype.itemsize
        self._caches.make_room(geometry.num_bytes_per_token(element_bytes) * capacity_tokens)
        new = (await self._compute(lambda: self._engine.new_cache(capacity_tokens))).value
        for start in range(0, len(token_ids), self._step_tokens):
            ids = token_ids[start : start + self._step_tokens]
            await self._compute(functools.partial(self._engine.fill, new, ids, start))
        self._caches.put(key, new)
        return new

    async def _greedy(
        self, cache: KvCache, start: int, question_ids: tuple[int, ...], max_tokens: int
    ) -> tuple[int, ...]:
        logits = (
            await self._compute(lambda: self._engine.prefill(cache, question_ids, start))
        ).value
        tokens = self._engine.generate(cache, logits, start + len(question_ids), GREEDY, max_tokens)
        answer: list[int] = []
        while True:
            token_id = (await self._compute(lambda: next(tokens, None))).value
            if token_id is None:
                return tuple(answer)
            answer.append(token_id)

    async def _logits(
        self, cache: KvCache, token_ids: tuple[int, ...], start: int, num_rows: int
    ) -> F32Array:
        """Return the logits after each of the last ``num_rows`` tokens, float32 [row, vocab]."""
        # All rows of a long question would be a vocabulary wide each: only the last ones are kept.
        head, tail = token_ids[:-num_rows], token_ids[-num_rows:]
        if head:
            await self._compute(lambda: self._engine.fill(cache, head, start))
        return (
            await self._compute(lambda: self._engine.prefill_logits(cache, tail, start + len(head)))
        ).value


def matching_share(exact: tuple[int, ...], lossy: tuple[int, ...]) -> float:
    """Return which share of ``exact`` agrees with ``lossy`` from the beginning, 0 to 1.

    An end of the answer counts as one more token, so that an answer that goes on where the exact
    one ends is no full match.
    """
    if exact == lossy:
        return 1.0
    pairs = zip(exact, lossy, strict=False)
    agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return agreed / (len(exact) + 1)


def compare_distributions(exact_logits: F32Array, lossy_logits: F32Array) -> tuple[float, float]:
    """Compare next-token distributions row by row.

    Args:
        exact_logits: float32 [row, vocab], at least one row.
        lossy_logits: same shape.

    Returns:
        kl: mean KL(exact || lossy) in nats, not negative.
        top1: share of rows with the same likeliest token, 0 to 1.

    Source: evaluation.md; docs/glossary.md, "KL".
    """
    kls = []
    for exact, lossy in zip(exact_logits, lossy_logits, strict=True):
        log_p = _log_softmax(exact)
        log_q = _log_softmax(lossy)
        # Rounding can leave a tiny negative where the two are equal.
        kls.append(max(0.0, float(np.sum(np.exp(log_p) * (log_p - log_q)))))
    same = exact_logits.argmax(axis=1) == lossy_logits.argmax(axis=1)
    return float(np.mean(kls)), float(np.mean(same))


def _log_softmax(logits: F32Array) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return result
