"""Chunk keys: what makes two chunks the same chunk.

A key covers everything that changes a KV value: the key format, the model identity, the profile
set, the tenant and *all* token ids from position 0 to the chunk's end. The agent derives keys when
it stores a chunk, the worker derives them again from the token ids that it was sent; both call this
module, so they cannot drift apart. Invariant: equal inputs give equal keys in every process and on
every machine (no ``hash()``, no seed, no salt from a client).
Must not know: torch, files, wire.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3

KEY_FORMAT_VERSION = 1
"""Raised with every change of what a key covers; stored chunks of older versions are not found."""

_KEY_CONTEXT = "kvtide 2026-11 chunk key v1"
_PROFILE_SET_CONTEXT = "kvtide 2026-11 profile set v1"


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


def derive_chunk_keys(
    token_ids: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    *,
    model_digest: bytes,
    profile_digest: bytes,
    tenant: str,
) -> tuple[bytes, ...]:
    """Key each token range by the whole chain of tokens up to its end.

    Args:
        token_ids: all token ids of the context from position 0, each in [0, 2**32).
        ranges: (token_start, token_stop) of each chunk, stops rising and within the tokens.
        model_digest: identity of the model, 32 bytes.
        profile_digest: from ``profile_set_digest``, 32 bytes.
        tenant: two tenants never share a key.

    Returns:
        32 bytes per range, in order.

    Raises:
        ValueError: a range that is empty, outside the tokens or not behind the one before it.
    """
    chain = blake3(derive_key_context=_KEY_CONTEXT)
    chain.update(struct.pack("<I", KEY_FORMAT_VERSION))
    for part in (model_digest, profile_digest, tenant.encode()):
        chain.update(_framed(part))
    ids = np.asarray(token_ids, dtype="<u4")
    keys: list[bytes] = []
    hashed = 0
    for token_start, token_stop in ranges:
        if not 0 <= token_start < token_stop <= len(ids) or token_stop <= hashed:
            raise ValueError(
                f"chunk of tokens {token_start} to {token_stop} does not follow token {hashed} "
                f"of {len(ids)}"
            )
        chain.update(ids[hashed:token_stop].tobytes())
        hashed = token_stop
        # The range closes the hash, so that a chunk with another start but the same end differs.
        tail = chain.copy()
        tail.update(struct.pack("<II", token_start, token_stop))
        keys.append(tail.digest())
    return tuple(keys)


def _framed(part: bytes) -> bytes:
    """Prefix a field with its length, so that no two field lists hash alike."""
    return struct.pack("<Q", len(part)) + part
