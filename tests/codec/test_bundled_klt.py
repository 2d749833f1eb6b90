"""The klt profile that ships: its levels, what the documentation says of them, and its size."""

from __future__ import annotations

from pathlib import Path

from codec import LevelSet, Profile, bundled_profiles
from codec.klt_plan import KltPlan

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "codec/profiles/smollm2-135m.klt.kvprofile"
PROFILE = Profile.load(PATH)


def test_it_is_bundled_and_small_enough_to_ship() -> None:
    assert PROFILE.digest in [p.digest for p in bundled_profiles(PROFILE.model_digest)]
    assert PROFILE.level_set is LevelSet.KLT
    assert PATH.stat().st_size < 20_000_000


def test_levels_trade_bits_for_loss_from_near_lossless_to_under_half_a_bit() -> None:
    assert len(PROFILE.levels) >= 6
    bits = [info.bits_per_element for info in PROFILE.levels]
    losses = [info.kl for info in PROFILE.levels]
    assert None not in bits
    assert None not in losses
    assert bits == sorted(bits, reverse=True)  # type: ignore[type-var]
    assert losses == sorted(losses)  # type: ignore[type-var]
    assert min(b for b in bits if b is not None) < 0.4
    good = [info for info in PROFILE.levels if info.kl is not None and info.kl <= 0.0105]
    assert min(info.bits_per_element or 16 for info in good) <= 0.75


def test_its_arrays_make_a_plan_with_fewer_components_the_coarser_the_level() -> None:
    counts = [level.num_components for level in KltPlan.from_profile(PROFILE).levels]
    assert counts == sorted(counts, reverse=True)


def test_the_documented_figures_are_the_profiles() -> None:
    page = (ROOT / "docs/codec-klt.md").read_text(encoding="utf-8")
    for info in PROFILE.levels:
        rows = [line for line in page.splitlines() if line.startswith(f"| `{info.name}` |")]
        assert f" {info.bits_per_element:.2f} |" in rows[0]
        assert f" {info.kl:.5f} |" in rows[0]
