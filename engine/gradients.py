"""How a model's predictions depend on its cache: what calibration of a codec needs beside the cache itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from engine.torch_engine import TorchEngine

__all__ = ["cache_gradient"]

F32Array = NDArray[np.float32]


def cache_gradient(
    engine: TorchEngine, kv: F32Array, token_ids: Sequence[int], *, seed: int
) -> F32Array:
    """Return the gradient of the log-likelihood of sampled next tokens with respect to the cache.

    After each of `token_ids` one next token is drawn from the model's own distribution; the log-likelihoods
    of those draws are summed. The mean square of this gradient is the Fisher information of the cache, whose
    quadratic form is twice the KL divergence that a small error causes.

    Args:
        engine: the model.
        kv: float32 [layer, 2, token, head, dim], the cache of the context, keys after RoPE.
        token_ids: a continuation, teacher-forced.
        seed: of the draws.

    Returns:
        float32, like kv; of keys after RoPE.
    """
    model = engine.model
    start = kv.shape[2]
    leaf = torch.from_numpy(np.ascontiguousarray(kv)).to(engine.device, engine.dtype)
    leaf.requires_grad_(True)
    cache = DynamicCache()
    for layer in range(kv.shape[0]):
        cache.update(
            leaf[layer, 0].transpose(0, 1)[None], leaf[layer, 1].transpose(0, 1)[None], layer
        )
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        ids = torch.tensor([list(token_ids)], device=engine.device)
        positions = torch.arange(start, start + len(token_ids), device=engine.device)[None]
        parameters = inspect.signature(model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"  # renamed in 5.20
        output = model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache})
        log_probability = output.logits[0].float().log_softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.multinomial(log_probability.detach().exp().cpu(), 1, generator=generator)
        total = log_probability.gather(1, draws.to(engine.device)).sum()
        (gradient,) = torch.autograd.grad(total, leaf)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return np.asarray(gradient.float().cpu().numpy(), np.float32)
