from __future__ import annotations

from pathlib import Path

import pytest

from planner.breakeven import ContextCost, rate_ladder
from planner.cli import main
from planner.log import to_lines
from tests.planner.test_log import records


def test_explain_prints_a_table_and_a_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(to_lines(records()))
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "best_that_fits" in out
    assert "8.00" in out  # 1 MB/s in Mbit/s
    assert "cachegen:0 cachegen:2 text" in out
    assert "T: recompute" in out


def test_explain_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    path = tmp_path / "bad"
    path.write_text("[5]")
    assert main(["explain", str(path)]) == 2
    assert "decision 1" in capsys.readouterr().err


def test_breakeven_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["breakeven", "--prefill-tokens-per-s", "1000"]) == 0
    out = capsys.readouterr().out
    assert "11520 KV elements per token, recomputed in 6.00 s" in out
    # 6000 tokens x 11520 x 16 bits over 6 s.
    assert "184 Mbps" in out


def test_breakeven_of_a_given_geometry(capsys: pytest.CaptureFixture[str]) -> None:
    geometry = ["--model", "mine", "--layers", "32", "--kv-heads", "8", "--head-dim", "128"]
    speeds = ["--prefill-tokens-per-s", "5000", "--attention-growth", "1", "--bits", "klt:0=1.1"]
    assert main(["breakeven", *geometry, *speeds]) == 0
    out = capsys.readouterr().out
    assert "65536 KV elements" in out
    assert "klt:0" in out
    assert "fp16" not in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "mine"], "'mine' is not bundled"),
        (["--layers", "3"], "go together"),
        (["--layers", "0", "--kv-heads", "1", "--head-dim", "1"], "positive"),
        (["--tokens", "0"], "positive"),
        (["--attention-growth", "-1"], "negative"),
        (["--bits", "klt"], "NAME=BITS"),
        (["--bits", "klt=-1"], "NAME=BITS"),
    ],
)
def test_breakeven_names_what_is_wrong(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["breakeven", "--prefill-tokens-per-s", "1000", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("growth", [0.0, 1.0])
def test_a_mixed_plan_ends_where_both_sides_meet(growth: float) -> None:
    cost = ContextCost(6000, 11520, 1.1, 900.0, growth)
    for rate in (1e5, cost.tie_bytes_per_s, 1e8):
        mixed_s = cost.mixed_s(rate)
        share = 1.0 - mixed_s / cost.kv_s(rate)
        text_s = cost.text_s * (share + growth * share**2 / 2) / (1 + growth / 2)
        assert mixed_s == pytest.approx(text_s)
        assert mixed_s < min(cost.text_s, cost.kv_s(rate))


def test_the_winners_change_in_order_with_the_rate() -> None:
    cost = ContextCost(6000, 11520, 1.1, 900.0)
    low, high = cost.mixed_range_bytes_per_s()
    winners = [cost.winner(rate) for rate in (low * 0.9, cost.tie_bytes_per_s, high * 1.1)]
    assert winners == ["text", "mixed", "kv"]
    assert cost.text_s / cost.mixed_s(cost.tie_bytes_per_s) == pytest.approx(2.0)
    ladder = rate_ladder([cost])
    assert ladder == sorted(ladder)
    assert ladder[0] < cost.tie_bytes_per_s < ladder[-1]
