from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cloud_worker.errors import NoMemory
from cloud_worker.evaluation import (
    Evaluation,
    Evaluator,
    ExactCaches,
    compare_distributions,
    matching_share,
)
from cloud_worker.executors import Executors
from engine import KvCache, TorchEngine

CONTEXT = tuple(int(i) for i in np.random.default_rng(3).integers(3, 256, 40))
QUESTION = tuple(int(i) for i in np.random.default_rng(4).integers(3, 256, 11))
MAX_TOKENS = 6
CAPACITY = len(CONTEXT) + len(QUESTION) + MAX_TOKENS


def filled(engine: TorchEngine, *, noise: float = 0.0) -> KvCache:
    cache = engine.new_cache(CAPACITY)
    engine.fill(cache, CONTEXT, 0)
    kv = cache.read(0, len(CONTEXT))
    error = np.random.default_rng(5).normal(size=kv.shape) * noise * float(kv.std())
    cache.write(0, (kv + error).astype(np.float32))
    return cache


async def evaluate(
    engine: TorchEngine, executors: Executors, lossy: KvCache, caches: ExactCaches | None = None
) -> Evaluation:
    evaluator = Evaluator(
        engine=engine,
        executors=executors,
        caches=caches or ExactCaches(2**30),
        step_tokens=16,
    )
    return await evaluator.evaluate(
        lossy,
        context_key=b"k",
        context_ids=CONTEXT,
        question_ids=QUESTION,
        max_tokens=MAX_TOKENS,
        greedy_answer=None,
    )


async def test_an_exact_cache_has_no_loss(engine: TorchEngine, executors: Executors) -> None:
    result = await evaluate(engine, executors, filled(engine))
    assert result.kl < 1e-6
    assert result.top1 == 1.0
    assert result.greedy_match == 1.0
    assert result.num_tokens == max(1, len(result.exact_token_ids))


async def test_more_noise_is_more_loss(engine: TorchEngine, executors: Executors) -> None:
    some = await evaluate(engine, executors, filled(engine, noise=0.1))
    much = await evaluate(engine, executors, filled(engine, noise=1.0))
    assert 1e-6 < some.kl < much.kl


async def test_the_distributions_are_those_of_a_full_forward_pass(
    engine: TorchEngine, executors: Executors
) -> None:
    lossy = filled(engine, noise=0.3)
    kv = lossy.read(0, len(CONTEXT))
    result = await evaluate(engine, executors, lossy)
    exact_ids = result.exact_token_ids
    forced = QUESTION + exact_ids[:-1]
    rows = []
    for is_exact in (True, False):
        cache = engine.new_cache(CAPACITY)
        engine.fill(cache, CONTEXT, 0)
        if not is_exact:
            cache.write(0, kv)
        logits = engine.prefill_logits(cache, forced, len(CONTEXT))
        rows.append(logits[len(QUESTION) - 1 :])
    kl, top1 = compare_distributions(*rows)
    assert result.kl == pytest.approx(kl, rel=1e-3)
    assert result.top1 == top1


async def test_a_given_greedy_answer_is_compared_as_it_is(
    engine: TorchEngine, executors: Executors
) -> None:
    evaluator = Evaluator(
        engine=engine, executors=executors, caches=ExactCaches(2**30), step_tokens=64
    )
    result = await evaluator.evaluate(
        filled(engine),
        context_key=b"k",
        context_ids=CONTEXT,
        question_ids=QUESTION,
        max_tokens=MAX_TOKENS,
        greedy_answer=(0, 0),
    )
    assert result.greedy_match < 1.0


async def test_the_exact_cache_is_prefilled_once_per_context(
    engine: TorchEngine, executors: Executors
) -> None:
    caches = ExactCaches(2**30)
    first = await evaluate(engine, executors, filled(engine, noise=0.2), caches)
    kept = caches.get(b"k", capacity_tokens=CAPACITY)
    second = await evaluate(engine, executors, filled(engine, noise=0.2), caches)
    assert caches.get(b"k", capacity_tokens=CAPACITY) is kept is not None
    assert first == second


async def test_evaluations_at_the_same_time_do_not_disturb_each_other(
    engine: TorchEngine, executors: Executors
) -> None:
    evaluator = Evaluator(
        engine=engine, executors=executors, caches=ExactCaches(2**30), step_tokens=8
    )

    async def one(question: tuple[int, ...]) -> Evaluation:
        return await evaluator.evaluate(
            filled(engine, noise=0.2),
            context_key=b"k",
            context_ids=CONTEXT,
            question_ids=question,
            max_tokens=MAX_TOKENS,
            greedy_answer=None,
        )

    alone = [await one(QUESTION), await one(QUESTION[::-1])]
    together = await asyncio.gather(one(QUESTION), one(QUESTION[::-1]))
    assert list(together) == alone


async def test_a_context_beyond_the_bound_is_refused(
    engine: TorchEngine, executors: Executors
) -> None:
    with pytest.raises(NoMemory):
        await evaluate(engine, executors, filled(engine), ExactCaches(1000))


def test_the_least_recently_used_cache_goes_first(engine: TorchEngine) -> None:
    size = engine.new_cache(10).num_bytes
    caches = ExactCaches(2 * size)
    caches.put(b"a", engine.new_cache(10))
    caches.put(b"b", engine.new_cache(10))
    assert caches.get(b"a", capacity_tokens=10) is not None
    caches.put(b"c", engine.new_cache(10))
    assert caches.get(b"b", capacity_tokens=10) is None
    assert caches.get(b"a", capacity_tokens=10) is not None
    assert caches.num_bytes <= caches.max_bytes


def test_a_cache_without_enough_room_counts_as_missing(engine: TorchEngine) -> None:
    caches = ExactCaches(2**30)
    caches.put(b"a", engine.new_cache(10))
    assert caches.get(b"a", capacity_tokens=11) is None


def test_kl_is_the_textbook_one() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    kl, top1 = compare_distributions(
        np.log(p)[None].astype(np.float32), np.log(q)[None].astype(np.float32) + 3
    )
    assert kl == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), rel=1e-5)
    assert top1 == 0.0


@pytest.mark.parametrize(
    ("exact", "lossy", "share"),
    [
        ((5, 6, 7), (5, 6, 7), 1.0),
        ((5, 6, 7), (5, 6, 8), 0.5),
        ((5, 6, 7), (9, 6, 7), 0.0),
        ((5, 6, 7), (5, 6, 7, 8), 0.75),
        ((), (), 1.0),
        ((), (5,), 0.0),
    ],
)
def test_answers_match_from_their_beginning(
    exact: tuple[int, ...], lossy: tuple[int, ...], share: float
) -> None:
    assert matching_share(exact, lossy) == share
