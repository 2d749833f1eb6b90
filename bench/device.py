"""Decode speed on a GPU: `python -m bench.device`. Builds, checks against the CPU, then prints GB/s of KV written.

Says so and ends with 0 where there is no GPU or no CuPy. Times are of CUDA events around whole decodes, uploads
and the host's share included, warm-up excluded; inputs and outputs rotate over more memory than the L2 cache.
Under four minutes on one GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.synthetic import draw_plain, llama_rotary, rotated_half, synthetic_profile
from codec import Codec, Geometry, Profile
from codec.bitstream import parse
from codec.klt import KltTransform
from codec.klt_cuda import CudaKlt

__all__ = ["MODELS", "DeviceRow", "Shape", "missing", "num_rotated", "table_lines"]

PROFILE = Path(__file__).resolve().parents[1] / "codec/profiles/smollm2-135m.klt.kvprofile"
LEVELS = ("klt:2", "klt:4")
ROUNDS = 20
TOLERANCE = 2e-2
"""Largest difference of fp16 caches, CPU and device, over the cache's largest number; float32 sums differ in order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's geometry, and what is decoded of it."""

    geometry: Geometry
    layers_per_group: int
    num_tokens: int


MODELS = {
    "SmolLM2-135M": Shape(Geometry(30, 3, 64), 5, 1536),
    "Llama-3-8B": Shape(Geometry(32, 8, 128), 1, 1024),
    "Llama-3-70B": Shape(Geometry(80, 8, 128), 1, 256),
}


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One line of the table."""

    model: str
    what: str
    bits_per_element: float | None
    median_ms: float
    gb_per_s: float
    """fp16 bytes of KV written over the median time."""


def missing() -> str | None:
    """Return a sentence that says why nothing can be measured here; None if it can."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return "CuPy is not installed (pip install 'kvtide[cuda]'), so nothing was measured on a device."
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # whatever a missing driver raises
        return f"There is no usable CUDA device ({error}), so nothing was measured."
    return None if count else "There is no CUDA device here, so nothing was measured."


def num_rotated(bytes_each: int, l2_bytes: int) -> int:
    """Return how many buffers to go round, so that a buffer has left the L2 cache before it is used again."""
    return max(2, -(-2 * l2_bytes // bytes_each) + 1)


def table_lines(rows: Sequence[DeviceRow]) -> list[str]:
    """Return the table as text."""
    lines = [f"{'model':14} {'what':34} {'b/e':>7} {'ms':>9} {'GB/s of fp16 KV':>16}"]
    for row in rows:
        bits = "" if row.bits_per_element is None else f"{row.bits_per_element:.3f}"
        lines.append(
            f"{row.model:14} {row.what:34} {bits:>7} {row.median_ms:9.3f} {row.gb_per_s:16.1f}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--threads", type=int, default=8, help="of the CPU, for encoding")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    why = missing()
    if why is not None:
        print(why)
        return 0
    rows: list[DeviceRow] = []
    for name in arguments.models.split(","):
        rows += measure_model(name, MODELS[name], num_threads=arguments.threads)
    print("\n".join([_device_line(), *table_lines(rows)]))
    if arguments.json:
        report = {"device": _device_line(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_model(name: str, shape: Shape, *, num_threads: int) -> list[DeviceRow]:
    """Check and time one geometry on the current device.

    Raises:
        AssertionError: the device encodes other bytes than the CPU, or its cache is out of tolerance.
    """
    cupy = importlib.import_module("cupy")
    profile = synthetic_profile(
        Profile.load(PROFILE), shape.geometry, layers_per_group=shape.layers_per_group
    )
    rotary = llama_rotary(shape.geometry, shape.num_tokens)
    codec = Codec(
        shape.geometry,
        model_digest=profile.model_digest,
        profiles=[profile],
        num_threads=num_threads,
        rotary=rotary,
    )
    plain = draw_plain(profile, shape.num_tokens, seed=2)
    kv = rotated_half(plain, rotary)
    layer0 = plain[0].astype(np.float32)
    transform = KltTransform(profile, num_threads=num_threads, rotary=rotary)
    device = CudaKlt(transform)
    l2_bytes = int(cupy.cuda.Device().attributes["L2CacheSize"])
    outputs = [cupy.empty(kv.shape, cupy.float16) for _ in range(num_rotated(kv.nbytes, l2_bytes))]

    def row(what: str, bits: float | None, run: Callable[[int], object]) -> DeviceRow:
        seconds = _median_s(run)
        return DeviceRow(name, what, bits, 1e3 * seconds, kv.nbytes / seconds / 1e9)

    rows = []
    for level, data in zip(
        LEVELS,
        codec.encode_many(kv, levels=LEVELS, token_start=0, layer0=layer0),
        strict=True,
    ):
        _check(codec, transform, device, data, layer0, outputs[0])
        streams = [parse(bytes(data)) for _ in outputs]
        rows.append(
            row(
                f"decode {level}",
                8 * len(data) / kv.size,
                lambda i, streams=streams: device.decode(  # type: ignore[misc]
                    streams[i % len(streams)], layer0=layer0, out=outputs[i % len(outputs)]
                ),
            )
        )
    rows.append(
        row(
            "device-to-device copy",
            None,
            lambda i: cupy.copyto(outputs[i % len(outputs)], outputs[(i + 1) % len(outputs)]),
        )
    )
    extra = (_nvcomp(kv, outputs, row), _int4(kv, row))
    return rows + [made for made in extra if made is not None]


def _check(
    codec: Codec,
    transform: KltTransform,
    device: CudaKlt,
    data: bytes,
    layer0: npt.NDArray[np.float32],
    out: Any,
) -> None:
    cupy = importlib.import_module("cupy")
    stream = parse(data)
    symbols = transform.blocks.symbols(stream)
    payload, _ = device.encode_symbols(
        cupy.asarray(symbols.values.astype(np.int16)),
        cupy.asarray(symbols.classes),
        level_index=stream.level_index,
    )
    if payload.tobytes() != stream.payload[int(stream.offsets[1]) :].tobytes():
        raise AssertionError(f"{stream.level}: the device encodes other bytes than the CPU")
    device.check(device.decode(stream, layer0=layer0, out=out))
    expected = codec.decode(data, layer0=layer0).kv.astype(np.float32)
    difference = float(np.abs(cupy.asnumpy(out).astype(np.float32) - expected).max())
    if difference > TOLERANCE * float(np.abs(expected).max()):
        raise AssertionError(f"{stream.level}: the device's cache differs by {difference:g}")


def _median_s(run: Callable[[int], object]) -> float:
    cupy = importlib.import_module("cupy")
    for number in range(3):
        run(number)
    cupy.cuda.Device().synchronize()
    taken = []
    for number in range(ROUNDS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        run(number)
        stop.record()
        stop.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return float(np.median(taken))


def _nvcomp(
    kv: npt.NDArray[np.float16],
    outputs: Sequence[Any],
    row: Callable[[str, float | None, Callable[[int], object]], DeviceRow],
) -> DeviceRow | None:
    """Decode the cache's int8 symbols with nvCOMP's ANS, if its wheel is here; rates count the fp16 cache."""
    try:
        nvcomp = importlib.import_module("nvidia.nvcomp")
    except ImportError:
        return None
    cupy = importlib.import_module("cupy")
    scale = np.maximum(np.abs(kv.astype(np.float32)).max(axis=-1, keepdims=True), 1e-6)
    symbols = np.rint(kv / scale * 127).astype(np.int8)
    ans = nvcomp.Codec(algorithm="ANS")
    packed = [ans.encode(nvcomp.as_array(cupy.asarray(symbols))) for _ in outputs]
    bits = 8 * float(packed[0].size) / kv.size
    return row("nvCOMP ANS of int8 symbols", bits, lambda i: ans.decode(packed[i % len(packed)]))


def _int4(
    kv: npt.NDArray[np.float16],
    row: Callable[[str, float | None, Callable[[int], object]], DeviceRow],
) -> DeviceRow | None:
    """Dequantize 4-bit symbols with torch, if it sees the device, on CuPy's current stream."""
    import torch

    if not torch.cuda.is_available():
        return None
    cupy = importlib.import_module("cupy")
    packed = torch.randint(0, 256, (kv.size // 2,), dtype=torch.uint8, device="cuda")
    scale = torch.ones((kv.size // kv.shape[-1], 1), dtype=torch.float16, device="cuda")

    def run(number: int) -> object:
        del number
        stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            pair = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.float16) - 8
            return pair.view(len(scale), -1) * scale

    return row("torch dequantize of int4", 4 + 16 / kv.shape[-1], run)


def _device_line() -> str:
    cupy = importlib.import_module("cupy")
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return f"device: {properties['name'].decode()}, CuPy {cupy.__version__}, {ROUNDS} rounds"


if __name__ == "__main__":
    sys.exit(main())
