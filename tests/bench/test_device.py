"""The device benchmark's parts that need no device, and what it says without one."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from bench import device
from bench.device import DeviceRow, num_rotated, table_lines
from bench.synthetic import draw_plain, llama_rotary, rotated_half, synthetic_profile
from codec import Codec, Geometry
from tests.codec.klt_builders import make_profile

GEOMETRY = Geometry(num_layers=6, num_kv_heads=2, head_dim=16)


def test_without_a_device_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "cupy":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert device.main([]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_a_synthetic_profile_codes_synthetic_caches() -> None:
    profile = synthetic_profile(make_profile(), GEOMETRY, layers_per_group=2)
    rotary = llama_rotary(GEOMETRY, 300)
    codec = Codec(
        GEOMETRY,
        model_digest=profile.model_digest,
        profiles=[profile],
        num_threads=1,
        rotary=rotary,
    )
    plain = draw_plain(profile, 300, seed=1)
    kv = rotated_half(plain, rotary)
    layer0 = plain[0].astype(np.float32)
    errors, sizes = [], []
    for level in ("klt:0", "klt:4"):
        data = codec.encode(kv, level=level, token_start=0, layer0=layer0)
        decoded = codec.decode(data, layer0=layer0, dtype=np.float32).kv
        np.testing.assert_allclose(decoded[0], kv[0], atol=0.02)
        errors.append(float(np.abs(decoded[1:] - kv[1:]).mean()))
        sizes.append(len(data))
    assert errors[0] < errors[1] < float(np.abs(kv[1:].astype(np.float32)).mean())
    assert sizes[1] < sizes[0] < kv.nbytes


def test_buffers_outlast_the_cache() -> None:
    assert num_rotated(50, 100) == 5
    assert num_rotated(10**9, 5 * 10**7) == 2


def test_the_table_has_a_line_per_row() -> None:
    rows = [
        DeviceRow("m", "decode klt:2", 1.5, 2.0, 3.0),
        DeviceRow("m", "device-to-device copy", None, 1.0, 6.0),
    ]
    lines = table_lines(rows)
    assert lines[1].split() == ["m", "decode", "klt:2", "1.500", "2.000", "3.0"]
    assert lines[2].split() == ["m", "device-to-device", "copy", "1.000", "6.0"]
