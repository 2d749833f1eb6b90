"""How a prompt is put together so that a context's KV cache can be used again.

A prompt is rendered as a chat whose first user message starts with the context. Its tokens are two
lists, made apart: the *context* tokens (everything up to the end of the context's text, fixed at the
ingest) and the *question* tokens (the rest of the rendering). Invariant: the context's tokens never
depend on the question, so its KV cache holds for every question. Must not know: HTTP, store, wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_agent.errors import BadRequest

_MARK = "\u241ekvtide:context\u241e"
"""Stands for the context while a chat template renders; the control pictures keep it unlike text."""

_GAP = "\n\n"
"""Between the context and the question, and between instructions."""


class ChatTokenizer(Protocol):
    """The part of the engine's tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]: ...

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
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
    head, _ = _split_at_mark(tokenizer, [Message("user", _MARK)])
    return tokenizer.encode(head + text)


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
    if not has_context:
        return tokenizer.encode(tokenizer.render_chat(_as_dicts(messages)))
    _, tail = _split_at_mark(tokenizer, _with_mark(messages))
    return tokenizer.encode(tail)


def strip_context(messages: Sequence[Message], num_chars: int) -> list[Message]:
    """Take a context of this many characters off the front of the first message."""
    first, rest = messages[0], list(messages[1:])
    remainder = first.content[num_chars:].strip()
    return [Message(first.role, remainder), *rest] if remainder else rest


def _with_mark(messages: Sequence[Message]) -> list[Message]:
    """Put the mark and all instructions in front of the first user message.

    A system message cannot stay in front: it would come before the context and change its KV cache.
    """
    first_user = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first_user is None:
        raise BadRequest("messages has no user message, so there is nothing to answer")
    instructions = [message.content for message in messages if message.role == "system"]
    merged = _GAP.join([_MARK, *instructions, messages[first_user].content])
    turns = [message for message in messages[first_user + 1 :] if message.role != "system"]
    return [Message("user", merged), *turns]


def _split_at_mark(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[str, str]:
    rendered = tokenizer.render_chat(_as_dicts(messages))
    head, mark, tail = rendered.partition(_MARK)
    if not mark:
        raise BadRequest("the model's chat template drops the first user message")
    return head, tail


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
