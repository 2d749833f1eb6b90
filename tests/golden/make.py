"""Golden bitstreams: writes them, and describes them for the tests.

Decoding them must give the same numbers forever; encoding must give the same bytes until the format's
version changes. Run `python tests/golden/make.py --i-am-changing-the-format` only with a new version, an
ADR and a changelog line in the same commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from codec import Codec, Geometry, Profile
from codec.calibrate import CachegenCalibration

FOLDER = Path(__file__).resolve().parent / "chunk-v1"
GEOMETRY = Geometry(num_layers=3, num_kv_heads=1, head_dim=4)
MODEL_DIGEST = hashlib.sha256(b"golden model").digest()


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One golden file."""

    name: str
    level: str
    num_tokens: int
    token_start: int
    seed: int
    dtype: str


CASES = (
    GoldenCase("fp16", "fp16", 13, 0, 1, "float16"),
    GoldenCase("fp16-from-float32", "fp16", 3, 40, 2, "float32"),
    GoldenCase("int8", "int8", 13, 1536, 3, "float32"),
    GoldenCase("cachegen-0", "cachegen:0", 37, 0, 4, "float16"),
    GoldenCase("cachegen-2-one-token", "cachegen:2", 1, 4095, 5, "float32"),
    GoldenCase("cachegen-3-all-lanes", "cachegen:3", 300, 3072, 6, "float32"),
    GoldenCase("cachegen-5", "cachegen:5", 20, 10, 7, "float32"),
)


def golden_kv(case: GoldenCase) -> npt.NDArray[np.float32] | npt.NDArray[np.float16]:
    """Numbers made of integers only, so that every machine and NumPy makes the same ones."""
    shape = GEOMETRY.kv_shape(case.num_tokens)
    raw = np.random.PCG64(case.seed).random_raw(int(np.prod(shape)))
    noise = (raw >> np.uint64(40)).astype(np.int64) % 4001 - 2000
    token = np.arange(case.num_tokens)[None, None, :, None, None]
    channel = np.arange(GEOMETRY.head_dim)[None, None, None, None, :]
    wave = (token * (3 + channel)) % 400 - 200
    values = noise.reshape(shape) * (1 + channel) + 20 * wave + 900 * channel
    if case.num_tokens > 2:
        values[1, 0, 2] = 0
        values[1, 1, 2] = 60_000 * 1024  # far outside every table
    kv = np.asarray(values / np.float64(1024), np.float32)
    return kv.astype(np.float16) if case.dtype == "float16" else kv


def golden_profile() -> Profile:
    """The profile of the golden files; read from its file, because calibration may round differently."""
    return Profile.load(FOLDER / "profile.kvprofile")


def golden_codec() -> Codec:
    """A codec for the golden files."""
    return Codec(GEOMETRY, model_digest=MODEL_DIGEST, profiles=[golden_profile()], num_threads=1)


def sha256(array: npt.NDArray[np.generic]) -> str:
    """SHA-256 of an array's bytes, little-endian."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--i-am-changing-the-format", action="store_true", required=True)
    parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    calibration = CachegenCalibration(GEOMETRY)
    arrays = [
        np.asarray(golden_kv(GoldenCase("", "", 200, 0, seed, "float32")).clip(-64, 64), np.float32)
        for seed in range(50, 54)
    ]
    for kv in arrays:
        calibration.add_scales(kv)
    for kv in arrays:
        calibration.add_counts(kv)
    profile = calibration.build(model_digest=MODEL_DIGEST, notes={"model": "golden"})
    (FOLDER / "profile.kvprofile").write_bytes(profile.to_bytes())
    codec = golden_codec()
    manifest = []
    for case in CASES:
        data = codec.encode(golden_kv(case), level=case.level, token_start=case.token_start)
        (FOLDER / f"{case.name}.bin").write_bytes(data)
        manifest.append(
            {
                "name": case.name,
                "level": case.level,
                "seed": case.seed,
                "shape": list(GEOMETRY.kv_shape(case.num_tokens)),
                "token_start": case.token_start,
                "input_dtype": case.dtype,
                "input_sha256": sha256(golden_kv(case)),
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "float32_sha256": sha256(codec.decode(data, dtype=np.float32).kv),
                "float16_sha256": sha256(codec.decode(data, dtype=np.float16).kv),
            }
        )
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
