from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import CacheRangeError, ContextTooLong, KvCache, TorchEngine
from engine.geometry import KvGeometry

GEOMETRY = KvGeometry(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    context_tokens=64,
    vocab_size=100,
    num_query_heads=4,
    rotary_dim=8,
    rotary_interleaved=False,
    rope_kinds=("default",),
    sliding_window_tokens=None,
    sliding_layers=(False, False, False),
    has_qk_norm=False,
)


def new_cache(capacity: int = 40, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(GEOMETRY, capacity, dtype=dtype, device=torch.device("cpu"))


def random_kv(num_tokens: int, seed: int = 0) -> np.ndarray:
    shape = (3, 2, num_tokens, 2, 8)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_read_gives_back_what_was_written_whatever_the_order() -> None:
    kv = random_kv(40)
    cache = new_cache()
    for start, stop in ((25, 40), (0, 7), (7, 25)):
        cache.write(start, kv[:, :, start:stop])
    np.testing.assert_array_equal(cache.read(0, 40), kv)
    np.testing.assert_array_equal(cache.read(5, 6), kv[:, :, 5:6])


def test_float16_goes_in_and_out_unchanged() -> None:
    kv = random_kv(4).astype(np.float16)
    cache = new_cache()
    cache.write(3, kv)
    out = cache.read(3, 7, dtype=np.float16)
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, kv)


def test_a_bfloat16_cache_rounds_and_reads_as_float32() -> None:
    cache = new_cache(dtype=torch.bfloat16)
    cache.write(0, random_kv(40))
    np.testing.assert_allclose(cache.read(0, 40), random_kv(40), rtol=2**-8)
    assert cache.num_bytes == 3 * 2 * 40 * 2 * 8 * 2


def test_read_only_arrays_can_be_written() -> None:
    kv = random_kv(2)
    kv.flags.writeable = False
    cache = new_cache()
    cache.write(0, kv)
    np.testing.assert_array_equal(cache.read(0, 2), kv)


def test_read_copies() -> None:
    cache = new_cache()
    cache.read(0, 1)[:] = 7
    assert not cache.read(0, 1).any()


@pytest.mark.parametrize(
    ("start", "shape", "sentence"),
    [
        (39, (3, 2, 2, 2, 8), "outside the cache of 40 tokens"),
        (-1, (3, 2, 2, 2, 8), "outside the cache"),
        (0, (3, 2, 0, 2, 8), "outside the cache"),
        (0, (3, 2, 2, 1, 8), "the model needs"),
        (0, (3, 2, 2, 8), "the model needs"),
    ],
)
def test_kv_that_does_not_fit_is_refused(start: int, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(CacheRangeError, match=sentence):
        new_cache().write(start, np.zeros(shape, np.float32))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(CacheRangeError, match="float64"):
        new_cache().write(0, np.zeros((3, 2, 1, 2, 8)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "stop"), [(0, 41), (5, 5), (-1, 3), (7, 6)])
def test_a_range_outside_the_cache_cannot_be_read(start: int, stop: int) -> None:
    with pytest.raises(CacheRangeError):
        new_cache().read(start, stop)


def test_capacity_is_bounded_by_the_models_window() -> None:
    with pytest.raises(ContextTooLong, match="65 tokens do not fit the context window of 64"):
        new_cache(65)
    with pytest.raises(CacheRangeError):
        new_cache(0)


def test_layers_are_views() -> None:
    cache = new_cache()
    key, value = cache.layers[1]
    key[4] = 1.0
    value[5] = 2.0
    assert (cache.read(4, 5)[1, 0] == 1).all()
    assert (cache.read(5, 6)[1, 1] == 2).all()


def test_decode_steps_neither_move_nor_copy_the_cache(tiny_engine: TorchEngine) -> None:
    cache = tiny_engine.new_cache(40)
    tiny_engine.fill(cache, list(range(3, 23)))
    view = cache.view(20)
    states = torch.ones(1, 2, 1, 16)
    keys, values = view.update(states, states, 0)
    assert keys.data_ptr() == cache.storage.data_ptr()
    assert values.data_ptr() == cache.storage[0, 1].data_ptr()
    assert keys.shape == (1, 2, 21, 16)
    assert (cache.read(20, 21)[0] == 1).all()


def test_a_model_of_other_width_is_refused_by_the_cache() -> None:
    states = torch.ones(1, 1, 3, 8)  # one head would broadcast over two
    with pytest.raises(CacheRangeError, match="the model makes"):
        new_cache().view(0).update(states, states, 0)
