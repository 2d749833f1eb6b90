from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from codec.measure import LossSum, compare_logits, measure_levels
from tests.codec.builders import GEOMETRY, LEVELS, make_codec, make_kv


class _ToyModel:
    """Logits that depend on the cache: enough to see a loss."""

    def layer0_kv(self, token_ids: Sequence[int]) -> None:
        return None

    def context_kv(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return make_kv(len(token_ids), seed=token_ids[0])

    def continuation_logits(
        self, kv: npt.NDArray[np.float32] | npt.NDArray[np.float16], token_ids: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        summary = kv.astype(np.float32).mean(axis=2).reshape(-1)[:11]
        return np.asarray([summary * (1 + token % 3) for token in token_ids], np.float32)


def test_levels_are_measured_on_coded_bytes_and_finer_ones_lose_less() -> None:
    steps: list[int] = []
    codec = make_codec()
    contexts = [[seed] * 300 for seed in (1, 2)]
    levels = measure_levels(
        codec, _ToyModel(), contexts, continuation_tokens=5, on_progress=steps.append
    )
    assert tuple(info.name for info in levels) == LEVELS
    assert len(steps) == 2 * len(LEVELS)
    by_name = {info.name: info for info in levels}
    kv = make_kv(295, seed=1)
    sizes = [
        len(codec.encode(make_kv(295, seed=s), level="cachegen:2", token_start=0)) for s in (1, 2)
    ]
    expected = 8 * sum(sizes) / (2 * kv.size)
    assert by_name["cachegen:2"].bits_per_element == pytest.approx(expected, abs=1e-4)
    kl = [by_name[f"cachegen:{i}"].kl or 0.0 for i in range(6)]
    assert kl[0] < kl[5]
    assert (by_name["fp16"].kl or 0.0) < 1e-5
    assert all(0 <= (info.top1 or 0) <= 1 for info in levels)


def test_equal_logits_lose_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(130, 9)).astype(np.float32)
    total = LossSum(bits=1, elements=1)
    compare_logits(logits, logits, [1] * 130, total)
    info = total.info(make_codec().levels()[0])
    assert (info.kl, info.ppl_ratio, info.top1) == (0.0, 1.0, 1.0)
    assert (total.tokens, total.scored_tokens) == (130, 129)


def test_a_known_difference_gives_its_kl_and_perplexity() -> None:
    exact = np.log(np.asarray([[0.5, 0.5], [0.5, 0.5]], np.float32))
    lossy = np.log(np.asarray([[0.25, 0.75], [0.25, 0.75]], np.float32))
    total = LossSum(bits=1, elements=1)
    compare_logits(exact, lossy, [0, 0], total)
    info = total.info(make_codec().levels()[0])
    assert info.kl == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), abs=1e-6)
    assert info.ppl_ratio == pytest.approx(2.0, abs=1e-5)


def test_geometry_of_the_toy_is_the_codecs() -> None:
    assert _ToyModel().context_kv([1] * 4).shape == GEOMETRY.kv_shape(4)
