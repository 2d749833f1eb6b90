from __future__ import annotations

import pytest
import torch

from engine import attention


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    folds = query.shape[1] // key.shape[1]
    key, value = (
        key.repeat_interleave(folds, 1).double(),
        value.repeat_interleave(folds, 1).double(),
    )
    scores = query.double() @ key.transpose(2, 3) * scale
    n, total = query.shape[2], key.shape[2]
    mask = torch.ones(n, total, dtype=torch.bool).tril(total - n)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("past", [0, 1, 63, 700])
@pytest.mark.parametrize("num_queries", [1, 5, 130])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_two_parts_merged_equal_masked_attention(
    past: int, num_queries: int, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(past + num_queries)
    num_heads, num_kv_heads = heads
    query = torch.randn(1, num_heads, num_queries, 32, generator=generator) * 3
    # token-major memory, as in the KV cache
    total = past + num_queries
    key, value = (
        torch.randn(total, num_kv_heads, 32, generator=generator).transpose(0, 1)[None]
        for _ in range(2)
    )
    out = attention.attend_over_past(query, key, value, scale=0.2)
    torch.testing.assert_close(out.double(), reference(query, key, value, 0.2), atol=2e-5, rtol=0)


def test_bfloat16_stays_bfloat16_and_close() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 40, 32, generator=generator).bfloat16()
    key, value = (torch.randn(1, 2, 240, 32, generator=generator).bfloat16() for _ in range(2))
    out = attention.attend_over_past(query, key, value, scale=None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), reference(query, key, value, 32**-0.5), atol=0.02, rtol=0
    )
