from __future__ import annotations

import json
import math

import numpy as np
import pytest

from planner.errors import InvalidHistory
from planner.site import HORIZONS_S, NUM_FEATURES, SiteModel, Situation

FLAT = np.array([0.0] * (NUM_FEATURES - 1) + [1.0])


def teach(site: SiteModel, misses: list[float], *, situation: Situation = Situation.WARM) -> None:
    for miss in misses:
        forecast = float(site.forecast(situation, FLAT)[3])
        site.learn(
            situation, 3, features=FLAT, forecast=forecast, outcome=forecast + miss, weight=1.0
        )


def test_a_site_begins_with_no_bias_and_a_wide_spread() -> None:
    site = SiteModel()
    assert site.forecast(Situation.WARM, FLAT) == pytest.approx(np.zeros(len(HORIZONS_S)))
    low, middle, high = (site.miss_quantiles(Situation.COLD, q)[3] for q in (0.1, 0.5, 0.9))
    assert low < -0.5 < middle + 0.5
    assert middle == pytest.approx(0.0, abs=0.1)
    assert high > 0.5


def test_quantiles_are_learned_from_the_misses() -> None:
    site = SiteModel()
    rng = np.random.default_rng(0)
    teach(site, [float(value) for value in rng.normal(0.0, 0.1, 400)])
    low, high = (
        site.miss_quantiles(Situation.WARM, 0.1)[3],
        site.miss_quantiles(Situation.WARM, 0.9)[3],
    )
    assert low == pytest.approx(-0.128, abs=0.08)
    assert high == pytest.approx(0.128, abs=0.08)


def test_a_standing_bias_is_learned_by_the_forecast() -> None:
    site = SiteModel()
    for _ in range(300):
        forecast = float(site.forecast(Situation.WARM, FLAT)[3])
        site.learn(Situation.WARM, 3, features=FLAT, forecast=forecast, outcome=0.8, weight=1.0)
    assert float(site.forecast(Situation.WARM, FLAT)[3]) == pytest.approx(0.8, abs=0.3)


def test_situations_and_horizons_learn_apart() -> None:
    site = SiteModel()
    before = site.miss_quantiles(Situation.SILENT, 0.5).copy()
    teach(site, [1.0] * 50)
    assert site.miss_quantiles(Situation.SILENT, 0.5) == pytest.approx(before)
    assert site.forecast(Situation.WARM, FLAT)[0] == pytest.approx(0.0)


def test_an_outage_lowers_the_quantiles_and_does_not_break_the_forecast() -> None:
    site = SiteModel()
    teach(site, [-math.inf] * 30)
    assert np.isfinite(site.forecast(Situation.WARM, FLAT)).all()
    assert site.miss_quantiles(Situation.WARM, 0.1)[3] < -3.0


def test_plain_data_restores_what_was_learned() -> None:
    site = SiteModel()
    teach(site, [0.5, 0.4, -0.2] * 20)
    site.observe_rate(13.0, 1.0)
    site.last_log = 12.5
    again = SiteModel.from_plain(json.loads(json.dumps(site.to_plain())))
    teach(site, [0.1] * 16)
    teach(again, [0.1] * 16)
    assert again.forecast(Situation.WARM, FLAT) == pytest.approx(
        site.forecast(Situation.WARM, FLAT), abs=2e-2
    )
    assert again.miss_quantiles(Situation.WARM, 0.9) == pytest.approx(
        site.miss_quantiles(Situation.WARM, 0.9), abs=2e-2
    )
    assert (again.long_run_log, again.last_log) == (13.0, 12.5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 99}, "format 99"),
        ({"gram": None}, "no gram"),
        ({"moment": "!!"}, "not base64"),
        ({"histogram": "AAAA"}, "3 bytes"),
        ({"last_log": "fast"}, "last_log 'fast'"),
        ({"long_run_log": math.nan}, "long_run_log nan"),
    ],
)
def test_a_damaged_history_is_refused_by_name(change: dict[str, object], complaint: str) -> None:
    plain = {**SiteModel().to_plain(), **change}
    with pytest.raises(InvalidHistory, match=complaint):
        SiteModel.from_plain(plain)


def test_a_history_with_impossible_numbers_is_refused() -> None:
    plain = SiteModel().to_plain()
    broken = SiteModel()
    broken._histogram[0, 0, 0] = -1.0
    with pytest.raises(InvalidHistory, match="negative"):
        SiteModel.from_plain(broken.to_plain())
    broken._histogram[0, 0, 0] = math.nan
    with pytest.raises(InvalidHistory, match="not finite"):
        SiteModel.from_plain(broken.to_plain())
    assert SiteModel.from_plain(plain).last_log is None


def test_the_long_run_mean_follows_slowly() -> None:
    site = SiteModel()
    site.observe_rate(10.0, 1.0)
    site.observe_rate(12.0, 1.0)
    assert site.long_run_log is not None
    assert 10.0 < site.long_run_log < 10.1
