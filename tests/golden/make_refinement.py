"""Golden refinements, version 3: writes them, and describes them for the tests.

Each refines a chunk of tests/golden/chunk-v2's profile; decoding must give the same symbols forever. Run
`python -m tests.golden.make_refinement --i-am-changing-the-format` only with a new version, an ADR and a changelog
line in the same commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from codec import Codec, bitstream
from codec.klt import KltTransform
from codec.levels import LevelSet
from tests.codec.klt_builders import make_plain, make_rotary, rotated
from tests.golden.make_klt import golden_codec

FOLDER = Path(__file__).resolve().parent / "chunk-v3"


@dataclass(frozen=True, slots=True)
class RefinementCase:
    """A base and what refines it, in that order, in files `<name>.0.bin`, `<name>.1.bin`, ..."""

    name: str
    levels: tuple[str, ...]
    num_tokens: int
    token_start: int
    seed: int

    def parts(self) -> list[bytes]:
        """The files' bytes."""
        return [(FOLDER / f"{self.name}.{i}.bin").read_bytes() for i, _ in enumerate(self.levels)]

    def layer0(self) -> npt.NDArray[np.float32]:
        """Layer 0 as stored beside the bitstreams."""
        with np.load(FOLDER / f"{self.name}.npz") as arrays:
            return np.asarray(arrays["layer0"], np.float32)


CASES = (
    RefinementCase("chain-sink", ("klt:4", "klt:4>2", "klt:2>0"), 40, 0, 21),
    RefinementCase("two-spans", ("klt:5", "klt:5>3"), 150, 600, 22),
    RefinementCase("one-token", ("klt:3", "klt:3>1"), 1, 9, 23),
)


def symbols_digest(codec: Codec, parts: list[bytes]) -> str:
    """SHA-256 of the refined symbols."""
    transform = codec._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    symbols = transform.blocks.symbols(bitstream.parse(parts[0]))
    for part in parts[1:]:
        symbols = transform.blocks.refined(symbols, bitstream.parse(part))
    return hashlib.sha256(symbols.values.astype("<i4").tobytes()).hexdigest()


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--i-am-changing-the-format", action="store_true", required=True)
    parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    codec = golden_codec()
    manifest = []
    for case in CASES:
        plain = make_plain(case.num_tokens, seed=case.seed)
        kv = rotated(plain, make_rotary(), case.token_start)
        parts = codec.encode_many(
            kv, levels=case.levels, token_start=case.token_start, layer0=plain[0]
        )
        values = codec.decode(parts[0], refinements=parts[1:], layer0=plain[0], dtype=np.float32).kv
        for i, part in enumerate(parts):
            (FOLDER / f"{case.name}.{i}.bin").write_bytes(part)
        np.savez_compressed(FOLDER / f"{case.name}.npz", layer0=plain[0], values=values)
        manifest.append(
            {
                "name": case.name,
                "sha256": [hashlib.sha256(part).hexdigest() for part in parts],
                "symbols_sha256": symbols_digest(codec, parts),
            }
        )
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
