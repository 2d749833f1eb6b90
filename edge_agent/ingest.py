"""Ingest: a text becomes a stored context.

Tokenize, prefill on the edge's own engine, cut the KV cache into chunks, encode each chunk at every
level, store. All heavy steps run in threads, one prefill at a time; encoding chunk i overlaps the
prefill of chunk i+1, and at most one chunk waits in memory. Invariant: nothing is visible until the
whole context is stored; a cancelled or failed ingest leaves nothing. Must not know: HTTP, wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from codec import Codec
from edge_agent.errors import BadRequest, TooLong
from edge_agent.keys import (
    ChunkSpan,
    chunk_spans,
    derive_context_id,
    profile_set_digest,
    text_digest,
)
from edge_agent.store import ContextStore, Ingest, StoredContext
from edge_agent.threads import run_in
from engine import KvCache, TorchEngine
from engine.prompt import context_token_ids
from telemetry import MetricSet, level_label, names

PREFILL_SLICE_TOKENS = 512
"""Tokens per prefill step: large enough for full speed, small enough to cancel within a second or two."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage of an ingest is."""

    stage: str
    """tokenize, prefill, encode or store."""
    done: int
    """Tokens, or chunk files, that are finished."""
    total: int
    """Of this many; in the same unit."""


@dataclass(frozen=True, slots=True)
class IngestResult:
    """What an ingest left in the store."""

    context: StoredContext
    bytes_by_level: dict[str, int]
    """Stored bytes per level."""
    prefilled_tokens: int
    """Tokens that had to be computed; 0 where every chunk was there already."""
    duration_s: float
    """Wall time of the whole ingest. Unit: seconds."""


class Ingestor:
    """Turns texts into stored contexts with one engine and one codec."""

    def __init__(
        self,
        *,
        engine: TorchEngine,
        codec: Codec,
        store: ContextStore,
        metrics: MetricSet,
        tenant: str,
        levels: Sequence[str],
        chunk_tokens: int,
        compute: Executor,
        disk: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build an ingestor.

        Args:
            engine: the edge's own model.
            codec: for this model.
            store: where contexts go.
            metrics: the agent's metrics.
            tenant: owner of all contexts.
            levels: level names or NAME:* patterns used when a request names none.
            chunk_tokens: tokens per chunk.
            compute: one thread for prefill.
            disk: threads for encoding, hashing and files.
            clock: monotonic seconds.

        Raises:
            BadRequest: a level that the codec cannot encode.
        """
        self._engine = engine
        self._codec = codec
        self._store = store
        self._metrics = metrics
        self._tenant = tenant
        self._chunk_tokens = chunk_tokens
        self._compute = compute
        self._disk = disk
        self._clock = clock
        self._levels = self.expand_levels(levels)
        self.model_digest: bytes = engine.identity.digest
        self.profile_digest = profile_set_digest(profile.digest for profile in codec.profiles)
        # One prefill at a time: two would share the cores and double the memory of the KV caches.
        self._one_at_a_time = asyncio.Lock()

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels that are encoded when a request names none."""
        return self._levels

    def expand_levels(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Resolve level names and patterns against what the codec can encode.

        NAME:* stands for all levels of a set, NAME:*>* for all its refinements.

        Raises:
            BadRequest: a name that the codec does not have, or nothing is left.
        """
        known = [info.name for info in self._codec.levels()]
        finer = [info.name for info in self._codec.refinements()]
        chosen: list[str] = []
        for pattern in patterns:
            if pattern.endswith(":*>*"):
                chosen += [name for name in finer if name.startswith(pattern[:-3])]
            elif pattern.endswith(":*"):
                # A level set without a profile for this model matches nothing, which is no error:
                # the default names all level sets.
                chosen += [name for name in known if name.startswith(pattern[:-1])]
            elif pattern in known or pattern in finer:
                chosen.append(pattern)
            else:
                raise BadRequest(
                    f"level {pattern!r} is not available for this model; there are {', '.join(known)}"
                )
        if not chosen:
            raise BadRequest(
                f"levels {', '.join(patterns)!r} match none of {', '.join(known)} for this model"
            )
        return tuple(dict.fromkeys(chosen))

    async def ingest(
        self,
        text: str,
        *,
        context_id: str | None,
        levels: Sequence[str] | None,
        on_progress: Callable[[Progress], None],
    ) -> IngestResult:
        """Store one context.

        Args:
            text: the context, not empty.
            context_id: name for it; None derives one from the content.
            levels: level names or patterns; None takes the configured ones.
            on_progress: called on the event loop after each step.

        Returns:
            What was stored.

        Raises:
            BadRequest, TooLong, ContextConflict, StoreFull, StoreIOError: nothing was stored.
        """
        started = self._clock()
        wanted = self._levels if levels is None else self.expand_levels(levels)
        if not text.strip():
            raise BadRequest("text is empty, there is nothing to ingest")
        on_progress(Progress("tokenize", 0, 1))
        token_ids = await run_in(self._disk, context_token_ids, self._engine.tokenizer, text)
        limit = self._engine.geometry.context_tokens - 1
        if len(token_ids) > limit:
            raise TooLong.of(num_tokens=len(token_ids), limit_tokens=limit, what="the context")
        self._observe("tokenize", self._clock() - started)
        context = StoredContext(
            context_id=context_id
            or derive_context_id(
                tenant=self._tenant, model_digest=self.model_digest, token_ids=token_ids
            ),
            tenant=self._tenant,
            model_digest=self.model_digest,
            profile_digest=self.profile_digest,
            text_digest=text_digest(text),
            text_chars=len(text),
            token_ids=tuple(token_ids),
            spans=chunk_spans(
                token_ids,
                chunk_tokens=self._chunk_tokens,
                model_digest=self.model_digest,
                profile_digest=self.profile_digest,
                tenant=self._tenant,
            ),
            created_at=0.0,
        )
        await run_in(self._disk, self._store.check_free, context)
        # Said only now: whoever reports errors by a status can wait for it (http.py does).
        on_progress(Progress("tokenize", 1, 1))
        async with self._one_at_a_time:
            job = self._store.begin_ingest()
            try:
                num_computed = await self._fill(context, wanted, job, on_progress)
                await run_in(self._disk, job.commit, context)
            finally:
                # Shielded by run_in: by now no thread touches the job any more.
                await run_in(self._disk, job.close)
        info = await run_in(self._disk, self._store.describe, context.context_id)
        return IngestResult(
            context=context,
            bytes_by_level=info.bytes_by_level,
            prefilled_tokens=num_computed,
            duration_s=self._clock() - started,
        )

    async def _fill(
        self,
        context: StoredContext,
        levels: Sequence[str],
        job: Ingest,
        on_progress: Callable[[Progress], None],
    ) -> int:
        missing: list[list[str]] = [
            await run_in(self._disk, job.missing_levels, span.key, levels) for span in context.spans
        ]
        # Only the tokens up to the last chunk that lacks a level need to be computed.
        last = max((index for index, names_ in enumerate(missing) if names_), default=-1)
        if last < 0:
            return 0
        num_tokens = context.spans[last].token_stop
        counts = _Counts(on_progress, num_tokens, sum(len(names_) for names_ in missing))
        cache = await run_in(self._compute, self._engine.new_cache, num_tokens)
        encoding: asyncio.Task[None] | None = None
        try:
            for span, names_ in zip(context.spans[: last + 1], missing, strict=False):
                await self._prefill(cache, context.token_ids, span, counts)
                if encoding is not None:
                    await encoding
                    encoding = None
                if names_:
                    kv = await run_in(self._compute, cache.read, span.token_start, span.token_stop)
                    encoding = asyncio.create_task(
                        self._encode(kv, span, names_, context.token_ids, job, counts)
                    )
            if encoding is not None:
                await encoding
        finally:
            if encoding is not None and not encoding.done():
                encoding.cancel()
                await asyncio.gather(encoding, return_exceptions=True)
        return num_tokens

    async def _prefill(
        self, cache: KvCache, token_ids: tuple[int, ...], span: ChunkSpan, counts: _Counts
    ) -> None:
        started = self._clock()
        for start in range(span.token_start, span.token_stop, PREFILL_SLICE_TOKENS):
            stop = min(start + PREFILL_SLICE_TOKENS, span.token_stop)
            ids = list(token_ids[start:stop])
            await run_in(self._compute, self._engine.fill, cache, ids, start)
            counts.prefilled(stop)
        self._observe("prefill", self._clock() - started)

    async def _encode(
        self,
        kv: npt.NDArray[np.float16] | npt.NDArray[np.float32],
        span: ChunkSpan,
        levels: Sequence[str],
        token_ids: tuple[int, ...],
        job: Ingest,
        counts: _Counts,
    ) -> None:
        layer0: npt.NDArray[np.float32] | None = None
        if any(level.startswith("klt:") for level in levels):
            ids = list(token_ids[span.token_start : span.token_stop])
            layer0 = await run_in(self._disk, self._engine.layer0_kv, ids)
        # Levels of one set share most of the work: they are encoded together.
        for together in _by_level_set(levels):
            started = self._clock()
            payloads = await run_in(
                self._disk,
                partial(
                    self._codec.encode_many,
                    kv,
                    levels=together,
                    token_start=span.token_start,
                    layer0=layer0 if together[0].startswith("klt:") else None,
                ),
            )
            seconds = (self._clock() - started) / len(together)
            for level, payload in zip(together, payloads, strict=True):
                self._metrics.observe(names.EDGE_ENCODE_SECONDS, seconds, level_label(level))
                counts.encoded()
                encoded = self._clock()
                await run_in(self._disk, job.put, span.key, level, payload)
                self._observe("store", self._clock() - encoded)
                counts.stored()

    def _observe(self, stage: str, seconds: float) -> None:
        self._metrics.observe(names.EDGE_INGEST_SECONDS, seconds, stage)


def _by_level_set(levels: Sequence[str]) -> list[list[str]]:
    """Group level names by their set, in the order of each set's first."""
    groups: dict[str, list[str]] = {}
    for level in levels:
        groups.setdefault(level.partition(":")[0], []).append(level)
    return list(groups.values())


class _Counts:
    """Adds steps up into progress reports."""

    def __init__(self, report: Callable[[Progress], None], tokens: int, files: int) -> None:
        self._report = report
        self._tokens = tokens
        self._files = files
        self._encoded = 0
        self._stored = 0

    def prefilled(self, num_tokens: int) -> None:
        self._report(Progress("prefill", num_tokens, self._tokens))

    def encoded(self) -> None:
        self._encoded += 1
        self._report(Progress("encode", self._encoded, self._files))

    def stored(self) -> None:
        self._stored += 1
        self._report(Progress("store", self._stored, self._files))
