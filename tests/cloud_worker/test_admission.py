from __future__ import annotations

from dataclasses import replace

import pytest

from cloud_worker.admission import SessionPlan, Terms, examine, terms_of
from codec import Codec
from engine import TorchEngine
from engine.chunk_keys import derive_chunk_keys
from wire import ChunkRange, Open, Refuse, RefuseCode

TOKENS = tuple(range(3, 43))
RANGES = ((0, 16), (16, 32), (32, 40))
PROFILES = b"p" * 32


@pytest.fixture
def terms(engine: TorchEngine, codec: Codec) -> Terms:
    return terms_of(
        codec,
        tenant="clinic",
        model_name="tiny",
        model_digest=engine.identity.digest,
        profile_digest=PROFILES,
        vocab_size=engine.geometry.vocab_size,
        context_tokens=engine.geometry.context_tokens,
        element_bytes=4,
        max_answer_tokens=64,
        window_bytes=1000,
    )


def opening(terms: Terms, tokens: tuple[int, ...] = TOKENS) -> Open:
    keys = derive_chunk_keys(
        tokens,
        RANGES,
        model_digest=terms.model_digest,
        profile_digest=terms.profile_digest,
        tenant=terms.tenant,
    )
    return Open(
        tenant=terms.tenant,
        inbox="_INBOX.a",
        model_name="tiny",
        model_digest=terms.model_digest,
        profile_digest=terms.profile_digest,
        chunks=tuple(
            ChunkRange(start, stop, key) for (start, stop), key in zip(RANGES, keys, strict=True)
        ),
        max_chunk_bytes=5000,
        question_tokens=10,
        max_tokens=20,
        deadline_s=1.0,
    )


def test_a_fitting_session_gets_its_needs_counted(terms: Terms) -> None:
    plan = examine(opening(terms), TOKENS, terms)
    assert isinstance(plan, SessionPlan)
    assert plan.ranges == RANGES
    assert plan.capacity_tokens == 40 + 10 + 20
    elements = 3 * 2 * 2 * 16
    assert plan.need.cache_bytes == 70 * elements * 4
    assert plan.need.chunk_bytes == 16 * elements * 2
    assert plan.window_bytes == plan.need.window_bytes == 10_000


def test_another_model_is_refused_with_both_digests(terms: Terms) -> None:
    refuse = examine(replace(opening(terms), model_digest=b"x" * 32), TOKENS, terms)
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.IDENTITY_MISMATCH
    assert refuse.expected == terms.model_digest.hex()
    assert refuse.actual == (b"x" * 32).hex()
    assert refuse.expected in refuse.sentence
    assert refuse.actual in refuse.sentence


def test_other_profiles_are_refused_with_both_digests(terms: Terms) -> None:
    refuse = examine(replace(opening(terms), profile_digest=b"x" * 32), TOKENS, terms)
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.PROFILE_MISMATCH
    assert (refuse.expected, refuse.actual) == (PROFILES.hex(), (b"x" * 32).hex())


def test_a_key_that_does_not_follow_from_the_tokens_is_refused(terms: Terms) -> None:
    other = (*TOKENS[:20], 99, *TOKENS[21:])
    refuse = examine(opening(terms), other, terms)
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.KEY_MISMATCH
    assert "chunk 1" in refuse.sentence
    assert refuse.expected != refuse.actual


def test_a_context_that_does_not_fit_the_model_is_refused_with_the_numbers(terms: Terms) -> None:
    refuse = examine(replace(opening(terms), question_tokens=453), TOKENS, terms)
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.CONTEXT_TOO_LONG
    assert "513 tokens" in refuse.sentence
    assert "512" in refuse.sentence


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tenant": "shop"}, "serves tenant clinic, not shop"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 65}, "max_tokens is 65"),
        ({"question_tokens": 0}, "question_tokens is 0"),
        ({"max_chunk_bytes": 10**9}, "max_chunk_bytes is 1000000000"),
    ],
)
def test_an_impossible_request_is_refused_by_name(
    terms: Terms, changes: dict[str, object], named: str
) -> None:
    refuse = examine(replace(opening(terms), **changes), TOKENS, terms)  # type: ignore[arg-type]
    assert isinstance(refuse, Refuse)
    assert refuse.code is RefuseCode.BAD_REQUEST
    assert named in refuse.sentence


def test_a_token_outside_the_vocabulary_is_refused(terms: Terms) -> None:
    tokens = (*TOKENS[:39], 256)
    refuse = examine(opening(terms, tokens), tokens, terms)
    assert isinstance(refuse, Refuse)
    assert "token id 256" in refuse.sentence


def test_the_largest_bitstream_of_the_largest_chunk_is_allowed(terms: Terms) -> None:
    bound = terms.max_chunk_bytes(16)
    plan = examine(replace(opening(terms), max_chunk_bytes=bound), TOKENS, terms)
    assert isinstance(plan, SessionPlan)
    assert plan.window_bytes == 2 * bound
