"""Bodies of the control messages.

Owns what the two programs say to each other, and its strict reading: every field is checked for
type and range, unknown and missing fields are errors. Invariant: reading bytes from the network
raises ``MessageError`` or gives a valid value; token ids are unpacked only to the number that was declared.
Must not know: sessions, NATS.

A body is JSON, except token ids, which follow it as a compressed blob.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import struct
import types
import typing
import zlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from wire.errors import LocalProtocolError, MessageError

M = TypeVar("M")

MAX_TOKENS = 1 << 20
"""Most token ids of one message; a session's own limits are checked before they are unpacked."""
MAX_JSON_BYTES = 512 * 1024
"""Of a body without its token ids: about 4,000 chunks in an ``Open``."""
MAX_STRING = 4096
MAX_ITEMS = 65_536
_MAX_INT = 2**53 - 1
"""Source: JSON numbers are exact up to here (RFC 8259, section 6)."""
_LENGTH = struct.Struct("<I")


class RefuseCode(enum.StrEnum):
    """Why a worker does not take a session."""

    IDENTITY_MISMATCH = "identity_mismatch"
    PROFILE_MISMATCH = "profile_mismatch"
    KEY_MISMATCH = "key_mismatch"
    CONTEXT_TOO_LONG = "context_too_long"
    NO_MEMORY = "no_memory"
    BUSY = "busy"
    DRAINING = "draining"
    BAD_REQUEST = "bad_request"


class FailCode(enum.StrEnum):
    """Why a worker gives a session up."""

    CORRUPT_CHUNK = "corrupt_chunk"
    ENGINE = "engine"
    TIMEOUT = "timeout"
    DRAINING = "draining"
    PROTOCOL = "protocol"
    INTERNAL = "internal"


class ChunkKind(enum.StrEnum):
    """What the bytes of a transfer are."""

    KV = "kv"
    """A bitstream that stands alone."""
    REFINEMENT = "refinement"
    """A bitstream that improves the part before it."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """One chunk of the context."""

    token_start: int
    token_stop: int
    key: bytes
    """Chunk key, 32 bytes; the worker derives it again from the token ids."""


@dataclass(frozen=True, slots=True)
class Open:
    """An agent asks for a worker; the token ids of the context follow as the blob."""

    tenant: str
    inbox: str
    """Subject prefix on which this agent listens."""
    model_name: str
    model_digest: bytes
    profile_digest: bytes
    """Digest of the profile set that the chunks were encoded with."""
    chunks: tuple[ChunkRange, ...]
    max_chunk_bytes: int
    """Largest bitstream that may be sent."""
    question_tokens: int
    """Token ids of the question that will come; at most."""
    max_tokens: int
    """Tokens of the answer that will be asked for; at most."""
    deadline_s: float
    """TTFT aimed at, from now."""
    evaluate: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the worker measured of itself."""

    decode_bytes_per_s: float
    """KV bytes written per second of decoding."""
    prefill_base_s: float
    """Prefill of one token at position 0."""
    prefill_slope_s: float
    """Added per token of position before it (attention grows)."""
    prefill_call_s: float = 0.0
    """Added per prefill call."""


@dataclass(frozen=True, slots=True)
class HaveChunk:
    """A chunk that the worker already holds."""

    chunk: int
    level: str


@dataclass(frozen=True, slots=True)
class Accept:
    """A worker takes the session."""

    worker: str
    window_bytes: int
    """Bytes that the worker will hold for this session and has not decoded yet."""
    segment_bytes: int
    """Largest segment that the worker takes."""
    speeds: Speeds
    queue_delay_s: float
    backend: str
    have: tuple[HaveChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """A worker does not take the session."""

    code: RefuseCode
    sentence: str
    expected: str = ""
    """What the worker has, such as its model digest."""
    actual: str = ""
    """What the agent said."""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkDescriptor:
    """Segment 0 of every transfer."""

    kind: ChunkKind
    level: str
    total_bytes: int
    segment_bytes: int
    digest: bytes
    """BLAKE2b-256 of the whole bitstream."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The agent gives an epoch up; what it sent of it counts as consumed."""

    chunk: int
    part: int
    epoch: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """The worker shall prefill this chunk from its token ids."""

    chunk: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Ask:
    """The question; its token ids follow as the blob."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    evaluate: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The agent wants nothing more; the worker frees everything."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk is in the KV cache; times are seconds since the worker accepted the session."""

    chunk: int
    part: int
    epoch: int
    level: str
    """The codec's level, or ``text``."""
    arrived_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ChunkBad:
    """A whole bitstream arrived and does not decode: send it again, or something else."""

    chunk: int
    part: int
    epoch: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Credit:
    """First-time data bytes that the agent may have sent in all, since the session began."""

    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer."""

    index: int
    token_id: int
    at_s: float
    """When it was known, in seconds since the worker accepted the session."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer is complete."""

    finish_reason: str
    prefill_start_s: float
    prefill_end_s: float


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The lossy answer against the one that the exact KV cache gives."""

    kl: float
    top1: float
    greedy_match: float
    """Share of the exact greedy answer's tokens, from its beginning, that were given too."""
    exact_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The session is over, in good order."""

    evaluation: EvaluationResult | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker gives the session up."""

    code: FailCode
    sentence: str


AgentMessage = Abort | Recompute | Ask | Cancel
WorkerMessage = ChunkReady | ChunkBad | Credit | Token | Answered | Done | Failed
Message = AgentMessage | WorkerMessage

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Abort, Recompute, Ask, Cancel, ChunkReady, ChunkBad, Credit, Token, Answered, Done, Failed,
    )
}  # fmt: skip


def pack_body(body: Any, token_ids: Sequence[int] = ()) -> bytes:
    """Give the bytes of an ``Open``, ``Accept``, ``Refuse`` or ``ChunkDescriptor``."""
    return _join(_to_json(body), token_ids)


def parse_body(data: bytes, kind: type[M]) -> tuple[M, bytes]:
    """Read what ``pack_body`` gave; the token ids are still packed.

    Raises:
        MessageError: anything else.
    """
    value, blob = _split(data, where=kind.__name__)
    body = _from_json(value, kind, where=kind.__name__)
    if blob and kind is not Open:
        raise MessageError("takes none", where=kind.__name__, field="token_ids")
    return body, blob


def pack_message(message: Message, token_ids: Sequence[int] = ()) -> bytes:
    """Give the bytes of a control message, with its name."""
    return _join({"kind": type(message).__name__, **_to_json(message)}, token_ids)


def parse_message(data: bytes) -> tuple[Message, bytes]:
    """Read what ``pack_message`` gave; the token ids are still packed.

    Raises:
        MessageError: anything else.
    """
    value, blob = _split(data, where="message")
    name = value.pop("kind", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise MessageError(f"unknown kind {name!r:.40}", where="message", field="kind")
    message: Message = _from_json(value, kind, where=kind.__name__)
    if blob and kind is not Ask:
        raise MessageError("takes none", where=kind.__name__, field="token_ids")
    return message, blob


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Compress token ids, each in [0, 2**32); about 1.7 bytes a token of English text.

    The four bytes of the ids are split into planes, so that the upper ones, nearly all zero, cost
    next to nothing.
    """
    raw = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return zlib.compress(b"".join(raw[plane::4] for plane in range(4)), 9)


def parse_token_ids(data: bytes, *, max_tokens: int) -> tuple[int, ...]:
    """Read what ``pack_token_ids`` gave; no more than so many ids are ever unpacked.

    Raises:
        MessageError: the data is damaged, or holds more ids.
    """
    if not data:
        return ()
    limit_bytes = 4 * min(max_tokens, MAX_TOKENS)
    inflater = zlib.decompressobj()
    try:
        # One byte more than is allowed: a longer stream shows itself, and is not unpacked.
        planes = inflater.decompress(data, limit_bytes + 1)
    except zlib.error as error:
        raise MessageError(str(error), where="message", field="token_ids") from None
    if len(planes) > limit_bytes:
        raise MessageError(f"more than {limit_bytes // 4} ids", where="message", field="token_ids")
    if not inflater.eof or inflater.unused_data or len(planes) % 4:
        raise MessageError("not a whole stream of ids", where="message", field="token_ids")
    count = len(planes) // 4
    raw = bytearray(len(planes))
    for plane in range(4):
        raw[plane::4] = planes[plane * count : (plane + 1) * count]
    return struct.unpack(f"<{count}I", raw)


def _join(value: dict[str, Any], token_ids: Sequence[int]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_JSON_BYTES:
        raise LocalProtocolError(f"message of {len(text)} bytes is over {MAX_JSON_BYTES}")
    blob = pack_token_ids(token_ids) if token_ids else b""
    return _LENGTH.pack(len(text)) + text + blob


def _split(data: bytes, *, where: str) -> tuple[dict[str, Any], bytes]:
    if len(data) < _LENGTH.size:
        raise MessageError(f"{len(data)} bytes are too few", where=where, field="length")
    (length,) = _LENGTH.unpack_from(data)
    text = data[_LENGTH.size : _LENGTH.size + length]
    if length > MAX_JSON_BYTES or len(text) != length:
        raise MessageError(f"says {length} bytes of JSON", where=where, field="length")
    try:
        value = _DECODER.decode(bytes(text).decode())
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}", where=where, field="body") from None
    if not isinstance(value, dict):
        raise MessageError("not a JSON object", where=where, field="body")
    return value, data[_LENGTH.size + length :]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a field comes twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
"""One for all: each holds itself in a cycle, so a new one per message would be garbage for a while."""


def _to_json(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _to_json(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any, kind: type[M], *, where: str) -> M:
    if not isinstance(value, dict):
        raise MessageError("not an object", where=where, field="body")
    hints = _type_hints(typing.cast("Any", kind))
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name in value:
        if name not in known:
            raise MessageError("unknown field", where=where, field=name[:64])
    arguments = {}
    for name, item in known.items():
        if name in value:
            arguments[name] = _check(value[name], hints[name], where=where, field=name)
        elif item.default is MISSING:
            raise MessageError("missing", where=where, field=name)
    return kind(**arguments)


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check(value: Any, hint: Any, *, where: str, field: str) -> Any:
    """Return ``value`` as the type ``hint``, or raise ``MessageError``."""

    def wrong(why: str) -> MessageError:
        return MessageError(why, where=where, field=field)

    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        inner = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        return None if value is None else _check(value, inner, where=where, field=field)
    if origin is tuple:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise wrong(f"not a list of at most {MAX_ITEMS}")
        inner = typing.get_args(hint)[0]
        return tuple(_check(item, inner, where=where, field=field) for item in value)
    if is_dataclass(hint):
        return _from_json(value, typing.cast("type[Any]", hint), where=f"{where}.{field}")
    if hint is bool:
        if not isinstance(value, bool):
            raise wrong("not true or false")
        return value
    if hint is int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
            raise wrong("not a whole number from 0 to 2**53 - 1")
        return value
    if hint is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong("not a number")
        number = float(value) if abs(value) <= _MAX_INT else math.inf
        if not math.isfinite(number):
            raise wrong("not a finite number below 2**53")
        return number
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise wrong(f"not a string of at most {MAX_STRING} characters")
    if hint is bytes:
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise wrong("not hexadecimal") from None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise wrong(f"unknown value {value!r:.40}") from None
    return value
