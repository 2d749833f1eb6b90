"""The gradient that calibration uses is the slope of what it says it is the slope of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import TorchEngine
from engine.gradients import cache_gradient


@pytest.mark.parametrize("family", ["llama", "qwen3-qk-norm", "gemma-mqa"])
def test_the_gradient_is_the_slope_of_the_drawn_tokens_likelihood(
    family: str, family_engine: Callable[[str], TorchEngine]
) -> None:
    engine = family_engine(family)
    ids = [(11 * i + 5) % 500 for i in range(40)]
    cache = engine.new_cache(40)
    engine.fill(cache, ids[:30], 0)
    kv = np.asarray(cache.read(0, 30), np.float32)

    def log_probability(values: NDArray[np.float32]) -> torch.Tensor:
        lossy = engine.new_cache(40)
        lossy.write(0, values)
        return torch.from_numpy(engine.prefill_logits(lossy, ids[30:], 30)).log_softmax(-1)

    exact = log_probability(kv)
    draws = torch.multinomial(exact.exp(), 1, generator=torch.Generator().manual_seed(5))
    gradient = cache_gradient(engine, kv, ids[30:], seed=5)
    assert gradient.shape == kv.shape
    step = np.float32(1e-2 / np.sqrt(np.square(gradient).sum()))
    ahead = float(log_probability(kv + step * gradient).gather(1, draws).sum())
    behind = float(log_probability(kv - step * gradient).gather(1, draws).sum())
    slope = (ahead - behind) / (2 * float(step))
    assert slope == pytest.approx(float(np.square(gradient).sum()), rel=0.03)
    assert not any(p.grad is not None for p in engine.model.parameters())
