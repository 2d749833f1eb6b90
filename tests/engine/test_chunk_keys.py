from __future__ import annotations

from typing import Any

import pytest

from engine.chunk_keys import derive_chunk_keys, profile_set_digest

TOKENS = list(range(1, 11))
RANGES = [(0, 4), (4, 8), (8, 10)]
BASE: dict[str, Any] = {
    "model_digest": b"m" * 32,
    "profile_digest": b"p" * 32,
    "tenant": "clinic",
}
GOLDEN = (
    "e450e6e47f4a393355d18024ec35768fb34f23bae010a7332622aefeb8f87bbd",
    "7eb2366530c3116005d881acf53f6fae3a55235ae9d16f1bcbb19f75fc740eb4",
    "b500fe21ca4558006f2b6dc77b1d82c7740ec1d26b1c40a5e574dc457be67277",
)


def test_keys_are_the_same_in_every_process_and_on_every_machine() -> None:
    assert tuple(key.hex() for key in derive_chunk_keys(TOKENS, RANGES, **BASE)) == GOLDEN


@pytest.mark.parametrize(
    "change",
    [{"model_digest": b"n" * 32}, {"profile_digest": b"q" * 32}, {"tenant": "shop"}],
)
def test_every_part_of_the_identity_changes_every_key(change: dict[str, Any]) -> None:
    keys = derive_chunk_keys(TOKENS, RANGES, **BASE)
    other = derive_chunk_keys(TOKENS, RANGES, **(BASE | change))
    assert not set(keys) & set(other)


def test_a_changed_token_changes_its_chunk_and_all_behind_it_only() -> None:
    keys = derive_chunk_keys(TOKENS, RANGES, **BASE)
    changed = [*TOKENS[:5], 99, *TOKENS[6:]]
    other = derive_chunk_keys(changed, RANGES, **BASE)
    assert [a == b for a, b in zip(keys, other, strict=True)] == [True, False, False]


def test_a_chunk_with_another_start_has_another_key() -> None:
    (narrow,) = derive_chunk_keys(TOKENS, [(4, 8)], **BASE)
    (wide,) = derive_chunk_keys(TOKENS, [(0, 8)], **BASE)
    assert narrow != wide
    assert narrow == derive_chunk_keys(TOKENS, RANGES, **BASE)[1]


def test_the_order_of_profiles_does_not_matter_and_the_set_does() -> None:
    first, second = b"a" * 32, b"b" * 32
    assert profile_set_digest([first, second]) == profile_set_digest([second, first, first])
    assert profile_set_digest([first]) != profile_set_digest([first, second])
    assert len(profile_set_digest([])) == 32


@pytest.mark.parametrize("ranges", [[(0, 0)], [(0, 11)], [(-1, 4)], [(0, 4), (2, 4)], [(5, 4)]])
def test_ranges_outside_the_tokens_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        derive_chunk_keys(TOKENS, ranges, **BASE)
