"""Schemes that drop tokens, alone or under a codec: H2O-like eviction, LLMLingua-like pruning. Our implementations.

Both hand a smaller context to an inner scheme. Evicted caches keep tokens at scattered positions; a codec sees
them as neighbours, because keys are turned to consecutive positions for it and back to their own afterwards.
Positions are counted among the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.baselines.scheme import Coded, Prepared, Scheme, shifted_keys, turned_keys

__all__ = ["attention_sums", "evicted", "heavy_tokens", "pruned", "surprisal"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def evicted(inner: Scheme, keep: float, *, by_head: bool) -> Scheme:
    """Return H2O-like eviction: of the tokens kept, half are recent and half got most attention.

    Source: H2O, arXiv:2306.14048. Attention is summed over the whole prefill of the context. The first token is
    always kept: it is among the most attended anyway.

    Args:
        inner: codes what is left.
        keep: share of tokens kept.
        by_head: each layer and KV head keeps tokens of its own, as published; else all keep the same.
    """

    def run(context: Prepared) -> Coded:
        sums = context.once("attention", lambda: attention_sums(context.model, context.token_ids))
        count = max(2, round(keep * context.num_tokens))
        if by_head:
            kept = heavy_tokens(sums, count)  # [layer, head, token]
        else:
            share = heavy_tokens(sums.sum(axis=(0, 1)), count)
            kept = np.broadcast_to(share, (*sums.shape[:2], count))
        where = np.ascontiguousarray(kept.transpose(0, 2, 1))  # [layer, token, head]
        tables = context.model.rotary_tables(context.num_tokens)
        index = where[:, None, :, :, None]
        plain = np.take_along_axis(context.plain(), index, axis=2)
        neighbours = np.arange(count)
        close = plain.copy()
        close[:, 0] = turned_keys(plain[:, 0], tables, neighbours, inverse=False)
        layer0 = np.take_along_axis(context.layer0, where[:1, :, :, None], axis=1)
        left = Prepared(context.model, (), close, layer0, {"plain": plain})
        coded = inner.run(left)
        kv = coded.kv.copy()
        kv[:, 0] = turned_keys(kv[:, 0], tables, neighbours, inverse=True)
        kv[:, 0] = turned_keys(kv[:, 0], tables, where, inverse=False)
        kv[:, 0] = shifted_keys(kv[:, 0], tables, context.num_tokens - count)
        sets = sums.shape[0] * sums.shape[1] if by_head else 1
        return Coded(coded.num_bytes + -(-context.num_tokens * sets // 8), kv)

    sets = "per head" if by_head else "one set"
    return Scheme(f"H2O-like, {sets}, {keep:.0%} kept, {inner.name}", run)


def heavy_tokens(sums: F64, count: int) -> I64:
    """Return the tokens to keep, ascending: the first, the last half of `count`, the most attended of the others.

    Args:
        sums: float64 [..., token].
        count: tokens to keep, 2 or more.

    Returns:
        int64 [..., count].
    """
    num_tokens = sums.shape[-1]
    order = sums.astype(np.float64).copy()
    order[..., 0] = np.inf
    order[..., num_tokens - count // 2 :] = np.inf
    kept = np.argpartition(-order, min(count, num_tokens) - 1, axis=-1)[..., :count]
    return np.sort(kept, axis=-1)


def attention_sums(model: Any, token_ids: Any) -> F64:
    """Return float64 [layer, KV head, token]: attention that each token gets over a prefill, all queries summed."""
    geometry = model.geometry
    sums = np.zeros((geometry.num_layers, geometry.num_kv_heads, len(token_ids)))
    cache = model.new_cache(len(token_ids))
    with _eager(model.model), _watched(model.model, sums):
        model.fill(cache, token_ids, 0)
    return sums


@contextmanager
def _eager(module: Any) -> Iterator[None]:
    """Compute attention so that its weights exist."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)


@contextmanager
def _watched(module: Any, sums: F64) -> Iterator[None]:
    """Add every attention layer's weights to `sums`, and keep none of them."""

    def hook(attention: Any, arguments: Any, output: Any) -> None:
        del arguments
        got = output[1][0].sum(dim=1).double().numpy()  # [query head, token so far]
        layer = int(attention.layer_idx)
        by_kv_head = got.reshape(sums.shape[1], -1, got.shape[1]).sum(axis=1)
        sums[layer, :, : got.shape[1]] += by_kv_head[:, : sums.shape[2]]

    handles = [
        part.register_forward_hook(hook)
        for name, part in module.named_modules()
        if name.endswith("self_attn")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pruned(inner: Scheme, keep: float) -> Scheme:
    """Return LLMLingua-like pruning: tokens that the model itself finds most surprising make a shorter text.

    The shorter text gets a cache of its own. Source: LLMLingua, arXiv:2310.05736, its token-level step alone, with
    one threshold for the whole context and no model but the served one.

    Args:
        inner: codes the shorter text's cache.
        keep: share of tokens kept.
    """

    def run(context: Prepared) -> Coded:
        nats = context.once("surprisal", lambda: surprisal(context.model, context.token_ids))
        count = max(2, round(keep * context.num_tokens))
        kept = np.sort(np.argpartition(-nats, count - 1)[:count])
        ids = [int(context.token_ids[place]) for place in kept]

        def shorter() -> Prepared:
            cache = context.model.new_cache(count)
            context.model.fill(cache, ids, 0)
            kv = np.asarray(cache.read(0, count), np.float32)
            return Prepared(context.model, ids, kv, context.model.layer0_kv(ids))

        coded = inner.run(context.once(f"pruned to {count}", shorter))
        return Coded(coded.num_bytes, coded.kv)

    return Scheme(f"LLMLingua-like, {keep:.0%} kept, {inner.name}", run)


def surprisal(model: Any, token_ids: Any) -> F64:
    """Return float64 [token]: -log of the probability that the model gave to each token; the first is infinite."""
    cache = model.new_cache(len(token_ids))
    logits = model.prefill_logits(cache, token_ids, 0)[:-1]
    top = logits.max(axis=1)
    total = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
    chosen = logits[np.arange(len(logits)), np.asarray(token_ids[1:], np.int64)]
    return np.concatenate(([np.inf], top + np.log(total) - chosen))
