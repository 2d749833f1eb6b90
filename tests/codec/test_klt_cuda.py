"""The CUDA side of klt: compiled here without a device; equal to the CPU where there is one."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from codec import bitstream
from codec.klt import KltTransform
from codec.klt_cuda import CudaKlt, klt_cuda_source
from codec.levels import LevelSet
from tests.codec.klt_builders import make_codec, make_plain, make_rotary, rotated
from tests.codec.test_nvrtc import _compile, nvrtc

__all__ = ["nvrtc"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_klt_kernel_compiles_without_spills(nvrtc: ctypes.CDLL, architecture: str) -> None:
    source = klt_cuda_source()
    kernels = re.findall(r"__global__ void (\w+)\(", source)
    status, log, cubin_bytes = _compile(
        nvrtc, source, f"--gpu-architecture={architecture}", "--ptxas-options=-v"
    )
    assert status == 0, log
    assert cubin_bytes > 0
    assert len(kernels) == 5
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == len(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("token_start", [0, 77])
def test_the_device_decodes_what_the_cpu_decodes(token_start: int) -> None:
    cupy = pytest.importorskip("cupy")
    codec = make_codec()
    plain = make_plain(300, seed=4)
    kv = rotated(plain, make_rotary(), token_start)
    transform = codec._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    device = CudaKlt(transform)
    for level in range(3):
        data = codec.encode(kv, level=f"klt:{level}", token_start=token_start, layer0=plain[0])
        expected = codec.decode(data, layer0=plain[0], dtype=np.float32).kv
        out = cupy.empty(kv.shape, cupy.float32)
        stream = bitstream.parse(data)
        device.check(device.decode(stream, layer0=plain[0], out=out))
        np.testing.assert_allclose(cupy.asnumpy(out), expected, atol=2e-4, rtol=1e-4)
