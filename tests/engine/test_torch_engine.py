from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import ContextTooLong, EngineError, Sampling, TorchEngine, load_engine, torch_engine

IDS = [(31 * i) % 500 + 3 for i in range(90)]
GREEDY = Sampling()


def answer(
    engine: TorchEngine, ids: list[int], max_tokens: int, sampling: Sampling = GREEDY
) -> list[int]:
    cache = engine.new_cache(len(ids) + max_tokens)
    logits = engine.prefill(cache, ids)
    return list(engine.generate(cache, logits, len(ids), sampling, max_tokens))


def test_greedy_answer_equals_transformers_generate(tiny_engine: TorchEngine) -> None:
    with torch.inference_mode():
        expected = tiny_engine.model.generate(
            input_ids=torch.tensor([IDS]),
            attention_mask=torch.ones(1, len(IDS), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )[0, len(IDS) :].tolist()
    assert answer(tiny_engine, IDS, 12) == [t for t in expected if t != 2]


def test_kv_through_float16_arrays_gives_the_same_greedy_answer(tiny_engine: TorchEngine) -> None:
    source = tiny_engine.new_cache(120)
    tiny_engine.fill(source, IDS[:80])
    target = tiny_engine.new_cache(120)
    target.write(0, source.read(0, 80, dtype=np.float16))
    logits = tiny_engine.prefill(target, IDS[80:], 80)
    assert list(tiny_engine.generate(target, logits, 90, GREEDY, 12)) == answer(
        tiny_engine, IDS, 12
    )


def test_the_generator_computes_nothing_before_it_is_asked(
    tiny_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_engine.new_cache(120)
    logits = tiny_engine.prefill(cache, IDS)
    calls: list[int] = []
    original = TorchEngine._logits

    def counted(self: TorchEngine, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchEngine, "_logits", counted)
    tokens = tiny_engine.generate(cache, logits, len(IDS), GREEDY, 10)
    assert next(tokens) == int(logits.argmax())
    assert calls == []
    next(tokens)
    assert len(calls) == 1


def test_generation_ends_at_eos_without_yielding_it(tiny_engine: TorchEngine) -> None:
    full = answer(tiny_engine, IDS, 12)
    cache = tiny_engine.new_cache(120)
    logits = tiny_engine.prefill(cache, IDS)
    stop = full[4]
    cut = list(
        tiny_engine.generate(cache, logits, len(IDS), GREEDY, 12, stop_token_ids=frozenset({stop}))
    )
    assert cut == full[: full.index(stop)]
    assert tiny_engine.eos_token_ids == {2}
    eos_first = np.zeros(512, np.float32)
    eos_first[2] = 1.0
    assert list(tiny_engine.generate(cache, eos_first, len(IDS), GREEDY, 12)) == []


def test_generation_ends_where_the_cache_does(tiny_engine: TorchEngine) -> None:
    cache = tiny_engine.new_cache(len(IDS) + 3)
    logits = tiny_engine.prefill(cache, IDS)
    tokens = list(tiny_engine.generate(cache, logits, len(IDS), GREEDY, 50))
    # three tokens fit, and the token after the last of them needs no room of its own
    assert tokens == answer(tiny_engine, IDS, 12)[:4]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_generation_yields_at_most_max_tokens(tiny_engine: TorchEngine, max_tokens: int) -> None:
    assert len(answer(tiny_engine, IDS, max_tokens)) == max_tokens


def test_sampling_repeats_with_its_seed_and_differs_without(tiny_engine: TorchEngine) -> None:
    hot = Sampling(temperature=1.5, seed=7)
    first = answer(tiny_engine, IDS, 10, hot)
    assert answer(tiny_engine, IDS, 10, hot) == first
    assert answer(tiny_engine, IDS, 10, Sampling(temperature=1.5, seed=8)) != first


def test_progress_counts_tokens_and_may_cancel(
    tiny_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "PREFILL_PIECE_TOKENS", 40)
    seen: list[int] = []
    tiny_engine.prefill(tiny_engine.new_cache(90), IDS, on_progress=seen.append)
    tiny_engine.fill(tiny_engine.new_cache(90), IDS, on_progress=seen.append)
    assert seen == [40, 80, 90, 40, 80, 90]

    def cancel(_done: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        tiny_engine.fill(tiny_engine.new_cache(90), IDS, on_progress=cancel)


def test_tokens_that_do_not_fit_are_refused_before_any_work(tiny_engine: TorchEngine) -> None:
    cache = tiny_engine.new_cache(50)
    with pytest.raises(ContextTooLong, match="90 tokens do not fit the KV cache of 50"):
        tiny_engine.prefill(cache, IDS)
    assert not cache.read(0, 50).any()
    with pytest.raises(ContextTooLong):
        tiny_engine.new_cache(4096)


def test_bad_token_ids_are_named(tiny_engine: TorchEngine) -> None:
    cache = tiny_engine.new_cache(50)
    with pytest.raises(EngineError, match="token id 512 is outside the vocabulary of 512"):
        tiny_engine.prefill(cache, [3, 512])
    with pytest.raises(EngineError, match="token id -1"):
        tiny_engine.fill(cache, [-1])
    with pytest.raises(EngineError, match="no tokens"):
        tiny_engine.prefill(cache, [])


def test_two_caches_from_two_threads_do_not_disturb_each_other(tiny_engine: TorchEngine) -> None:
    inputs = [[(k * i) % 500 + 3 for i in range(60)] for k in (7, 11, 13, 17)]
    alone = [answer(tiny_engine, ids, 8) for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: answer(tiny_engine, ids, 8), inputs))
    assert together == alone


def test_bfloat16_engine_has_another_identity_and_close_logits(
    tiny_engine: TorchEngine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    half = load_engine(str(tiny_model_dir), dtype="bfloat16", cache_dir=tmp_path, progress=False)
    assert half.identity.digest != tiny_engine.identity.digest
    assert half.identity.model_digest == tiny_engine.identity.model_digest
    exact = tiny_engine.prefill(tiny_engine.new_cache(90), IDS)
    rounded = half.prefill(half.new_cache(90), IDS)
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, exact, atol=0.05 * np.abs(exact).max())
    half.rotary_tables(90)  # the probe accepts bfloat16's rounding


def test_rotary_tables_cover_what_was_asked(tiny_engine: TorchEngine) -> None:
    short, long = tiny_engine.rotary_tables(10), tiny_engine.rotary_tables(300)
    assert short.num_positions == 10
    assert long.cos.shape == (1, 300, 8)
    np.testing.assert_array_equal(long.cos[:, :10], short.cos)
    with pytest.raises(ContextTooLong):
        tiny_engine.rotary_tables(2049)


@pytest.mark.gpu
def test_cuda_gives_the_cpus_answer(tiny_engine: TorchEngine, tiny_model_dir: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    gpu = load_engine(str(tiny_model_dir), device="cuda", progress=False)
    np.testing.assert_allclose(
        gpu.prefill(gpu.new_cache(90), IDS),
        tiny_engine.prefill(tiny_engine.new_cache(90), IDS),
        atol=1e-3,
    )
    assert answer(gpu, IDS, 12) == answer(tiny_engine, IDS, 12)
