from __future__ import annotations

from hypothesis import given, strategies as st

from edge_agent.answer_text import AnswerText


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def run(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], AnswerText]:
    answer = AnswerText(decode, stop)
    pieces = [answer.push(byte) for byte in text.encode()]
    pieces.append(answer.finish())
    return pieces, answer


@given(st.text())
def test_pieces_join_to_the_whole_and_never_cut_a_character(text: str) -> None:
    pieces, answer = run(text)
    assert "".join(pieces) == text == answer.text
    assert answer.num_tokens == len(text.encode())
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_answer_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    _, answer = run(text, tuple(stop))
    # The stop string that is complete first ends the answer.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not ends:
        assert answer.text == text
        assert not answer.is_stopped
    else:
        first_end = min(ends)[0]
        assert answer.text == text[: min(start for end, start in ends if end == first_end)]
        assert answer.is_stopped


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    answer = AnswerText(decode, ("###",))
    assert [answer.push(byte) for byte in b"a##b"] == ["a", "", "", "##b"]
    assert not answer.is_stopped


def test_tokens_after_the_stop_are_ignored() -> None:
    answer = AnswerText(decode, ("!",))
    assert answer.push(ord("a")) == "a"
    assert answer.push(ord("!")) == ""
    assert answer.push(ord("b")) == ""
    assert answer.finish() == ""
    assert answer.text == "a"


def test_broken_bytes_come_out_at_the_end() -> None:
    answer = AnswerText(decode)
    assert answer.push(0xF0) == ""
    assert answer.finish() == "\ufffd"
