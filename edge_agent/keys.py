"""Chunk keys: what makes two chunks the same chunk.

A key covers everything that changes a KV value: the key format, the model identity, the profile
set, the tenant and *all* token ids from position 0 to the chunk's end. Invariant: equal inputs give
equal keys in every process and on every machine (no ``hash()``, no seed, no salt from a client).
Must not know: files, wire, HTTP.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

KEY_FORMAT_VERSION = 1
"""Raised with every change of what a key covers; old stores then hold unreachable chunks only."""

_KEY_CONTEXT = "kvtide 2026-11 chunk key v1"
_CONTEXT_ID_CONTEXT = "kvtide 2026-11 context id v1"
_TEXT_CONTEXT = "kvtide 2026-11 context text v1"
_PROFILE_SET_CONTEXT = "kvtide 2026-11 profile set v1"


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One chunk of a context: a token range and its key."""

    token_start: int
    """First token, inclusive."""
    token_stop: int
    """Last token, exclusive."""
    key: bytes
    """32 bytes, BLAKE3."""

    @property
    def num_tokens(self) -> int:
        return self.token_stop - self.token_start


def profile_set_digest(profile_digests: Iterable[bytes]) -> bytes:
    """Name a set of codec profiles by one digest, whatever their order.

    Args:
        profile_digests: 32 bytes each.

    Returns:
        32 bytes.
    """
    hasher = blake3(derive_key_context=_PROFILE_SET_CONTEXT)
    for digest in sorted(set(profile_digests)):
        hasher.update(_framed(digest))
    return hasher.digest()


def text_digest(text: str) -> bytes:
    """Digest of a context's text, by which leading messages are recognised; 32 bytes."""
    return blake3(text.encode(), derive_key_context=_TEXT_CONTEXT).digest()


def chunk_spans(
    token_ids: Sequence[int],
    *,
    chunk_tokens: int,
    model_digest: bytes,
    profile_digest: bytes,
    tenant: str,
) -> tuple[ChunkSpan, ...]:
    """Cut a context into chunks and key each by the whole chain of tokens up to its end.

    Args:
        token_ids: all token ids of the context from position 0, each in [0, 2**32).
        chunk_tokens: tokens per chunk, at least 1; the last chunk may be shorter.
        model_digest: identity of the model, 32 bytes.
        profile_digest: from ``profile_set_digest``, 32 bytes.
        tenant: two tenants never share a key.

    Returns:
        Chunks in order, covering every token once; empty for no tokens.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, must be at least 1")
    chain = blake3(derive_key_context=_KEY_CONTEXT)
    chain.update(struct.pack("<I", KEY_FORMAT_VERSION))
    for part in (model_digest, profile_digest, tenant.encode()):
        chain.update(_framed(part))
    ids = np.asarray(token_ids, dtype="<u4")
    spans: list[ChunkSpan] = []
    for token_start in range(0, len(ids), chunk_tokens):
        token_stop = min(token_start + chunk_tokens, len(ids))
        chain.update(ids[token_start:token_stop].tobytes())
        # The range closes the hash, so that a chunk with another start but the same end differs.
        tail = chain.copy()
        tail.update(struct.pack("<II", token_start, token_stop))
        spans.append(ChunkSpan(token_start, token_stop, tail.digest()))
    return tuple(spans)


def derive_context_id(*, tenant: str, model_digest: bytes, token_ids: Sequence[int]) -> str:
    """Name a context by its content, for clients that bring no id: ``ctx-`` and 24 hex digits."""
    hasher = blake3(derive_key_context=_CONTEXT_ID_CONTEXT)
    for part in (tenant.encode(), model_digest, np.asarray(token_ids, dtype="<u4").tobytes()):
        hasher.update(_framed(part))
    return "ctx-" + hasher.hexdigest()[:24]


def _framed(part: bytes) -> bytes:
    """Prefix a field with its length, so that no two field lists hash alike."""
    return struct.pack("<Q", len(part)) + part
