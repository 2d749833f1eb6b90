"""The HTTP API's bodies: strict parsing of what comes in, building of what goes out.

Pure functions over parsed JSON; ``http.py`` does the I/O. Invariant: whatever is wrong with a body
is a ``BadRequest`` that names the field. Must not know: aiohttp, wire, models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_agent.errors import AgentError, BadRequest
from edge_agent.store import ContextInfo
from engine.prompt import Message

MAX_STOP_STRINGS = 4
"""As many as OpenAI's API takes."""
MAX_MESSAGES = 10_000
_CONTEXT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KVTIDE_KEYS = frozenset(
    {"context_id", "policy", "estimator", "deadline_s", "strict", "evaluate", "trace"}
)
_CONTEXT_KEYS = frozenset({"id", "text", "levels"})

# OpenAI fields that change the answer and that this API does not do: refused, not ignored.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "logprobs": (None, False),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
}


@dataclass(frozen=True, slots=True)
class NewContext:
    """Body of ``POST /v1/contexts``."""

    text: str
    context_id: str | None
    levels: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Body of ``POST /v1/chat/completions``."""

    messages: tuple[Message, ...]
    model: str | None
    stream: bool
    include_usage: bool
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    context_id: str | None
    policy: str | None
    estimator: str | None
    deadline_s: float | None
    strict: bool
    """Refuse at once when the deadline cannot be met."""
    evaluate: bool
    trace: bool


def parse_new_context(body: object) -> NewContext:
    """Check the body of an ingest.

    Raises:
        BadRequest: names the field that is wrong.
    """
    fields = _object(body, "the body")
    _refuse_unknown(fields, _CONTEXT_KEYS, "the body")
    levels = fields.get("levels")
    if levels is not None and (
        not isinstance(levels, list) or not levels or not all(isinstance(v, str) for v in levels)
    ):
        raise BadRequest("levels must be a list of level names")
    if "text" not in fields:
        raise BadRequest("text is missing")
    text = _text(fields, "text")
    if not text.strip():
        raise BadRequest("text is empty, there is nothing to ingest")
    return NewContext(
        text=text,
        context_id=None if fields.get("id") is None else parse_context_id(fields["id"], "id"),
        levels=None if levels is None else tuple(levels),
    )


def parse_context_id(value: object, name: str) -> str:
    """Check a context id.

    Raises:
        BadRequest: not 1 to 128 letters, digits, '.', '_' or '-'.
    """
    if not isinstance(value, str) or not _CONTEXT_ID.fullmatch(value):
        raise BadRequest(
            f"{name} must be 1 to 128 letters, digits, '.', '_' or '-', starting with one of the"
            " first two"
        )
    return value


def parse_chat(body: object) -> ChatRequest:
    """Check the body of a chat completion.

    Raises:
        BadRequest: names the field that is wrong.
    """
    fields = _object(body, "the body")
    for key, harmless in _UNSUPPORTED.items():
        if key in fields and not any(fields[key] == value for value in harmless):
            raise BadRequest(f"{key} is not supported")
    extra = _object(fields.get("kvtide") or {}, "kvtide")
    _refuse_unknown(extra, _KVTIDE_KEYS, "kvtide")
    stream_options = _object(fields.get("stream_options") or {}, "stream_options")
    context_id = extra.get("context_id")
    max_key = "max_completion_tokens" if fields.get("max_tokens") is None else "max_tokens"
    return ChatRequest(
        messages=_messages(fields.get("messages")),
        model=_optional_text(fields, "model"),
        stream=_flag(fields, "stream"),
        include_usage=_flag(stream_options, "include_usage"),
        max_tokens=_integer(fields, max_key, low=1, high=2**20),
        temperature=_number(fields, "temperature", low=0.0, high=2.0, default=0.0),
        top_p=_number(fields, "top_p", low=1e-6, high=1.0, default=1.0),
        # OpenAI's seeds may be negative, generators' may not.
        seed=(_integer(fields, "seed", low=-(2**63), high=2**63 - 1) or 0) % 2**63,
        stop=_stop(fields.get("stop")),
        context_id=None
        if context_id is None
        else parse_context_id(context_id, "kvtide.context_id"),
        policy=_optional_text(extra, "policy"),
        estimator=_optional_text(extra, "estimator"),
        deadline_s=None
        if extra.get("deadline_s") is None
        else _number(extra, "deadline_s", low=0.001, high=86400.0, default=0.0),
        strict=_flag(extra, "strict"),
        evaluate=_flag(extra, "evaluate"),
        trace=_flag(extra, "trace"),
    )


def context_json(info: ContextInfo) -> dict[str, Any]:
    """Build what a listing says of one context."""
    return {
        "id": info.context_id,
        "object": "kvtide.context",
        "num_tokens": info.num_tokens,
        "num_chunks": info.num_chunks,
        "bytes_by_level": info.bytes_by_level,
        "model_digest": info.model_digest.hex(),
        "created": int(info.created_at),
    }


def error_json(error: AgentError) -> dict[str, Any]:
    """Build an error body in OpenAI's shape."""
    return {
        "error": {
            "message": str(error),
            "type": error.error_type,
            "code": error.code,
            "status": error.http_status,
        }
    }


def completion_json(
    *,
    request_id: str,
    created: int,
    model: str,
    text: str,
    finish_reason: str,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    kvtide: Mapping[str, Any],
) -> dict[str, Any]:
    """Build a whole, non-streamed completion."""
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
        ],
        "usage": usage_json(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
        ),
        "kvtide": dict(kvtide),
    }


def completion_chunk_json(
    *,
    request_id: str,
    created: int,
    model: str,
    delta: Mapping[str, str],
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """Build one event of a streamed completion."""
    return {
        "id": request_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish_reason}],
    }


def usage_json(*, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Build the usage object; cached tokens are those of the context."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message")
    if len(value) > MAX_MESSAGES:
        raise BadRequest(f"messages has {len(value)} entries, more than {MAX_MESSAGES}")
    messages = []
    for index, entry in enumerate(value):
        name = f"messages[{index}]"
        fields = _object(entry, name)
        role = _ROLES.get(str(fields.get("role")))
        if role is None:
            raise BadRequest(f"{name}.role must be one of {', '.join(_ROLES)}")
        messages.append(Message(role, _content(fields.get("content"), f"{name}.content")))
    return tuple(messages)


def _content(value: object, name: str) -> str:
    if isinstance(value, str):
        return _encodable(value, name)
    if isinstance(value, list):
        parts = []
        for part in value:
            fields = _object(part, name)
            if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
                raise BadRequest(f"{name} has a part that is not text")
            parts.append(fields["text"])
        return _encodable("".join(parts), name)
    raise BadRequest(f"{name} must be text")


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > MAX_STOP_STRINGS
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise BadRequest(f"stop must be text, or a list of at most {MAX_STOP_STRINGS} texts")
    return tuple(texts)


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be a JSON object")
    return value


def _refuse_unknown(fields: Mapping[str, Any], known: frozenset[str], name: str) -> None:
    unknown: Sequence[str] = sorted(set(fields) - known)
    if unknown:
        raise BadRequest(f"{name} has an unknown field {unknown[0][:64]!r}")


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise BadRequest(f"{key} must be text")
    return _encodable(value, key)


def _encodable(text: str, name: str) -> str:
    # JSON can spell lone surrogates, which are not text and which no encoder takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} is not valid Unicode at character {error.start}") from error
    return text


def _optional_text(fields: Mapping[str, Any], key: str) -> str | None:
    return None if fields.get(key) is None else _text(fields, key)


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false")
    return value


def _integer(fields: Mapping[str, Any], key: str, *, low: int, high: int) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{key} must be a whole number from {low} to {high}")
    return value


def _number(
    fields: Mapping[str, Any], key: str, *, low: float, high: float, default: float
) -> float:
    value = fields.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{key} must be a number from {low:g} to {high:g}")
    return float(value)
