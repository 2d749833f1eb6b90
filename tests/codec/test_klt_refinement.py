"""Refinements of level set klt: what they decode to, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from codec import Codec, CodecError, CorruptBitstream, UnknownLevel, bitstream, max_encoded_bytes
from codec.klt import KltTransform
from codec.klt_blocks import split_frequencies
from codec.klt_native import SPLIT_LIMIT
from codec.levels import LevelSet, level_name, parse_refinement, refinement_name
from codec.tables import PROB_SCALE
from tests.codec.klt_builders import GEOMETRY, make_codec, make_plain, make_profile, rotated

F32 = npt.NDArray[np.float32]


def chunk(num_tokens: int, token_start: int, *, seed: int = 3) -> tuple[F32, F32]:
    plain = make_plain(num_tokens, seed=seed)
    rotary = make_codec().rotary
    assert rotary is not None
    return rotated(plain, rotary, token_start), np.ascontiguousarray(plain[0])


def encoded(codec: Codec, levels: Sequence[str], num_tokens: int, token_start: int) -> list[bytes]:
    kv, layer0 = chunk(num_tokens, token_start)
    return codec.encode_many(kv, levels=levels, token_start=token_start, layer0=layer0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("num_tokens", "token_start"), [(300, 0), (150, 512), (33, 7), (1, 5)])
def test_a_refined_level_is_the_finer_level(
    num_tokens: int, token_start: int, threads: int
) -> None:
    codec = make_codec(num_threads=threads)
    for info in codec.refinements():
        base, refinement, fine = encoded(
            codec, [info.base, info.name, info.fine], num_tokens, token_start
        )
        assert len(refinement) <= max_encoded_bytes(GEOMETRY, num_tokens, info.name)
        layer0 = chunk(num_tokens, token_start)[1]
        got = codec.decode(base, refinements=[refinement], layer0=layer0, dtype=np.float32)
        want = codec.decode(fine, layer0=layer0, dtype=np.float32)
        assert got.level == info.fine
        assert (got.token_start, got.token_stop) == (token_start, token_start + num_tokens)
        np.testing.assert_array_equal(got.kv, want.kv)


def test_refinements_chain_to_the_finest_level() -> None:
    codec = make_codec()
    names = ["klt:4", "klt:4>2", "klt:2>0", "klt:0"]
    base, first, second, finest = encoded(codec, names, 200, 0)
    layer0 = chunk(200, 0)[1]
    got = codec.decode(base, refinements=[first, second], layer0=layer0, dtype=np.float32)
    np.testing.assert_array_equal(got.kv, codec.decode(finest, layer0=layer0, dtype=np.float32).kv)


def test_sharing_the_transform_changes_no_byte() -> None:
    codec = make_codec()
    names = [info.name for info in codec.levels()]
    names += [info.name for info in codec.refinements()]
    kv, layer0 = chunk(140, 0)
    together = codec.encode_many(kv, levels=names, token_start=0, layer0=layer0)
    alone = [codec.encode(kv, level=name, token_start=0, layer0=layer0) for name in names]
    assert together == alone


def test_base_and_refinement_cost_little_more_than_the_level() -> None:
    codec = make_codec()
    for info in codec.refinements():
        base, refinement, fine = encoded(codec, [info.base, info.name, info.fine], 300, 0)
        payloads = [bitstream.parse(data).payload.nbytes for data in (base, refinement, fine)]
        assert payloads[0] + payloads[1] < 1.35 * payloads[2]
        assert payloads[1] < payloads[2]


def test_names_of_refinements() -> None:
    assert refinement_name(6, 4) == "klt:6>4"
    assert parse_refinement("klt:6>4") == (LevelSet.KLT, 6, 4)
    for name in ("klt:6", "klt:6>5", "klt:4>6", "cachegen:3>1", "klt:6>", "klt:6>-1", ">", "x>1"):
        assert parse_refinement(name) is None
    codec = make_codec()
    assert [info.name for info in codec.refinements()] == [
        refinement_name(base, base - 2) for base in (5, 4, 3, 2)
    ]
    assert codec.refinements()[0].base == level_name(LevelSet.KLT, 5)


def test_a_profile_without_thirds_has_no_refinements() -> None:
    profile = make_profile()
    steps = profile.arrays["steps"] * np.asarray([1, 1, 1.01, 1, 1, 1], np.float32)
    odd = type(profile)(
        profile.model_digest,
        profile.geometry,
        profile.level_set,
        profile.levels,
        {**profile.arrays, "steps": steps},
    )
    codec = Codec(
        GEOMETRY,
        model_digest=profile.model_digest,
        profiles=[type(profile).from_bytes(odd.to_bytes())],
        rotary=make_codec().rotary,
    )
    assert [info.name for info in codec.refinements()] == ["klt:5>3", "klt:3>1"]
    with pytest.raises(UnknownLevel, match="klt:4>2"):
        encoded(codec, ["klt:4>2"], 20, 0)


def test_a_refinement_refuses_what_it_does_not_refine() -> None:
    codec = make_codec()
    base, first, second = encoded(codec, ["klt:4", "klt:4>2", "klt:2>0"], 100, 0)
    layer0 = chunk(100, 0)[1]
    with pytest.raises(CorruptBitstream, match="stands alone"):
        codec.decode(first, layer0=layer0)
    with pytest.raises(CorruptBitstream, match="does not refine"):
        codec.decode(base, refinements=[second, first], layer0=layer0)
    with pytest.raises(CorruptBitstream, match="does not refine"):
        codec.decode(base, refinements=[base], layer0=layer0)
    (elsewhere,) = encoded(codec, ["klt:4>2"], 100, 100)
    with pytest.raises(CorruptBitstream, match="other tokens"):
        codec.decode(base, refinements=[elsewhere], layer0=layer0)
    kv, other0 = chunk(100, 0, seed=8)
    other = codec.encode(kv, level="klt:4>2", token_start=0, layer0=other0)
    with pytest.raises(CorruptBitstream, match="not of this chunk"):
        codec.decode(base, refinements=[other], layer0=layer0)
    (int8,) = encoded(codec, ["int8"], 100, 0)
    with pytest.raises(CorruptBitstream, match="does not refine"):
        codec.decode(int8, refinements=[first], layer0=layer0)


def test_damaged_refinements_raise_or_decode_nothing_else() -> None:
    codec = make_codec()
    base, refinement = encoded(codec, ["klt:4", "klt:4>2"], 60, 0)
    layer0 = chunk(60, 0)[1]
    for size in range(0, len(refinement), 7):
        with pytest.raises(CodecError):
            codec.decode(base, refinements=[refinement[:size]], layer0=layer0)
    stream = bitstream.parse(refinement)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(200):  # behind correct checksums, so that the kernels see the damage
        payload = stream.payload.copy()
        place = int(rng.integers(payload.size))
        payload[place] ^= np.uint8(1 << rng.integers(8))
        damaged = bitstream.pack(
            bitstream.Bitstream(
                **{
                    name: getattr(stream, name)
                    for name in bitstream.Bitstream.__slots__
                    if name != "payload"
                },
                payload=payload,
            )
        )
        try:
            codec.decode(base, refinements=[damaged], layer0=layer0)
        except CorruptBitstream:
            refused += 1
    assert refused > 150


def test_splits_are_shares_of_the_tables() -> None:
    transform = make_codec()._transforms[LevelSet.KLT]
    assert isinstance(transform, KltTransform)
    tables = transform.plan.tables
    splits = split_frequencies(tables)
    assert np.all(splits["first"] >= 1)
    assert np.all(splits["second"] > splits["first"])
    assert np.all(splits["second"] < PROB_SCALE)
    for table in range(tables.num_tables):
        low, start, stop = tables.lows[table], *tables.starts[table : table + 2]
        frequency = tables.frequencies[start : stop - 1].astype(np.float64)
        middle = -int(low)
        if not 1 <= middle < len(frequency) - 1:
            continue
        part = frequency[middle - 1 : middle + 2]
        first, second = (int(splits[table, SPLIT_LIMIT][name]) for name in ("first", "second"))
        got = np.asarray([first, second - first, PROB_SCALE - second]) / PROB_SCALE
        np.testing.assert_allclose(got, part / part.sum(), atol=1e-3)
