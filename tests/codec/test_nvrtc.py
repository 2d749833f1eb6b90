"""Compiles the CUDA entry without a GPU: NVRTC needs none."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest

from codec.cuda import NVRTC_OPTIONS, cuda_source


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    found = sorted(path for root in roots for path in Path(root).glob("*/lib/libnvrtc.so.*"))
    if not found:
        pytest.skip("wheel nvidia-cuda-nvrtc is not installed")
    return ctypes.CDLL(str(found[-1]))


def _compile(nvrtc: ctypes.CDLL, source: str, *options: str) -> tuple[int, str, int]:
    program = ctypes.c_void_p()
    assert (
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"entry_cuda.cu", 0, None, None
        )
        == 0
    )
    arguments = [option.encode() for option in (*NVRTC_OPTIONS, *options)]
    status = nvrtc.nvrtcCompileProgram(
        program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)
    )
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = ctypes.c_size_t()
    if status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(cubin))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), cubin.value


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles_without_spills(nvrtc: ctypes.CDLL, architecture: str) -> None:
    source = cuda_source()
    kernels = re.findall(r"__global__ void (\w+)\(", source)
    status, log, cubin_bytes = _compile(
        nvrtc, source, f"--gpu-architecture={architecture}", "--ptxas-options=-v"
    )
    assert status == 0, log
    assert cubin_bytes > 0
    assert len(kernels) == 4
    for kernel in kernels:
        assert f"'{kernel}' for '{architecture}'" in log
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == len(kernels)


def test_a_broken_source_does_not_compile(nvrtc: ctypes.CDLL) -> None:
    status, log, _ = _compile(nvrtc, cuda_source() + "\nnonsense;", "--gpu-architecture=sm_90")
    assert status != 0
    assert "nonsense" in log
