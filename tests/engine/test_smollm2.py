"""The real model that demo and benchmarks use."""

from __future__ import annotations

import numpy as np

from engine import Sampling, TorchEngine
from engine.prompt import Message, plain_prompt, split_prompt
from engine.rope import unrotate


def test_it_answers(smollm2: TorchEngine) -> None:
    ids = plain_prompt(smollm2.tokenizer, [Message("user", "What is the capital of France?")])
    cache = smollm2.new_cache(len(ids) + 16)
    logits = smollm2.prefill(cache, ids)
    tokens = list(smollm2.generate(cache, logits, len(ids), Sampling(), 16))
    assert smollm2.tokenizer.decode(tokens) == "The capital of France is Paris."


def test_its_identity_is_pinned(smollm2: TorchEngine) -> None:
    # Stored chunks and the bundled profiles hold for these weights and this config only.
    assert smollm2.identity.weights_digest.hex() == (
        "ea6b95705b90d8f76b35884c4d37c20faa909ffd24a8b7b33d99930978fe9373"
    )
    assert smollm2.identity.config_digest.hex() == (
        "393bc937e38a4d53a08bbf5440863cca10881ad67ca83bfe91a3e356ddc6b564"
    )


def test_its_keys_unrotate_to_layer_0(smollm2: TorchEngine) -> None:
    context, question = split_prompt(
        smollm2.tokenizer,
        "The bridge was closed on Monday. " * 20,
        [Message("user", "?")],
    )
    ids = context + question
    cache = smollm2.new_cache(len(ids))
    smollm2.fill(cache, ids)
    before = unrotate(
        cache.read(0, len(ids))[:1, 0].astype(np.float32),
        smollm2.rotary_tables(len(ids)),
        token_start=0,
    )
    layer0 = smollm2.layer0_kv(ids)
    assert np.abs(before[0] - layer0[0]).max() < 1e-4
    np.testing.assert_allclose(cache.read(0, len(ids))[0, 1], layer0[1], atol=1e-5)
