"""CPU and GPU give the same bytes and the same numbers. Skipped without a CUDA device."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from codec import CodecError, CorruptBitstream, bitstream
from codec.cachegen import CachegenTransform
from tests.codec.builders import make_codec, make_kv, make_profile


@pytest.fixture(scope="module")
def cupy() -> Any:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    module = importlib.import_module("cupy")
    try:
        devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError:
        devices = 0
    if devices == 0:
        pytest.skip("no CUDA device")
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 9, 10, 37, 300, 2570])
@pytest.mark.parametrize("level", [0, 3, 5])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gpu_bytes_and_values_equal_the_cpus(
    cupy: Any, num_tokens: int, level: int, dtype: type[np.floating[Any]]
) -> None:
    from codec.cuda import CudaCachegen

    kv = make_kv(num_tokens, seed=num_tokens)
    kv[:, :, 0] *= 300  # escapes
    array = np.asarray(kv, dtype)
    codec = make_codec()
    data = codec.encode(array, level=f"cachegen:{level}", token_start=0)
    stream = bitstream.parse(data)
    gpu = CudaCachegen(CachegenTransform(make_profile(), num_threads=1))
    blocks = gpu.encode(cupy.asarray(array), level_index=level)
    np.testing.assert_array_equal(blocks.offsets, stream.offsets)
    np.testing.assert_array_equal(blocks.payload, stream.payload)
    out = cupy.empty(array.shape, array.dtype)
    gpu.decode(stream, out=out)
    np.testing.assert_array_equal(cupy.asnumpy(out), codec.decode(data, dtype=dtype).kv)


@pytest.mark.gpu
def test_gpu_notices_damaged_blocks(cupy: Any) -> None:
    from dataclasses import replace

    from codec.cuda import CudaCachegen

    kv = make_kv(300, seed=0)
    stream = bitstream.parse(make_codec().encode(kv, level="cachegen:2", token_start=0))
    payload = stream.payload.copy()
    payload[40] ^= 4
    gpu = CudaCachegen(CachegenTransform(make_profile(), num_threads=1))
    with pytest.raises(CorruptBitstream, match="block 0 is corrupt"):
        gpu.decode(replace(stream, payload=payload), out=cupy.empty(kv.shape, np.float32))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_the_gpu_path_says_what_to_install() -> None:
    from codec.cuda import CudaCachegen

    with pytest.raises(CodecError, match=r"kvtide\[cuda\]"):
        CudaCachegen(CachegenTransform(make_profile(), num_threads=1))
