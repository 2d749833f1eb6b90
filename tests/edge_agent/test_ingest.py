from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from codec import Codec, LevelInfo, LevelSet, RefinementInfo
from edge_agent.errors import BadRequest, ContextConflict, StoreFull, TooLong
from edge_agent.ingest import Ingestor, IngestResult, Progress
from edge_agent.store import ContextStore
from engine import TorchEngine
from tests.edge_agent.conftest import CONTEXT_TOKENS

TEXT = "The boiler in hall four was checked in May. " * 6


def chunk_files(root: Path) -> list[Path]:
    return list(root.rglob("*.kvchunk"))


async def ingest_and_cancel(ingestor: Ingestor, report_number: int) -> bool:
    """Cancel an ingest at its n-th progress report; return whether it got that far."""
    num_seen = 0

    def cancel(_: Progress) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == report_number:
            task.cancel()

    task = asyncio.create_task(
        ingestor.ingest(TEXT, context_id="doc", levels=None, on_progress=cancel)
    )
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def run(
    ingestor: Ingestor,
    text: str = TEXT,
    *,
    context_id: str | None = "doc",
    levels: tuple[str, ...] | None = None,
    reports: list[Progress] | None = None,
) -> IngestResult:
    sink = reports if reports is not None else []
    return await ingestor.ingest(
        text, context_id=context_id, levels=levels, on_progress=sink.append
    )


async def test_stored_chunks_hold_the_kv_cache_of_the_whole_context(
    ingestor: Ingestor, store: ContextStore, engine: TorchEngine, codec: Codec
) -> None:
    result = await run(ingestor)
    ids = list(result.context.token_ids)
    assert result.prefilled_tokens == len(ids) == 270
    assert [span.num_tokens for span in result.context.spans] == [100, 100, 70]
    exact = engine.new_cache(len(ids))
    engine.fill(exact, ids)
    for span in result.context.spans:
        bitstream = store.read_chunk(span.key, "fp16")
        chunk = codec.decode(bitstream, dtype=np.float32)
        assert (chunk.token_start, chunk.token_stop) == (span.token_start, span.token_stop)
        expected = exact.read(span.token_start, span.token_stop)
        # fp16 keeps 11 bits; prefill in pieces differs from prefill at once by less than that.
        np.testing.assert_allclose(chunk.kv, expected, rtol=2e-3, atol=2e-4)


async def test_progress_counts_every_stage_to_its_end(ingestor: Ingestor) -> None:
    reports: list[Progress] = []
    result = await run(ingestor, reports=reports)
    stages: dict[str, list[Progress]] = {}
    for report in reports:
        stages.setdefault(report.stage, []).append(report)
    assert list(stages) == ["tokenize", "prefill", "encode", "store"]
    for name, seen in stages.items():
        assert [report.done for report in seen] == sorted(report.done for report in seen)
        assert seen[-1].done == seen[-1].total, name
    assert stages["prefill"][-1].total == result.context.num_tokens
    assert stages["store"][-1].total == 3 * len(result.bytes_by_level)


async def test_same_text_again_computes_nothing(ingestor: Ingestor, store: ContextStore) -> None:
    first = await run(ingestor)
    again = await run(ingestor, context_id="other")
    assert again.prefilled_tokens == 0
    assert again.bytes_by_level == first.bytes_by_level
    assert store.usage().num_bytes == sum(first.bytes_by_level.values())
    assert store.usage().num_contexts == 2


async def test_shared_beginning_is_stored_once(ingestor: Ingestor, store: ContextStore) -> None:
    await run(ingestor)
    longer = await run(ingestor, TEXT + "In June it failed.", context_id="longer")
    shared = [span.key for span in longer.context.spans[:2]]
    assert shared == [span.key for span in store.get("doc").spans[:2]]


async def test_without_an_id_the_content_names_the_context(ingestor: Ingestor) -> None:
    first = await run(ingestor, context_id=None)
    assert first.context.context_id.startswith("ctx-")
    assert (await run(ingestor, context_id=None)).context.context_id == first.context.context_id


async def test_a_level_can_be_added_later(ingestor: Ingestor, store: ContextStore) -> None:
    await run(ingestor, levels=("int8",))
    assert set(store.describe("doc").bytes_by_level) == {"int8"}
    await run(ingestor, levels=("fp16",))
    assert set(store.describe("doc").bytes_by_level) == {"int8", "fp16"}


async def test_bad_input_is_refused_and_leaves_nothing(
    ingestor: Ingestor, store: ContextStore, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match="empty"):
        await run(ingestor, " \n ")
    with pytest.raises(BadRequest, match="'fp17'"):
        await run(ingestor, levels=("fp17",))
    with pytest.raises(BadRequest, match="klt"):
        await run(ingestor, levels=("klt:*",))
    with pytest.raises(TooLong, match=f"{CONTEXT_TOKENS - 1}"):
        await run(ingestor, "x" * 600)
    assert store.usage().num_contexts == 0
    assert not chunk_files(tmp_path)


async def test_taken_id_is_refused_before_any_work(ingestor: Ingestor) -> None:
    await run(ingestor)
    reports: list[Progress] = []
    with pytest.raises(ContextConflict, match="'doc'"):
        await run(ingestor, "Another text.", reports=reports)
    assert {report.stage for report in reports} == {"tokenize"}


async def test_cancel_in_every_stage_leaves_nothing(
    ingestor: Ingestor, store: ContextStore, tmp_path: Path
) -> None:
    num_cancelled = 0
    while await ingest_and_cancel(ingestor, num_cancelled + 1):
        num_cancelled += 1
        assert store.usage().num_contexts == 0
        assert store.usage().num_bytes == 0
        assert not chunk_files(tmp_path)
    # tokenize 2, prefill 3, encode 6 and store 6 reports.
    assert num_cancelled == 17


async def test_full_store_fails_the_ingest_and_the_next_one_works(
    ingestor: Ingestor, store: ContextStore, tmp_path: Path
) -> None:
    store._quota_bytes = 40_000
    with pytest.raises(StoreFull):
        await run(ingestor)
    assert store.usage().num_bytes == 0
    assert not chunk_files(tmp_path)
    store._quota_bytes = 10**9
    await run(ingestor)
    assert store.usage().num_contexts == 1


async def test_ingests_at_once_all_succeed(ingestor: Ingestor, store: ContextStore) -> None:
    texts = [f"Report {n}. " + TEXT for n in range(4)]
    await asyncio.gather(
        *(run(ingestor, text, context_id=f"doc{n}") for n, text in enumerate(texts))
    )
    assert store.usage().num_contexts == 4


class KltNames:
    """A codec's names, as one with a klt profile has them."""

    def levels(self) -> list[LevelInfo]:
        return [LevelInfo(f"klt:{i}", LevelSet.KLT, i, None, None, None, None) for i in range(4)]

    def refinements(self) -> list[RefinementInfo]:
        return [RefinementInfo(f"klt:{i + 2}>{i}", f"klt:{i + 2}", f"klt:{i}") for i in (1, 0)]


def test_patterns_name_levels_or_refinements(
    ingestor: Ingestor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestor, "_codec", KltNames())
    assert ingestor.expand_levels(["klt:*"]) == ("klt:0", "klt:1", "klt:2", "klt:3")
    assert ingestor.expand_levels(["klt:3", "klt:*>*"]) == ("klt:3", "klt:3>1", "klt:2>0")
    assert ingestor.expand_levels(["klt:2>0"]) == ("klt:2>0",)
    with pytest.raises(BadRequest, match="klt:3>2"):
        ingestor.expand_levels(["klt:3>2"])
