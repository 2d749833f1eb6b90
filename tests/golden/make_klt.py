"""Golden bitstreams of version 2: writes them, and describes them for the tests.

Decoding must give the same symbols forever, and the same values within the rounding of matrix products. Run
`python -m tests.golden.make_klt --i-am-changing-the-format` only with a new version, an ADR and a changelog line
in the same commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from codec import Codec, Profile, bitstream
from codec.klt import KltTransform
from codec.levels import LevelSet
from tests.codec.klt_builders import (
    GEOMETRY,
    MODEL_DIGEST,
    make_plain,
    make_profile,
    make_rotary,
    rotated,
)

FOLDER = Path(__file__).resolve().parent / "chunk-v2"


@dataclass(frozen=True, slots=True)
class KltCase:
    """One golden file."""

    name: str
    level: str
    num_tokens: int
    token_start: int
    seed: int


CASES = (
    KltCase("klt-0-sink", "klt:0", 40, 0, 11),
    KltCase("klt-2-two-spans", "klt:2", 150, 600, 12),
    KltCase("klt-4-one-token", "klt:4", 1, 9, 13),
    KltCase("klt-5", "klt:5", 70, 0, 14),
)


def golden_codec() -> Codec:
    """A codec with the profile of the golden files, read from its file."""
    return Codec(
        GEOMETRY,
        model_digest=MODEL_DIGEST,
        profiles=[Profile.load(FOLDER / "profile.kvprofile")],
        num_threads=1,
        rotary=make_rotary(),
    )


def symbols_digest(codec: Codec, data: bytes) -> str:
    """SHA-256 of the dequantized coefficients: exact numbers, no matrix product in them."""
    transform = codec._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    coefficients = transform.blocks.coefficients(bitstream.parse(data))
    return hashlib.sha256(coefficients.astype("<f4").tobytes()).hexdigest()


def layer0_of(case: KltCase) -> npt.NDArray[np.float32]:
    """Layer 0 as stored beside the bitstream."""
    with np.load(FOLDER / f"{case.name}.npz") as arrays:
        return np.asarray(arrays["layer0"], np.float32)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--i-am-changing-the-format", action="store_true", required=True)
    parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "profile.kvprofile").write_bytes(make_profile().to_bytes())
    codec = golden_codec()
    manifest = []
    for case in CASES:
        plain = make_plain(case.num_tokens, seed=case.seed)
        kv = rotated(plain, make_rotary(), case.token_start)
        data = codec.encode(kv, level=case.level, token_start=case.token_start, layer0=plain[0])
        values = codec.decode(data, layer0=plain[0], dtype=np.float32).kv
        (FOLDER / f"{case.name}.bin").write_bytes(data)
        np.savez_compressed(FOLDER / f"{case.name}.npz", layer0=plain[0], values=values)
        manifest.append(
            {
                "name": case.name,
                "level": case.level,
                "token_start": case.token_start,
                "sha256": hashlib.sha256(data).hexdigest(),
                "coefficients_sha256": symbols_digest(codec, data),
            }
        )
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
