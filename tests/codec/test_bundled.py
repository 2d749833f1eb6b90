"""The profile that ships with the product, against the model that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from codec import Codec, Geometry, LevelSet, Profile, bundled_profiles
from codec.cachegen import CachegenStatistics
from codec.texts import machine_texts

if TYPE_CHECKING:
    from engine import TorchEngine

PATH = Path(__file__).resolve().parents[2] / "codec/profiles/smollm2-135m.cachegen.kvprofile"
PROFILE = Profile.load(PATH)
LEVELS = [PROFILE.level_indices()[i] for i in range(len(PROFILE.level_indices()))]


def test_it_is_small_and_complete() -> None:
    assert PATH.stat().st_size < 3_000_000
    assert len(CachegenStatistics.from_profile(PROFILE).levels) == len(LEVELS) >= 5
    assert PROFILE.digest in [p.digest for p in bundled_profiles(PROFILE.model_digest)]


def test_every_level_was_measured_and_coarser_is_smaller_and_worse() -> None:
    names = {info.name for info in PROFILE.levels}
    assert {"fp16", "int8"} <= names
    for info in PROFILE.levels:
        assert info.bits_per_element is not None, info.name
        assert info.kl is not None, info.name
        assert info.ppl_ratio is not None, info.name
        assert info.top1 is not None, info.name
    bits = [info.bits_per_element or 0.0 for info in LEVELS]
    losses = [info.kl or 0.0 for info in LEVELS]
    assert bits == sorted(bits, reverse=True)
    assert losses == sorted(losses)


def test_it_says_what_it_was_made_from() -> None:
    texts = {text.name: text.digest for text in machine_texts(held_out=False)}
    noted = {name: digest for name, _, digest in PROFILE.notes["texts"]}
    assert noted.keys() == texts.keys()
    # The other texts are the standard library's and differ between Python versions.
    for name in (name for name in texts if name.startswith("made-up")):
        assert noted[name] == texts[name]


def test_sharing_tables_costs_under_one_percent() -> None:
    own = PROFILE.notes["bits_per_symbol_own_tables"][1:]
    shared = PROFILE.notes["bits_per_symbol_shared_tables"][1:]
    assert len(own) == len(shared) == len(LEVELS)
    assert all(a <= b <= 1.01 * a for a, b in zip(own, shared, strict=True))


@pytest.mark.e2e
def test_it_fits_the_models_identity_and_codes_its_cache_as_measured(
    smollm2: TorchEngine,
) -> None:
    geometry = smollm2.geometry
    assert smollm2.identity.model_digest == PROFILE.model_digest
    assert PROFILE.geometry == Geometry(
        geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    )
    text = machine_texts(held_out=True)[2].text
    kv = _kv(smollm2, text, 320)
    codec = _codec()
    for info in LEVELS:
        data = codec.encode(kv, level=info.name, token_start=0)
        bits = 8 * len(data) / kv.size
        assert bits == pytest.approx(info.bits_per_element, rel=0.15)
        error = codec.decode(data, dtype=np.float32).kv - kv
        assert float(np.square(error).mean()) < 0.2 * float(np.square(kv).mean())


@pytest.mark.e2e
@pytest.mark.data
def test_texts_it_never_saw_cost_at_most_a_fifth_more(smollm2: TorchEngine, data_dir: Path) -> None:
    codec = _codec()
    middle = LEVELS[len(LEVELS) // 2]
    for path in (
        "prose/news_from_nowhere_pg3261.txt",
        "technical/debian-reference.en.first200k.txt",
    ):
        text = (data_dir / "text" / path).read_text(encoding="utf-8")[20_000:24_000]
        kv = _kv(smollm2, text, 320)
        bits = 8 * len(codec.encode(kv, level=middle.name, token_start=0)) / kv.size
        assert bits < 1.2 * (middle.bits_per_element or 0.0)


def _kv(engine: TorchEngine, text: str, num_tokens: int) -> np.ndarray:
    cache = engine.new_cache(num_tokens)
    engine.fill(cache, engine.tokenizer.encode(text)[:num_tokens], 0)
    return cache.read(0, num_tokens)


def _codec() -> Codec:
    assert PROFILE.level_set is LevelSet.CACHEGEN
    return Codec(PROFILE.geometry, model_digest=PROFILE.model_digest, profiles=[PROFILE])
