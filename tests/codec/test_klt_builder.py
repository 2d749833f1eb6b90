"""Building a klt profile: how texts become contexts, and that an interrupted build goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from codec.calibrate_klt import Context, KltCalibration
from codec.errors import CodecError
from codec.geometry import Geometry
from codec.klt_builder import (
    CONTEXT_TOKENS,
    CONTINUATION_TOKENS,
    ContextPlan,
    build_klt,
    plan_contexts,
    warnings_about,
)
from codec.texts import CalibrationText
from tests.codec.klt_builders import MODEL_DIGEST, make_plain

LENGTH = CONTEXT_TOKENS + CONTINUATION_TOKENS
GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=4)
F32 = npt.NDArray[np.float32]


class _ToyModel:
    def __init__(self, *, fails_after: int = 99) -> None:
        self.runs = 0
        self._fails_after = fails_after

    def keys_values_gradients(
        self, head: Sequence[int], tail: Sequence[int], *, seed: int
    ) -> tuple[F32, F32]:
        if self.runs >= self._fails_after:
            raise KeyboardInterrupt
        self.runs += 1
        assert (len(head), len(tail)) == (CONTEXT_TOKENS, CONTINUATION_TOKENS)
        kv = make_plain(len(head), seed=head[0], geometry=GEOMETRY)
        pull = np.random.default_rng(seed).normal(size=kv.shape) * 1e-4
        return kv, pull.astype(np.float32)


def _plans(count: int) -> list[ContextPlan]:
    return [ContextPlan("text", (n, *range(1, LENGTH))) for n in range(count)]


def _track(items: Sequence[Any], name: str) -> Iterator[Any]:
    assert name
    return iter(items)


def test_contexts_take_turns_among_texts_and_spread_over_each() -> None:
    texts = [CalibrationText("long", "a" * (20 * LENGTH)), CalibrationText("short", "b" * LENGTH)]
    plans = plan_contexts(texts, lambda text: [ord(c) for c in text])
    assert [plan.text for plan in plans] == ["long", "short", "long", "long", "long", "long"]
    assert all(len(plan.token_ids) == LENGTH for plan in plans)
    assert plan_contexts([CalibrationText("tiny", "c")], lambda text: [1]) == []


def test_little_or_uniform_text_is_warned_about() -> None:
    assert len(warnings_about(_plans(2))) == 2
    varied = [ContextPlan(str(n), (n,)) for n in range(12)]
    assert warnings_about(varied) == []


def test_an_interrupted_build_goes_on_with_what_it_has(tmp_path: Path) -> None:
    arguments = {
        "geometry": GEOMETRY,
        "plans": _plans(4),
        "model_digest": MODEL_DIGEST,
        "notes": {},
        "track": _track,
    }
    broken = _ToyModel(fails_after=2)
    with pytest.raises(KeyboardInterrupt):
        build_klt(broken, work=tmp_path / "a", **arguments)  # type: ignore[arg-type]
    resumed = _ToyModel()
    profile = build_klt(resumed, work=tmp_path / "a", **arguments)  # type: ignore[arg-type]
    assert resumed.runs == 2
    whole = build_klt(_ToyModel(), work=tmp_path / "b", **arguments)  # type: ignore[arg-type]
    assert profile.digest == whole.digest
    assert profile.notes["contexts"] == [["text", 4]]


def test_calibration_without_gradients_is_refused() -> None:
    calibration = KltCalibration(GEOMETRY)
    kv = make_plain(50, seed=1, geometry=GEOMETRY)
    calibration.add_moments(Context(kv.reshape(*kv.shape[:3], -1), None, 1))
    with pytest.raises(CodecError, match="gradient"):
        _ = calibration.weight


def test_one_layer_is_refused() -> None:
    with pytest.raises(CodecError, match="two layers"):
        KltCalibration(Geometry(1, 1, 4))
