"""The native decoder under AddressSanitizer and UndefinedBehaviorSanitizer, on damaged golden files.

`python -m tests.fuzz.sanitize [--inputs N]` builds the library with both, decodes N damaged bitstreams of every
version in a process of its own, and prints how many were tried and refused. Any report of a sanitizer ends the
process with its text and a failure. `make sanitize` runs it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from codec.kernels import build

__all__ = ["Unavailable", "run"]

FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
)
HEADER_BYTES = 128
_FIND_BAD = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float)
ROOT = Path(__file__).resolve().parents[2]


class Unavailable(Exception):
    """This machine's compiler has no sanitizers."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A good bitstream and how to decode what becomes of it."""

    name: str
    data: bytes
    decode: Callable[[bytes], object]


def run(inputs: int) -> str:
    """Build, and decode that many damaged bitstreams in a process of its own.

    Args:
        inputs: how many; 0 makes the child read beyond an array instead, which has to be reported.

    Returns:
        The child's line: inputs tried, refused, decoded.

    Raises:
        Unavailable: there is no compiler with sanitizers.
        RuntimeError: a sanitizer or the driver complained; the message is its report.
    """
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "sanitized.so"
        flags = [flag for flag in build.COMPILE_FLAGS if flag not in ("-O3", "-g0")]
        command = [compiler, *flags, "-O1", *FLAGS, "-shared", "-fPIC"]
        command += ["-o", str(library), str(build.KERNELS / "entry_cpu.cpp")]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            runtime = subprocess.run(
                [compiler, "-print-file-name=libasan.so"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(f"no compiler to build with: {error}") from error
        if made.returncode != 0 or not Path(runtime).is_absolute():
            raise Unavailable(f"the compiler has no sanitizers: {made.stderr[-300:]}")
        child = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.sanitize", "--child", str(library), str(inputs)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "LD_PRELOAD": runtime,
                # The interpreter itself keeps memory to its end.
                "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "OMP_NUM_THREADS": "1",
            },
        )
    if child.returncode != 0:
        raise RuntimeError(f"exit status {child.returncode}\n{child.stderr[-6000:]}")
    return child.stdout.strip()


def seeds() -> Iterator[Seed]:
    """Yield golden files of every version."""
    from tests.golden import make, make_klt, make_refinement

    codec = make.golden_codec()
    for path in sorted(make.FOLDER.glob("*.bin")):
        yield Seed(path.stem, path.read_bytes(), codec.decode)
    klt = make_klt.golden_codec()
    for case in make_klt.CASES:
        layer0 = make_klt.layer0_of(case)
        data = (make_klt.FOLDER / f"{case.name}.bin").read_bytes()
        yield Seed(case.name, data, lambda d, z=layer0: klt.decode(d, layer0=z))  # type: ignore[misc]
    for chain in make_refinement.CASES:
        base, *finer = chain.parts()
        z = chain.layer0()

        def refine(d: bytes, b: bytes = base, z: npt.NDArray[np.float32] = z) -> object:
            return klt.decode(b, refinements=[d], layer0=z)

        yield Seed(f"{chain.name} refinement", finer[0], refine)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Return the bitstream with damage behind correct checksums, or cut."""
    changed = bytearray(data)
    kind = rng.integers(4)
    start = 0 if kind == 0 else HEADER_BYTES
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(start, len(changed)))
        changed[at] = int(rng.integers(256)) if kind == 1 else changed[at] ^ (1 << rng.integers(8))
    if kind == 3:
        changed = changed[: int(rng.integers(HEADER_BYTES, len(changed)))]
        changed[48:56] = len(changed).to_bytes(8, "little")
    changed[120:124] = zlib.crc32(bytes(changed[HEADER_BYTES:])).to_bytes(4, "little")
    changed[124:128] = zlib.crc32(bytes(changed[:124])).to_bytes(4, "little")
    return bytes(changed)


def _child(library: str, inputs: int) -> None:
    from codec import CodecError, native

    loaded = ctypes.CDLL(library)
    setattr(native, "load_library", lambda: loaded)  # noqa: B010 - kernel calls go to the sanitized build
    if inputs == 0:
        find_bad = native.function("kv_find_bad", *_FIND_BAD, restype=ctypes.c_int64)
        find_bad(np.zeros(64, np.float32).ctypes.data, 1 << 14, 0, 1.0)
    rng = np.random.default_rng(5)
    tried = refused = 0
    everything = list(seeds())
    for seed in everything:
        seed.decode(seed.data)  # the good one, too
    while tried < inputs:
        for seed in everything:
            tried += 1
            try:
                seed.decode(damaged(seed.data, rng))
            except CodecError:
                refused += 1
    sys.stdout.write(
        f"{tried} damaged bitstreams from {len(everything)} golden files: {refused} refused, "
        f"{tried - refused} decoded to something, no sanitizer report\n"
    )


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "INPUTS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments.child[0], int(arguments.child[1]))
        return 0
    try:
        sys.stdout.write(run(arguments.inputs) + "\n")
    except Unavailable as error:
        sys.stdout.write(f"not run: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
