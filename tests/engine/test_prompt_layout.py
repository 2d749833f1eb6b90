from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from engine import TokenizerError
from engine.prompt import (
    Message,
    context_token_ids,
    plain_prompt,
    question_token_ids,
    strip_context,
)


class ByteTokenizer:
    """One token a byte and a template like ChatML's, with a default system message."""

    def __init__(self, *, trims: bool = False) -> None:
        self.trims = trims

    def encode(self, text: str, *, literal: bool = False) -> list[int]:
        # A closing tag from the template is one token, spelled out in a text it is three.
        return list(text.encode() if literal else text.replace("</>", "\x03").encode())

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        turns = "".join(
            f"<{m['role']}>{m['content'].strip() if self.trims else m['content']}</>"
            for m in messages
        )
        head = "" if messages[0]["role"] == "system" else "<system>default</>"
        return head + turns + ("<assistant>" if add_generation_prompt else "")


TOKENIZER = ByteTokenizer()


def prompt(context: str, messages: list[Message], tokenizer: ByteTokenizer = TOKENIZER) -> str:
    ids = context_token_ids(tokenizer, context)
    ids += question_token_ids(tokenizer, messages)
    return bytes(ids).decode().replace("\x03", "</>")


def test_context_stands_in_front_of_the_first_user_message() -> None:
    assert prompt("REPORT", [Message("user", "Why?")]) == (
        "<system>default</><user>REPORT\n\nWhy?</><assistant>"
    )


def test_context_tokens_do_not_depend_on_the_question() -> None:
    with_system = [Message("system", "Be brief."), Message("user", "Why?")]
    assert prompt("REPORT", with_system) == (
        "<system>default</><user>REPORT\n\nBe brief.\n\nWhy?</><assistant>"
    )


def test_later_turns_follow() -> None:
    turns = [Message("user", "A?"), Message("assistant", "B."), Message("user", "C?")]
    assert prompt("R", turns) == (
        "<system>default</><user>R\n\nA?</><assistant>B.</><user>C?</><assistant>"
    )


def test_template_that_trims_keeps_the_context_as_it_is() -> None:
    tokenizer = ByteTokenizer(trims=True)
    text = prompt("  R  \n", [Message("user", "A?")], tokenizer)
    assert text == "<system>default</><user>  R  \n\n\nA?</><assistant>"


def test_without_context_the_plain_rendering_is_used() -> None:
    ids = plain_prompt(TOKENIZER, [Message("system", "S"), Message("user", "U")])
    assert bytes(ids).decode() == "<system>S\x03<user>U\x03<assistant>"


def test_no_user_message_is_refused() -> None:
    with pytest.raises(TokenizerError, match="no user message"):
        question_token_ids(TOKENIZER, [Message("system", "S")])


def test_context_is_taken_off_the_first_message() -> None:
    assert strip_context([Message("user", "REPORT\n\nWhy?")], 6) == [Message("user", "Why?")]
    assert strip_context([Message("system", "REPORT"), Message("user", "Why?")], 6) == [
        Message("user", "Why?")
    ]


def test_control_tokens_in_a_text_stay_text() -> None:
    ids = context_token_ids(TOKENIZER, "a</>b")
    ids += question_token_ids(TOKENIZER, [Message("user", "c</>d")])
    assert bytes(ids).decode() == "<system>default\x03<user>a</>b\n\nc</>d\x03<assistant>"
