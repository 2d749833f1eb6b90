"""Names of what the store holds: chunks with their keys, contexts by content, texts by digest.

The keys themselves come from ``engine.chunk_keys``, which the worker calls too; this module cuts a
context into chunks and keys each. Must not know: files, wire, HTTP.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from engine.chunk_keys import derive_chunk_keys, profile_set_digest

__all__ = ["ChunkSpan", "chunk_spans", "derive_context_id", "profile_set_digest", "text_digest"]

_CONTEXT_ID_CONTEXT = "kvtide 2026-11 context id v1"
_TEXT_CONTEXT = "kvtide 2026-11 context text v1"


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
    ranges = [
        (token_start, min(token_start + chunk_tokens, len(token_ids)))
        for token_start in range(0, len(token_ids), chunk_tokens)
    ]
    keys = derive_chunk_keys(
        token_ids,
        ranges,
        model_digest=model_digest,
        profile_digest=profile_digest,
        tenant=tenant,
    )
    return tuple(
        ChunkSpan(token_start, token_stop, key)
        for (token_start, token_stop), key in zip(ranges, keys, strict=True)
    )


def derive_context_id(*, tenant: str, model_digest: bytes, token_ids: Sequence[int]) -> str:
    """Name a context by its content, for clients that bring no id: ``ctx-`` and 24 hex digits."""
    hasher = blake3(derive_key_context=_CONTEXT_ID_CONTEXT)
    for part in (tenant.encode(), model_digest, np.asarray(token_ids, dtype="<u4").tobytes()):
        hasher.update(_framed(part))
    return "ctx-" + hasher.hexdigest()[:24]


def _framed(part: bytes) -> bytes:
    """Prefix a field with its length, so that no two field lists hash alike."""
    return struct.pack("<Q", len(part)) + part
