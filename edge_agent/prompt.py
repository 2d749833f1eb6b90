"""How a prompt is put together so that a context's KV cache can be used again.

A prompt is rendered as a chat whose first user message starts with the context. Its tokens are two
lists, made apart: the *context* tokens (everything up to the end of the context's text, fixed at the
ingest) and the *question* tokens (the rest of the rendering). Invariants: the context's tokens never
depend on the question, so its KV cache holds for every question; text from a client or a document is
tokenized literally, so that a control token spelled out in it cannot end a turn. Must not know:
HTTP, store, wire.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_agent.errors import BadRequest

_MARK = re.compile("\u241ekvtide:([0-9]+)\u241e")
"""Stands for a message's text while a chat template renders; the symbol keeps it unlike text."""

_GAP = "\n\n"
"""Between the context and the question, and between instructions."""


class ChatTokenizer(Protocol):
    """The part of the engine's tokenizer that prompts need."""

    def encode(self, text: str, *, literal: bool = False) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """system, user or assistant."""
    content: str
    """Plain text."""


def context_token_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Tokenize a context in the place that it has in every prompt.

    Args:
        tokenizer: the model's.
        text: the context, not empty.

    Returns:
        Token ids from position 0 to the end of the context's text.
    """
    head, *_ = _render(tokenizer, ["user"])
    return tokenizer.encode(head) + tokenizer.encode(text, literal=True)


def question_token_ids(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, has_context: bool
) -> list[int]:
    """Tokenize what follows the context.

    Args:
        tokenizer: the model's.
        messages: the conversation without the context, at least one user message.
        has_context: whether a context precedes; without one, the whole rendering is returned.

    Returns:
        Token ids to be put behind the context's.
    """
    turns = _behind_context(messages) if has_context else list(messages)
    if not any(turn.role == "user" for turn in turns):
        raise BadRequest("messages has no user message, so there is nothing to answer")
    pieces = _render(tokenizer, [turn.role for turn in turns])
    token_ids = [] if has_context else tokenizer.encode(pieces[0])
    for index, frame in zip(pieces[1::2], pieces[2::2], strict=True):
        token_ids += tokenizer.encode(turns[int(index)].content, literal=True)
        token_ids += tokenizer.encode(frame)
    return token_ids


def strip_context(messages: Sequence[Message], num_chars: int) -> list[Message]:
    """Take a context of this many characters off the front of the first message."""
    first, rest = messages[0], list(messages[1:])
    remainder = first.content[num_chars:].strip()
    return [Message(first.role, remainder), *rest] if remainder else rest


def _behind_context(messages: Sequence[Message]) -> list[Message]:
    """Put all instructions in front of the first user message.

    A system message cannot stay in front: it would come before the context and change its KV cache.
    """
    first_user = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first_user is None:
        return []
    instructions = [message.content for message in messages if message.role == "system"]
    merged = "".join(_GAP + text for text in [*instructions, messages[first_user].content])
    turns = [message for message in messages[first_user + 1 :] if message.role != "system"]
    return [Message("user", merged), *turns]


def _render(tokenizer: ChatTokenizer, roles: Sequence[str]) -> list[str]:
    """Render messages of these roles and return [frame, index, frame, index, ..., frame]."""
    marked = [
        {"role": role, "content": f"\u241ekvtide:{index}\u241e"} for index, role in enumerate(roles)
    ]
    pieces = _MARK.split(tokenizer.render_chat(marked))
    if len(pieces) < 2 or pieces[1] != "0":
        raise BadRequest("the model's chat template drops the first message")
    return pieces
