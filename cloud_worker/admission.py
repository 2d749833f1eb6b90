"""Whether a session is taken: identity first, then shape, then memory.

Pure. Invariant: nothing of a context is received before model identity, profiles and every chunk key
have been found equal, and before the memory that the session can need is known and bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from cloud_worker.budget import SessionNeed
from codec import Codec, Geometry, max_encoded_bytes
from codec.geometry import MAX_CHUNK_TOKENS
from engine.chunk_keys import derive_chunk_keys
from wire import Open, Refuse, RefuseCode

CHUNKS_IN_WINDOW = 2
"""Whole chunks that fit the window: one is decoded while the next one arrives."""

BASE_SHARE = 8
"""The cache's size over that of the bitstreams that are kept to be refined: two bits per number."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What this worker is, and the most that it gives one session."""

    tenant: str
    model_name: str
    model_digest: bytes
    """Identity of everything that changes a KV value, 32 bytes."""
    profile_digest: bytes
    """Digest of the set of codec profiles, 32 bytes."""
    geometry: Geometry
    levels: tuple[str, ...]
    """Names of the levels that the codec reads."""
    vocab_size: int
    context_tokens: int
    """The model's window."""
    cache_bytes_per_token: int
    """KV cache memory of one token in the engine's dtype."""
    max_answer_tokens: int
    window_bytes: int
    """Smallest window granted; two chunks of the session if those are more."""

    def max_chunk_bytes(self, num_tokens: int) -> int:
        """Bound of any bitstream of that many tokens."""
        return max(max_encoded_bytes(self.geometry, num_tokens, level) for level in self.levels)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A session that may be taken if its memory is free."""

    ranges: tuple[tuple[int, int], ...]
    """(token_start, token_stop) of each chunk."""
    capacity_tokens: int
    """Tokens of context, question and answer."""
    window_bytes: int
    need: SessionNeed


def terms_of(
    codec: Codec,
    *,
    tenant: str,
    model_name: str,
    model_digest: bytes,
    profile_digest: bytes,
    vocab_size: int,
    context_tokens: int,
    element_bytes: int,
    max_answer_tokens: int,
    window_bytes: int,
) -> Terms:
    """Put together the terms of a worker.

    Args:
        codec: names the levels and the geometry.
        tenant: whose sessions are taken.
        model_name: for people.
        model_digest: identity of the model, 32 bytes.
        profile_digest: digest of the profile set, 32 bytes.
        vocab_size: token ids are below it.
        context_tokens: the model's window.
        element_bytes: bytes of one number in the KV cache.
        max_answer_tokens: most tokens of an answer.
        window_bytes: smallest window granted.
    """
    return Terms(
        tenant=tenant,
        model_name=model_name,
        model_digest=model_digest,
        profile_digest=profile_digest,
        geometry=codec.geometry,
        levels=tuple(level.name for level in codec.levels()),
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        cache_bytes_per_token=codec.geometry.elements_per_token * element_bytes,
        max_answer_tokens=max_answer_tokens,
        window_bytes=window_bytes,
    )


def examine(open_: Open, token_ids: tuple[int, ...], terms: Terms) -> SessionPlan | Refuse:
    """Check an opening; ``wire.parse_open`` has checked that its chunks tile the tokens.

    Args:
        open_: what the agent asks.
        token_ids: the context's tokens.
        terms: what this worker is.

    Returns:
        What the session needs, or why it is refused, with both sides' words where they differ.
    """
    refusal = _identity_refusal(open_, terms) or _shape_refusal(open_, token_ids, terms)
    if refusal is not None:
        return refusal
    ranges = tuple((chunk.token_start, chunk.token_stop) for chunk in open_.chunks)
    keys = derive_chunk_keys(
        token_ids,
        ranges,
        model_digest=terms.model_digest,
        profile_digest=terms.profile_digest,
        tenant=terms.tenant,
    )
    for index, (key, chunk) in enumerate(zip(keys, open_.chunks, strict=True)):
        if key != chunk.key:
            return Refuse(
                RefuseCode.KEY_MISMATCH,
                f"the key of chunk {index} does not follow from the tokens that were sent",
                expected=key.hex(),
                actual=chunk.key.hex(),
            )
    capacity_tokens = len(token_ids) + open_.question_tokens + open_.max_tokens
    largest_tokens = max(stop - start for start, stop in ranges)
    window_bytes = max(terms.window_bytes, CHUNKS_IN_WINDOW * open_.max_chunk_bytes)
    return SessionPlan(
        ranges=ranges,
        capacity_tokens=capacity_tokens,
        window_bytes=window_bytes,
        need=SessionNeed(
            cache_bytes=terms.cache_bytes_per_token * capacity_tokens,
            window_bytes=window_bytes,
            # The decoder's output, float16, before it is copied into the cache.
            chunk_bytes=2 * terms.geometry.elements_per_token * largest_tokens,
            base_bytes=terms.cache_bytes_per_token * capacity_tokens // BASE_SHARE,
        ),
    )


def _identity_refusal(open_: Open, terms: Terms) -> Refuse | None:
    if open_.tenant != terms.tenant:
        return _bad(f"this worker serves tenant {terms.tenant}, not {open_.tenant:.64}")
    if open_.model_digest != terms.model_digest:
        expected, actual = terms.model_digest.hex(), open_.model_digest.hex()
        return Refuse(
            RefuseCode.IDENTITY_MISMATCH,
            f"the worker's model {terms.model_name} is {expected}, the agent's "
            f"{open_.model_name:.64} is {actual}: their KV caches differ",
            expected=expected,
            actual=actual,
        )
    if open_.profile_digest != terms.profile_digest:
        expected, actual = terms.profile_digest.hex(), open_.profile_digest.hex()
        return Refuse(
            RefuseCode.PROFILE_MISMATCH,
            f"the worker's codec profiles are {expected}, the agent's are {actual}",
            expected=expected,
            actual=actual,
        )
    return None


def _shape_refusal(open_: Open, token_ids: tuple[int, ...], terms: Terms) -> Refuse | None:
    if not 1 <= open_.max_tokens <= terms.max_answer_tokens:
        return _bad(f"max_tokens is {open_.max_tokens}, must be 1 to {terms.max_answer_tokens}")
    if open_.question_tokens < 1:
        return _bad("question_tokens is 0, a question needs at least one token")
    total = len(token_ids) + open_.question_tokens + open_.max_tokens
    if total > terms.context_tokens:
        return Refuse(
            RefuseCode.CONTEXT_TOO_LONG,
            f"context, question and answer are {total} tokens, the model takes "
            f"{terms.context_tokens}",
            expected=str(terms.context_tokens),
            actual=str(total),
        )
    if max(token_ids) >= terms.vocab_size:
        return _bad(f"token id {max(token_ids)} is outside the vocabulary of {terms.vocab_size}")
    largest_tokens = max(chunk.token_stop - chunk.token_start for chunk in open_.chunks)
    if largest_tokens > MAX_CHUNK_TOKENS:
        return _bad(f"a chunk has {largest_tokens} tokens, more than {MAX_CHUNK_TOKENS}")
    bound = terms.max_chunk_bytes(largest_tokens)
    if open_.max_chunk_bytes > bound:
        return _bad(f"max_chunk_bytes is {open_.max_chunk_bytes}, no bitstream is over {bound}")
    return None


def _bad(sentence: str) -> Refuse:
    return Refuse(RefuseCode.BAD_REQUEST, sentence)
