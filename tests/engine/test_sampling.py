from __future__ import annotations

import numpy as np
import pytest

from engine.sampling import Sampling, choose_token

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def draws(sampling: Sampling, n: int = 4000) -> np.ndarray:
    generator = np.random.default_rng(sampling.seed)
    picked = [choose_token(LOGITS, sampling, generator) for _ in range(n)]
    return np.bincount(picked, minlength=4) / n


def test_greedy_takes_the_likeliest_and_uses_no_randomness() -> None:
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    assert choose_token(LOGITS, Sampling(), generator) == 0
    assert generator.bit_generator.state == before


def test_temperature_one_follows_the_probabilities() -> None:
    np.testing.assert_allclose(draws(Sampling(temperature=1.0)), [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_low_temperature_sharpens() -> None:
    assert draws(Sampling(temperature=0.3))[0] > 0.8


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.9, 3), (1.0, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    assert (draws(Sampling(temperature=1.0, top_p=top_p)) > 0).sum() == kept


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([1e4, -1e4], dtype=np.float32)
    assert choose_token(logits, Sampling(temperature=0.01), np.random.default_rng(0)) == 0


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -0.1}, {"temperature": 2.5}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}],
)
def test_values_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]


def test_nan_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=float("nan"))
