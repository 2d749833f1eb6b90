"""The quality harness and schemes that drop tokens, on the tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.baselines.dropping import attention_sums, evicted, heavy_tokens, pruned, surprisal
from bench.baselines.scheme import Coded, Prepared, Scheme
from bench.cases import Case, answer_score
from bench.codec_quality import continuation_logits, prepare
from bench.quality import FIGURES, Row, bootstrap, claim, measure_cases, read_rows, summarize
from engine import TorchEngine

IDS = [(5 * i + 3) % 60 for i in range(40)]
TAIL = [7, 9, 11, 13]
EXACT = Scheme("exact", lambda context: Coded(2 * context.kv.size, context.kv))


@pytest.fixture(scope="module")
def context(tiny_engine: TorchEngine) -> Prepared:
    return prepare(tiny_engine, IDS)[0]


def test_attention_sums_to_one_per_query(tiny_engine: TorchEngine, context: Prepared) -> None:
    sums = attention_sums(tiny_engine, IDS)
    query_heads = tiny_engine.model.config.num_attention_heads
    np.testing.assert_allclose(sums.sum(axis=(1, 2)), len(IDS) * query_heads, rtol=1e-5)
    after, _ = prepare(tiny_engine, IDS)
    np.testing.assert_array_equal(after.kv, context.kv)  # the model's own attention is back


def test_heavy_recent_and_first_tokens_stay() -> None:
    sums = np.asarray([0.0, 5.0, 1.0, 9.0, 0.0, 0.0, 0.0, 0.0])
    assert heavy_tokens(sums, 5).tolist() == [0, 1, 3, 6, 7]


@pytest.mark.parametrize("by_head", [False, True])
def test_keeping_all_tokens_changes_nothing(context: Prepared, by_head: bool) -> None:
    coded = evicted(EXACT, 1.0, by_head=by_head).run(context)
    np.testing.assert_allclose(coded.kv, context.kv, atol=1e-5)
    assert coded.num_bytes > 2 * context.kv.size  # positions cost something


def test_an_evicted_cache_equals_the_full_one_with_those_tokens_hidden(
    tiny_engine: TorchEngine, context: Prepared
) -> None:
    coded = evicted(EXACT, 0.5, by_head=False).run(context)
    count = coded.kv.shape[2]
    sums = attention_sums(tiny_engine, IDS)
    kept = heavy_tokens(sums.sum(axis=(0, 1)), count)
    hidden = np.setdiff1d(np.arange(len(IDS)), kept)
    # What is hidden gets keys that no query looks at: as long as they are and away from all others.
    import torch

    cache = tiny_engine.new_cache(len(IDS) + 1)
    cache.write(0, context.kv)
    mask = torch.zeros((1, 1, 1, len(IDS) + 1))
    mask[..., torch.from_numpy(hidden)] = torch.finfo(torch.float32).min
    with torch.inference_mode():
        output = tiny_engine.model(
            input_ids=torch.tensor([[TAIL[0]]]),
            position_ids=torch.tensor([[len(IDS)]]),
            attention_mask=mask,
            use_cache=True,
            **{tiny_engine._cache_argument: cache.view(len(IDS))},
        )
    made = continuation_logits(tiny_engine, coded.kv, TAIL[:1])
    np.testing.assert_allclose(made[0], output.logits[0, 0].numpy(), atol=1e-4)


def test_pruning_keeps_the_surprising_tokens_and_their_own_cache(
    tiny_engine: TorchEngine, context: Prepared
) -> None:
    coded = pruned(EXACT, 0.5).run(context)
    nats = surprisal(tiny_engine, IDS)
    assert np.isinf(nats[0])
    kept = np.sort(np.argsort(-nats)[:20])
    shorter, _ = prepare(tiny_engine, [IDS[place] for place in kept])
    np.testing.assert_array_equal(coded.kv, shorter.kv)


def test_exact_caches_lose_nothing_and_a_second_run_measures_nothing(
    tiny_engine: TorchEngine, tmp_path: Path
) -> None:
    work = tmp_path / "rows.jsonl"
    claim(work, {"model": "tiny"})
    cases = [
        Case("prose", "prose 0", tuple(IDS), tuple(TAIL)),
        Case("qa", "qa 0", tuple(IDS), tuple(TAIL), ("no such answer",)),
    ]
    rows = measure_cases(tiny_engine, cases, [EXACT], work)
    assert [row.kl for row in rows] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert rows[1].same_answer == 1.0

    def never(context: Prepared) -> Coded:
        raise AssertionError("measured again")

    again = measure_cases(tiny_engine, cases, [replace(EXACT, run=never)], work)
    assert again == rows
    with work.open("a", encoding="utf-8") as sink:
        sink.write('{"kind": "prose", "ca')
    assert read_rows(work) == rows


def test_a_work_file_of_another_set_up_is_refused(tmp_path: Path) -> None:
    claim(tmp_path / "rows.jsonl", {"context_tokens": 1})
    with pytest.raises(ValueError, match="another"):
        claim(tmp_path / "rows.jsonl", {"context_tokens": 2})


def row(kl: float, **changes: float) -> Row:
    return replace(Row("prose", f"prose {kl}", "s", 80.0, 10, kl, 4, 0.0, 3, 3), **changes)  # type: ignore[arg-type]


def test_intervals_hold_the_mean_and_vanish_without_spread() -> None:
    mean, low, high = bootstrap([row(1.0), row(2.0), row(6.0)], FIGURES["kl"])
    assert mean == pytest.approx(9 / 12)
    assert 0.25 <= low < mean < high <= 1.5
    assert bootstrap([row(1.0)] * 3, FIGURES["kl"]) == pytest.approx((0.25, 0.25, 0.25))


def test_scores_appear_only_where_all_rows_have_them() -> None:
    (plain,) = summarize([row(1.0)])
    (scored,) = summarize([row(1.0, same_answer=1.0, score=0.0, exact_score=1.0)])
    assert "score" not in plain
    assert scored["score"][0] == 0.0
    assert scored["exact_score"][0] == 1.0


def test_an_answer_counts_whatever_its_case_and_punctuation() -> None:
    assert answer_score(" It was: The  Panthers!", ["the panthers"]) == 1.0
    assert answer_score("nobody", ["the panthers"]) == 0.0
