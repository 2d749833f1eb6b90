"""The paper's tables: times in virtual time, their plot and page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from bench.paper import POLICIES, line_plot, markdown, ttft_rows, violations
from scenarios.config import load_scenario


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return ttft_rows(load_scenario("paper"), (10, 10_000))


def test_every_policy_is_faster_or_alike_on_a_faster_link(rows: list[dict[str, Any]]) -> None:
    seconds = {(row["policy"], row["mbps"]): row["ttft_s"] for row in rows}
    assert len(seconds) == 2 * len(POLICIES)
    for policy in POLICIES:
        assert seconds[policy, 10_000] <= 1.01 * seconds[policy, 10]
    assert seconds["fixed:klt:4", 10] < seconds["fixed:cachegen:2", 10] < seconds["int8", 10]
    assert all(row["simulated"] for row in rows)


def test_late_and_missing_first_tokens_are_violations() -> None:
    made: list[dict[str, Any]] = [
        {"policy": "text", "ttft_s": 4.0},
        {"policy": "text", "ttft_s": None},
        {"policy": "int8", "ttft_s": 6.0},
    ]
    assert violations(made, 5.0) == {"text": 0.5, "int8": 1.0}


def test_the_plot_is_svg_with_a_line_and_a_name_per_policy(rows: list[dict[str, Any]]) -> None:
    texts = [element.text for element in ElementTree.fromstring(line_plot(rows)).iter()]
    assert set(POLICIES) <= set(texts)
    assert "uplink, Mbit/s (all simulated)" in texts


def test_the_page_names_published_figures_and_differences(rows: list[dict[str, Any]]) -> None:
    page = markdown(
        {
            "command": "make paper",
            "quick": True,
            "machine": ["machine: none"],
            "sizes": [
                {
                    "kind": "qa",
                    "scheme": "klt:4",
                    "cases": 2,
                    "bits_per_element": [0.6, 0.6, 0.6],
                    "kl": [0.01, 0.01, 0.02],
                    "top1": [0.9, 0.9, 0.9],
                    "same_answer": [1.0, 1.0, 1.0],
                }
            ],
            "ttft": rows,
            "violations": {"5": violations(rows, 5.0)},
        }
    )
    assert "| qa | klt:4 | 2 | 0.600 | 0.0100 (0.0100 to 0.0200) | 90.0% | 1.00 |" in page
    assert "CacheGen 176 MB" in page
    assert "A short run" in page
    assert "What differs from the paper" in page
