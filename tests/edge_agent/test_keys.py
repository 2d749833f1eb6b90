from __future__ import annotations

import os
import subprocess
import sys

import pytest

from edge_agent.keys import chunk_spans, derive_context_id, profile_set_digest, text_digest

MODEL = bytes(range(32))
PROFILE = profile_set_digest([b"a" * 32, b"b" * 32])

# Worked out once by this code, then frozen: a change here orphans every stored chunk of every user.
GOLDEN_KEYS = [
    "980691c0a4b06d9be734e8a1e0424bd03cea24081408e1fa09ad866a6adcc808",
    "6c2b38547f77b09870294223bb93516336acfe2bab229dccaa894ce1d3956cd2",
    "91808903006a2a067d08a1b794945182eb617751208f20140d4b721acf60e449",
]


def spans(
    ids: list[int],
    *,
    chunk_tokens: int = 4,
    model: bytes = MODEL,
    profile: bytes = PROFILE,
    tenant: str = "acme",
) -> list[bytes]:
    cut = chunk_spans(
        ids,
        chunk_tokens=chunk_tokens,
        model_digest=model,
        profile_digest=profile,
        tenant=tenant,
    )
    return [span.key for span in cut]


def test_keys_equal_the_golden_ones() -> None:
    assert [key.hex() for key in spans(list(range(100, 110)))] == GOLDEN_KEYS


def test_keys_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = (
        "from tests.edge_agent.test_keys import spans;"
        "print(','.join(k.hex() for k in spans(list(range(100, 110)))))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip().split(",") == GOLDEN_KEYS


def test_chunks_cover_every_token_once_and_the_last_may_be_short() -> None:
    cut = chunk_spans(
        list(range(10)), chunk_tokens=4, model_digest=MODEL, profile_digest=PROFILE, tenant="t"
    )
    assert [(s.token_start, s.token_stop) for s in cut] == [(0, 4), (4, 8), (8, 10)]
    assert sum(s.num_tokens for s in cut) == 10


def test_no_tokens_give_no_chunks() -> None:
    assert spans([]) == []


def test_a_token_before_the_chunk_changes_its_key() -> None:
    first, second = spans([1, 2, 3, 4, 5, 6]), spans([9, 2, 3, 4, 5, 6])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_token_after_the_chunk_leaves_its_key() -> None:
    assert spans([1, 2, 3, 4, 5, 6])[0] == spans([1, 2, 3, 4, 9, 9])[0]


def test_every_part_of_the_identity_changes_the_key() -> None:
    ids = [1, 2, 3]
    keys = [
        spans(ids)[0],
        spans(ids, model=bytes(32))[0],
        spans(ids, profile=bytes(32))[0],
        spans(ids, tenant="other")[0],
    ]
    assert len(set(keys)) == len(keys)


def test_another_start_with_the_same_end_changes_the_key() -> None:
    assert spans([1, 2, 3, 4], chunk_tokens=4)[0] != spans([1, 2, 3, 4], chunk_tokens=2)[1]


def test_field_borders_matter() -> None:
    assert spans([1], model=b"ab", tenant="c")[0] != spans([1], model=b"a", tenant="bc")[0]


def test_profile_set_ignores_order_and_repeats() -> None:
    assert profile_set_digest([b"x", b"y"]) == profile_set_digest([b"y", b"x", b"y"])
    assert profile_set_digest([]) != profile_set_digest([b"x"])


def test_chunk_tokens_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        spans([1], chunk_tokens=0)


def test_context_id_names_the_content() -> None:
    def name(tenant: str, ids: list[int]) -> str:
        return derive_context_id(tenant=tenant, model_digest=MODEL, token_ids=ids)

    assert name("a", [1, 2]) == name("a", [1, 2])
    assert len({name("a", [1, 2]), name("b", [1, 2]), name("a", [1, 3])}) == 3
    assert name("a", [1, 2]).startswith("ctx-")


def test_text_digest_differs_from_a_plain_hash_of_another_text() -> None:
    assert text_digest("one") != text_digest("two")
    assert len(text_digest("")) == 32
