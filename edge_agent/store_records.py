"""What the context store knows of contexts, and what it says of itself.

Plain values. Must not know: SQL, files.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.keys import ChunkSpan, text_digest


@dataclass(frozen=True, slots=True)
class StoredContext:
    """One context as the index knows it."""

    context_id: str
    """Name that clients use."""
    tenant: str
    """Owner; part of each chunk's key."""
    model_digest: bytes
    """Identity of the model whose KV cache this is, 32 bytes."""
    profile_digest: bytes
    """Digest of the profile set that the chunks were encoded with, 32 bytes."""
    text_digest: bytes
    """Digest of the context's text, 32 bytes."""
    text_chars: int
    """Length of the context's text. Unit: characters."""
    token_ids: tuple[int, ...]
    """All tokens from position 0."""
    spans: tuple[ChunkSpan, ...]
    """Chunks in order."""
    created_at: float
    """Wall-clock time of the ingest, for display. Unit: seconds since 1970."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """What a listing shows of one context, without its tokens."""

    context_id: str
    """Name that clients use."""
    model_digest: bytes
    """Identity of the model, 32 bytes."""
    num_tokens: int
    """Tokens of the context."""
    num_chunks: int
    """Chunks that it is cut into."""
    bytes_by_level: dict[str, int]
    """Stored bytes per level; chunks shared with other contexts count in each."""
    created_at: float
    """Wall-clock time of the ingest. Unit: seconds since 1970."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What the store holds."""

    num_bytes: int
    """Bytes of chunk files."""
    num_contexts: int
    """Contexts that can be asked about."""
    num_evicted: int
    """Contexts evicted since this process opened the store."""
    num_corrupt: int
    """Chunk files dropped as unusable since this process opened the store."""


def is_prefix_text(context: StoredContext, text: str) -> bool:
    """Tell whether a text starts with the whole text of a context."""
    return (
        len(text) >= context.text_chars
        and text_digest(text[: context.text_chars]) == context.text_digest
    )


def is_same_content(left: StoredContext, right: StoredContext) -> bool:
    """Tell whether two contexts are the same text under the same model and tenant."""
    return (left.tenant, left.model_digest, left.token_ids) == (
        right.tenant,
        right.model_digest,
        right.token_ids,
    )
