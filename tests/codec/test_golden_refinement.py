"""Version 3 bitstreams that were written once decode forever."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from codec import CodecError
from tests.golden.make_klt import golden_codec
from tests.golden.make_refinement import CASES, FOLDER, RefinementCase, symbols_digest

MANIFEST: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((FOLDER / "manifest.json").read_text())
}
CODEC = golden_codec()
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_golden_file_is_in_the_manifest() -> None:
    names = {path.name for path in FOLDER.glob("*.bin")}
    assert names == {f"{c.name}.{i}.bin" for c in CASES for i in range(len(c.levels))}
    assert set(MANIFEST) == {case.name for case in CASES}


@by_name
def test_decoding_gives_the_same_symbols_and_values_forever(case: RefinementCase) -> None:
    parts = case.parts()
    assert [hashlib.sha256(part).hexdigest() for part in parts] == MANIFEST[case.name]["sha256"]
    assert symbols_digest(CODEC, parts) == MANIFEST[case.name]["symbols_sha256"]
    chunk = CODEC.decode(parts[0], refinements=parts[1:], layer0=case.layer0(), dtype=np.float32)
    with np.load(FOLDER / f"{case.name}.npz") as arrays:
        np.testing.assert_allclose(chunk.kv, arrays["values"], atol=2e-4, rtol=1e-4)
    assert chunk.level == f"klt:{case.levels[-1].partition('>')[2]}"


@by_name
def test_every_flipped_bit_of_a_golden_header_is_a_codec_error(case: RefinementCase) -> None:
    base, *refinements = case.parts()
    layer0 = case.layer0()
    for bit in range(8 * 160):
        changed = bytearray(refinements[0])
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CodecError):
            CODEC.decode(base, refinements=[bytes(changed), *refinements[1:]], layer0=layer0)
