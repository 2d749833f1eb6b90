"""Version 2 bitstreams that were written once decode forever."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from codec import CodecError
from tests.golden.make_klt import CASES, FOLDER, KltCase, golden_codec, layer0_of, symbols_digest

MANIFEST: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((FOLDER / "manifest.json").read_text())
}
CODEC = golden_codec()
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_golden_file_is_in_the_manifest() -> None:
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(MANIFEST) == {c.name for c in CASES}


@by_name
def test_decoding_gives_the_same_symbols_and_values_forever(case: KltCase) -> None:
    data = (FOLDER / f"{case.name}.bin").read_bytes()
    assert hashlib.sha256(data).hexdigest() == MANIFEST[case.name]["sha256"]
    assert symbols_digest(CODEC, data) == MANIFEST[case.name]["coefficients_sha256"]
    chunk = CODEC.decode(data, layer0=layer0_of(case), dtype=np.float32)
    with np.load(FOLDER / f"{case.name}.npz") as arrays:
        np.testing.assert_allclose(chunk.kv, arrays["values"], atol=2e-4, rtol=1e-4)
    assert (chunk.level, chunk.token_start) == (case.level, case.token_start)


@by_name
def test_every_truncation_of_a_golden_file_is_a_codec_error(case: KltCase) -> None:
    data = (FOLDER / f"{case.name}.bin").read_bytes()
    layer0 = layer0_of(case)
    for size in range(0, len(data), 3):
        with pytest.raises(CodecError):
            CODEC.decode(data[:size], layer0=layer0)


@by_name
def test_every_flipped_bit_of_a_golden_header_is_a_codec_error(case: KltCase) -> None:
    data = (FOLDER / f"{case.name}.bin").read_bytes()
    layer0 = layer0_of(case)
    for bit in range(8 * 160):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CodecError):
            CODEC.decode(bytes(changed), layer0=layer0)
