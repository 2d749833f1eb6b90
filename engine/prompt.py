"""Chat prompts cut into a context and a question, so that the context's KV serves every question.

A prompt is `context_ids + question_ids`. The context part depends on the context text alone, and the two
parts are tokenized apart, so no question can change the context's last token. Text from a document or a
client is tokenized literally: a control token that it spells out cannot end a turn. Only the template's
own frame may hold control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import TokenizerError

# Stands for a message's text while a template is rendered; the symbols keep it unlike any text, and
# without spaces no template trims it.
_MARK = re.compile("\u241ekvtide:([0-9]+)\u241e")
_GAP = "\n\n"
"""Between the context, instructions and the question."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """system, user or assistant."""
    content: str
    """Plain text."""


class ChatTokenizer(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str, *, literal: bool = False) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str: ...


def split_prompt(
    tokenizer: ChatTokenizer, context_text: str, question_messages: Sequence[Message]
) -> tuple[list[int], list[int]]:
    """Form a chat prompt that begins with a context.

    The context opens the first user message. System messages go after the context and before the
    question, because only what is the same for every question may come before the context.

    Args:
        tokenizer: the model's tokenizer.
        context_text: the document.
        question_messages: the conversation without the context, at least one user message.

    Returns:
        (context_ids, question_ids); their concatenation is the prompt.

    Raises:
        TokenizerError: no user message, or a template that drops or reorders messages.
    """
    return context_token_ids(tokenizer, context_text), question_token_ids(
        tokenizer, question_messages
    )


def context_token_ids(tokenizer: ChatTokenizer, context_text: str) -> list[int]:
    """Return the token ids of a context: the template's opening and the text itself."""
    head, *_ = _frames(tokenizer, ["user"])
    return tokenizer.encode(head) + tokenizer.encode(context_text, literal=True)


def question_token_ids(tokenizer: ChatTokenizer, question_messages: Sequence[Message]) -> list[int]:
    """Return the token ids of everything after the context, up to the assistant's opening."""
    texts = [m.content for m in question_messages if m.role == "system"]
    turns = [m for m in question_messages if m.role != "system"]
    if not turns or turns[0].role != "user":
        raise TokenizerError("the messages hold no user message to ask after the context")
    lead = "".join(_GAP + text for text in [*texts, turns[0].content])
    frames = _frames(tokenizer, [turn.role for turn in turns])
    return _interleave(tokenizer, [lead, *(turn.content for turn in turns[1:])], frames[1:])


def question_after_context(
    tokenizer: ChatTokenizer, context_text: str, messages: Sequence[Message]
) -> list[int] | None:
    """Say whether a whole conversation begins with a stored context.

    Args:
        tokenizer: the model's tokenizer.
        context_text: text of the stored context.
        messages: the client's messages, the context at the beginning of the first user message.

    Returns:
        The question's token ids, so that `context_token_ids + result` is the prompt of these messages;
        None when their prompt does not begin with the context.
    """
    if not messages or messages[0].role != "user" or not context_text:
        return None
    first = messages[0].content
    if not first.startswith(context_text):
        return None
    frames = _frames(tokenizer, [message.role for message in messages])
    texts = [first[len(context_text) :], *(message.content for message in messages[1:])]
    return _interleave(tokenizer, texts, frames[1:])


def strip_context(messages: Sequence[Message], num_chars: int) -> list[Message]:
    """Take a context of this many characters off the front of the first message."""
    first, rest = messages[0], list(messages[1:])
    remainder = first.content[num_chars:].strip()
    return [Message(first.role, remainder), *rest] if remainder else rest


def plain_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a prompt without a stored context."""
    if not messages:
        raise TokenizerError("the messages are empty")
    if not any(message.role == "user" for message in messages):
        raise TokenizerError("the messages hold no user message, so there is nothing to answer")
    frames = _frames(tokenizer, [message.role for message in messages])
    texts = [message.content for message in messages]
    return tokenizer.encode(frames[0]) + _interleave(tokenizer, texts, frames[1:])


def _frames(tokenizer: ChatTokenizer, roles: Sequence[str]) -> list[str]:
    """Render messages of these roles; return the template's text before, between and after them."""
    marked = [
        {"role": role, "content": f"\u241ekvtide:{index}\u241e"} for index, role in enumerate(roles)
    ]
    pieces = _MARK.split(tokenizer.render_chat(marked))
    if pieces[1::2] != [str(index) for index in range(len(roles))]:
        raise TokenizerError("the model's chat template drops or reorders messages")
    return pieces[0::2]


def _interleave(tokenizer: ChatTokenizer, texts: Sequence[str], frames: Sequence[str]) -> list[int]:
    token_ids: list[int] = []
    for text, frame in zip(texts, frames, strict=True):
        token_ids += tokenizer.encode(text, literal=True)
        token_ids += tokenizer.encode(frame)
    return token_ids
