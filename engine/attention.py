"""Causal attention of a prefill piece over a long past, on the CPU, without a mask.

A piece of n queries over p cached tokens and itself needs a mask with sdpa, and the CPU's flash kernel
then spends a fifth more time and computes the masked half of the piece as well. Here attention is cut in
two exact parts, merged by their log-sum-exp: the past, where nothing is masked and the query heads of one
KV head are folded into one long query (no repeated keys), and the piece itself, causal.

Source: the merge is the split-KV reduction of FlashDecoding (Dao et al., 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "kvtide_cpu"
"""Name under which transformers knows this attention. It has no mask function on purpose: transformers
then builds no mask, and hands none."""

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_PLAIN_MODEL_TYPES = frozenset(
    {"gemma", "granite", "llama", "mistral", "olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3"}
)


def is_supported(config: Any, *, has_sliding_layers: bool) -> bool:
    """Say whether a model's attention is known to be plain causal softmax attention.

    Nobody builds masks for this attention, so a model that is not on the list keeps transformers' own.
    """
    return (
        str(config.model_type) in _PLAIN_MODEL_TYPES
        and not has_sliding_layers
        and hasattr(torch.ops.aten, _FLASH)
    )


def register() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, _forward)


def attend_over_past(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Attend causally, the queries being the last tokens of the keys.

    Args:
        query: [1, query_head, n, dim].
        key: [1, kv_head, p + n, dim], any strides with contiguous rows.
        value: like `key`.
        scale: multiplies the scores; None is 1 / sqrt(dim).

    Returns:
        [1, query_head, n, dim].
    """
    num_heads, num_queries, dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    folds = num_heads // num_kv_heads
    past = key.shape[2] - num_queries
    own, own_lse = _flash(
        query, _repeat(key[:, :, past:], folds), _repeat(value[:, :, past:], folds), True, scale
    )
    if not past:
        return own
    folded = query.reshape(1, num_kv_heads, folds * num_queries, dim)
    old, old_lse = _flash(folded, key[:, :, :past], value[:, :, :past], False, scale)
    old = old.reshape(1, num_heads, num_queries, dim)
    # softmax over both parts = each part's own softmax, weighted by its share of the total mass
    share = torch.sigmoid(own_lse - old_lse.reshape(own_lse.shape))[..., None]
    return torch.lerp(old.float(), own.float(), share).to(query.dtype)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = getattr(torch.ops.aten, _FLASH)(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _repeat(rows: torch.Tensor, folds: int) -> torch.Tensor:
    return rows if folds == 1 else rows.repeat_interleave(folds, dim=1)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    num_queries, past = query.shape[2], key.shape[2] - query.shape[2]
    if num_queries == 1 or past == 0 or attention_mask is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    out = attend_over_past(query, key, value, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
