"""The shipped traces are what the generator makes, byte for byte, and have the promised shape."""

from __future__ import annotations

import pytest

from scenarios.generate import SHIPPED, TRACES_DIR, ShippedTrace, lte_like, sources_text
from scenarios.importers import load_trace
from scenarios.trace import mbps


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda shipped: shipped.file_name)
def test_shipped_trace_is_made_again_byte_for_byte(shipped: ShippedTrace) -> None:
    assert (TRACES_DIR / shipped.file_name).read_bytes() == shipped.make().encode("ascii")


def test_every_file_of_the_folder_is_a_shipped_one_and_in_its_sources() -> None:
    names = {path.name for path in TRACES_DIR.iterdir()}
    assert names == {shipped.file_name for shipped in SHIPPED} | {"SOURCES.md"}
    assert (TRACES_DIR / "SOURCES.md").read_text(encoding="utf-8") == sources_text()


@pytest.mark.parametrize(
    ("name", "low", "mean_low", "mean_high", "high"),
    [
        ("lte-uplink.txt", 8, 13, 18, 30),
        ("lte-drive.txt", 1, 5, 10, 25),
        ("lte-slow.up", 0.5, 1.5, 2.5, 5),
        ("starlink-like.txt", 0, 15, 27, 46),
    ],
)
def test_shipped_trace_lies_in_its_band(
    name: str, low: float, mean_low: float, mean_high: float, high: float
) -> None:
    trace = load_trace(TRACES_DIR / name)
    assert mean_low < mbps(trace.mean_bytes_per_s) < mean_high
    assert low <= mbps(trace.percentile(0.0, step_s=2.0))
    assert mbps(trace.percentile(1.0, step_s=1.0)) <= high


def test_outage_is_77_seconds_long() -> None:
    assert [o.duration_s for o in load_trace(TRACES_DIR / "outage.txt").outages()] == [77.0]


def test_another_seed_gives_another_trace() -> None:
    def make(seed: int) -> list[float]:
        return lte_like(seed, duration_s=10, step_s=0.1, low_mbps=5, high_mbps=10)

    assert make(1) == make(1)
    assert make(1) != make(2)
