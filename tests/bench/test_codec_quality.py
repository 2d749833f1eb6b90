"""The codec's table: comparison at equal loss, cost against the tables, the pages that it rewrites."""

from __future__ import annotations

import numpy as np
import pytest

from bench.codec_quality import (
    MARK,
    Result,
    comparison_lines,
    markdown_table,
    replace_between_marks,
)
from bench.equal_loss import bits_at, share_over
from bench.klt_cost import klt_cost
from codec.klt import KltTransform
from tests.codec.klt_builders import make_codec, make_plain, make_profile, make_rotary, rotated

LINE = [(4.0, 0.001), (1.0, 0.016)]  # halves with every fourfold KL


def test_between_levels_lines_are_straight_in_logs() -> None:
    assert bits_at(LINE, 0.004) == pytest.approx(2.0)


def test_outside_of_what_was_measured_nothing_is_said() -> None:
    assert bits_at(LINE, 0.0005) is None
    assert bits_at(LINE, 0.02) is None


def test_a_share_is_worst_and_mean_over_the_common_range() -> None:
    share = share_over(LINE, [(8.0, 0.001), (2.0, 0.008)])
    assert share is not None
    assert 0.003 <= share.low_kl < share.high_kl <= 0.008
    assert share.mean < share.worst <= 0.75


def test_families_that_do_not_overlap_have_no_share() -> None:
    assert share_over([(1.0, 0.5), (2.0, 0.2)], LINE) is None


@pytest.mark.parametrize("level", ["klt:0", "klt:3", "klt:5"])
def test_bytes_are_a_little_more_than_the_cross_entropy(level: str) -> None:
    rotary = make_rotary()
    codec = make_codec(rotary=rotary)
    plain = make_plain(1000, seed=3)
    data = codec.encode(rotated(plain, rotary, 0), level=level, token_start=0, layer0=plain[0])
    transform = KltTransform(make_profile(), num_threads=1, rotary=rotary)
    cost = klt_cost(transform, data)
    blocks = 8 * 3  # of 128 tokens, at most a group per layer but the first
    overhead = 128 + 4 * (blocks + 2) + blocks * 4 * 32
    assert cost.symbol_bytes + cost.beside_bytes < cost.total_bytes
    assert cost.total_bytes < 1.01 * (cost.symbol_bytes + cost.beside_bytes) + overhead


def test_rows_are_means_over_what_was_added() -> None:
    result = Result("klt:9")
    result.text.bits, result.text.elements = 100.0, 50
    result.text.kl, result.text.tokens, result.text.scored_tokens = 2.0, 4, 3
    row = result.row()
    assert row["bits_per_element"] == 2.0
    assert row["kl"] == 0.5
    assert row["retrieval_kl"] is None
    assert "| klt:9 | 2.000 | 8.0x | 0.50000 |" in markdown_table([row])


def test_lines_compare_only_what_was_measured() -> None:
    rows = [
        {"scheme": name, "bits_per_element": bits, "kl": kl}
        for name, bits, kl in (
            ("klt:0", 2.0, 0.001),
            ("klt:1", 0.2, 0.1),
            ("LMCache-like: x", 4.0, 0.05),
        )
    ]
    (line,) = comparison_lines(rows)
    assert "LMCache-like" in line
    assert np.isfinite(float(line.split(": ")[1].split("%")[0]))


def test_a_page_keeps_what_is_around_the_table() -> None:
    begin, end = MARK.format("begin"), MARK.format("end")
    assert (
        replace_between_marks(f"a\n{begin}\nold\n{end}\nb\n", "new")
        == f"a\n{begin}\nnew\n{end}\nb\n"
    )
    with pytest.raises(ValueError, match="no marks"):
        replace_between_marks("a", "new")
