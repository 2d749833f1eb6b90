"""Schemes of others, each in our implementation, with real coded bytes. Labelled "-like" for that reason."""

from __future__ import annotations

from typing import Any

import numpy as np
from blake3 import blake3

from bench.baselines.dropping import evicted, pruned
from bench.baselines.kvtc import KvtcBasis, cached_basis, kvtc
from bench.baselines.plain import int4, kivi, lmcache
from bench.baselines.scheme import Coded, Prepared, Scheme

__all__ = [
    "KVTC_BUDGETS",
    "Coded",
    "Prepared",
    "Scheme",
    "calibrated_kvtc",
    "evicted",
    "kvtc_basis",
    "pruned",
    "uncalibrated",
]

KVTC_BUDGETS = (3.0, 2.0, 1.5, 1.0, 0.7)
"""Bits per element before DEFLATE."""


def uncalibrated() -> list[Scheme]:
    """Return the schemes that need no calibration."""
    return [int4(), lmcache(), kivi(4), kivi(2)]


def kvtc_basis(model: Any) -> KvtcBasis:
    """Return the PCA of the contexts that the bundled profile's command takes, from the cache folder if there."""
    from pathlib import Path

    from tqdm import tqdm

    from codec.klt_builder import CONTEXT_TOKENS, plan_contexts
    from codec.texts import machine_texts, read_texts
    from engine.catalog import cache_root

    folder = Path(__file__).resolve().parents[1] / "calibration"
    texts = machine_texts(held_out=False) + read_texts([folder])
    contexts = [
        plan.token_ids[:CONTEXT_TOKENS] for plan in plan_contexts(texts, model.tokenizer.encode)
    ]
    digest = blake3(model.identity.model_digest)
    for ids in contexts:
        digest.update(np.asarray(ids, np.int32).tobytes())
    path = cache_root() / "bench" / f"kvtc-{digest.hexdigest()[:16]}.npz"
    return cached_basis(
        model, contexts, path, track=lambda ids: tqdm(ids, desc="KVTC calibration", unit="context")
    )


def calibrated_kvtc(model: Any) -> list[Scheme]:
    """Return the KVTC-like scheme at every budget."""
    basis = kvtc_basis(model)
    return [kvtc(basis, budget) for budget in KVTC_BUDGETS]
