from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from wire import (
    Abort,
    Accept,
    Answered,
    Ask,
    Cancel,
    ChunkBad,
    ChunkKind,
    ChunkRange,
    ChunkReady,
    Credit,
    Done,
    EvaluationResult,
    FailCode,
    Failed,
    HaveChunk,
    LocalProtocolError,
    MessageError,
    Open,
    Recompute,
    Refuse,
    RefuseCode,
    Speeds,
    Token,
)
from wire.messages import (
    MAX_JSON_BYTES,
    MAX_TOKENS,
    ChunkDescriptor,
    Message,
    pack_body,
    pack_message,
    pack_token_ids,
    parse_body,
    parse_message,
    parse_token_ids,
)

COUNT = st.integers(0, 2**53 - 1)
SECONDS = st.floats(-1e9, 1e9)
TEXT = st.text(max_size=30)
DIGEST = st.binary(min_size=32, max_size=32)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
MESSAGES = st.one_of(
    st.builds(Abort, COUNT, COUNT, COUNT, COUNT),
    st.builds(Recompute, COUNT, COUNT),
    st.builds(Cancel, TEXT),
    st.builds(ChunkReady, COUNT, COUNT, COUNT, TEXT, SECONDS, SECONDS, SECONDS),
    st.builds(ChunkBad, COUNT, COUNT, COUNT, TEXT),
    st.builds(Credit, COUNT),
    st.builds(Token, COUNT, COUNT, SECONDS),
    st.builds(Answered, TEXT, SECONDS, SECONDS),
    st.builds(
        Done,
        st.none()
        | st.builds(EvaluationResult, SECONDS, SECONDS, SECONDS, st.lists(COUNT).map(tuple)),
    ),
    st.builds(Failed, st.sampled_from(FailCode), TEXT),
)
SPEEDS = st.builds(Speeds, SECONDS, SECONDS, SECONDS, SECONDS)
BODIES = st.one_of(
    st.builds(
        Open,
        tenant=TEXT,
        inbox=TEXT,
        model_name=TEXT,
        model_digest=DIGEST,
        profile_digest=DIGEST,
        chunks=st.lists(st.builds(ChunkRange, COUNT, COUNT, DIGEST), max_size=3).map(tuple),
        max_chunk_bytes=COUNT,
        question_tokens=COUNT,
        max_tokens=COUNT,
        deadline_s=SECONDS,
        evaluate=st.booleans(),
        traceparent=TEXT,
    ),
    st.builds(
        Accept,
        worker=TEXT,
        window_bytes=COUNT,
        segment_bytes=COUNT,
        speeds=SPEEDS,
        queue_delay_s=SECONDS,
        backend=TEXT,
        have=st.lists(st.builds(HaveChunk, COUNT, TEXT), max_size=3).map(tuple),
    ),
    st.builds(Refuse, st.sampled_from(RefuseCode), TEXT, TEXT, TEXT, SECONDS),
    st.builds(ChunkDescriptor, st.sampled_from(ChunkKind), TEXT, COUNT, COUNT, DIGEST),
)
READY = ChunkReady(1, 0, 2, "cachegen:1", 0.5, 0.75, 1.0)


@given(MESSAGES)
def test_every_message_survives_the_round_trip(message: Message) -> None:
    assert parse_message(pack_message(message)) == (message, b"")


@given(BODIES)
def test_every_body_survives_the_round_trip(body: Any) -> None:
    assert parse_body(pack_body(body), type(body)) == (body, b"")


@given(IDS)
def test_token_ids_survive_the_round_trip(ids: list[int]) -> None:
    ask = Ask(max_tokens=5, temperature=0.5, top_p=0.9, seed=7, evaluate=True)
    message, blob = parse_message(pack_message(ask, ids))
    assert message == ask
    assert parse_token_ids(blob, max_tokens=len(ids)) == tuple(ids)


def test_token_ids_of_text_take_less_than_two_bytes_each() -> None:
    ids = [(index * index * 31) % 49152 for index in range(10_000)]
    assert len(pack_token_ids(ids)) < 2.1 * len(ids)


def test_more_token_ids_than_were_announced_are_not_unpacked() -> None:
    blob = pack_token_ids(range(1000))
    with pytest.raises(MessageError, match="more than 999 ids"):
        parse_token_ids(blob, max_tokens=999)
    with pytest.raises(MessageError, match="more than 0 ids"):
        parse_token_ids(blob, max_tokens=0)


def test_a_decompression_bomb_allocates_no_more_than_was_announced() -> None:
    bomb = zlib.compress(bytes(32 * 1024 * 1024), 9)
    tracemalloc.start()
    with pytest.raises(MessageError, match="more than 1000 ids"):
        parse_token_ids(bomb, max_tokens=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # What was sent, what was announced, and the state of an inflater.
    assert peak < len(bomb) + 4 * 1000 + 64 * 1024


def test_no_announcement_goes_beyond_the_protocols_limit() -> None:
    blob = zlib.compress(bytes(4 * MAX_TOKENS + 4), 9)
    with pytest.raises(MessageError, match=f"more than {MAX_TOKENS} ids"):
        parse_token_ids(blob, max_tokens=10**12)


@pytest.mark.parametrize(
    "blob",
    [
        b"\0",
        zlib.compress(b"abc"),
        zlib.compress(b"abcd") + b"more",
        zlib.compress(b"abcd")[:-1],
        pack_token_ids([1, 2, 3])[:-5],
    ],
)
def test_damaged_token_ids_are_a_message_error(blob: bytes) -> None:
    with pytest.raises(MessageError):
        parse_token_ids(blob, max_tokens=100)


def forge(value: object, blob: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<I", len(text)) + text + blob


def as_json(message: Message) -> dict[str, Any]:
    data = pack_message(message)
    value = json.loads(data[4:])
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"chunk": -1}, "ChunkReady: chunk: not a whole number"),
        ({"chunk": 2**53}, "ChunkReady: chunk: not a whole number"),
        ({"chunk": 1.0}, "ChunkReady: chunk: not a whole number"),
        ({"chunk": True}, "ChunkReady: chunk: not a whole number"),
        ({"chunk": "1"}, "ChunkReady: chunk: not a whole number"),
        ({"chunk": None}, "ChunkReady: chunk: not a whole number"),
        ({"level": 5}, "ChunkReady: level: not a string"),
        ({"level": "x" * 5000}, "ChunkReady: level: not a string of at most"),
        ({"end_s": "now"}, "ChunkReady: end_s: not a number"),
        ({"end_s": float("nan")}, "ChunkReady: end_s: not a finite number"),
        ({"end_s": float("inf")}, "ChunkReady: end_s: not a finite number"),
        ({"end_s": 10**400}, "ChunkReady: end_s: not a finite number"),
        ({"end_s": True}, "ChunkReady: end_s: not a number"),
        ({"extra": 1}, "ChunkReady: extra: unknown field"),
        ({"kind": "Open"}, "unknown kind 'Open'"),
        ({"kind": 7}, "unknown kind 7"),
        ({"kind": ["ChunkReady"]}, "unknown kind"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MessageError, match=sentence):
        parse_message(forge(as_json(READY) | change))


def test_a_missing_field_is_named() -> None:
    value = as_json(READY)
    del value["epoch"]
    with pytest.raises(MessageError, match="ChunkReady: epoch: missing") as caught:
        parse_message(forge(value))
    assert (caught.value.where, caught.value.field) == ("ChunkReady", "epoch")


def test_a_missing_field_with_a_default_takes_it() -> None:
    value = as_json(Ask(max_tokens=3))
    del value["temperature"]
    assert parse_message(forge(value))[0] == Ask(max_tokens=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        struct.pack("<I", 100) + b"{}",
        struct.pack("<I", 2**32 - 1),
        forge(b"{"),
        forge(b"\xff\xfe"),
        forge([1, 2]),
        forge("text"),
        forge(b"[" * 100_000),
        forge(b'{"a":' * 50_000),
        forge(b'{"kind":"Credit","limit_bytes":1,"limit_bytes":2}'),
        forge(b'{"kind":"Credit","limit_bytes":' + b"9" * 5000 + b"}"),
        forge(b" " * (MAX_JSON_BYTES + 1)),
        forge(as_json(READY), b"token ids that nobody wants"),
    ],
)
def test_bytes_that_are_no_message_are_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        parse_message(data)


def test_a_body_of_another_kind_is_a_message_error() -> None:
    with pytest.raises(MessageError):
        parse_body(pack_body(Refuse(RefuseCode.BUSY, "busy")), Accept)
    with pytest.raises(MessageError, match="takes none"):
        parse_body(pack_body(Refuse(RefuseCode.BUSY, "busy"), [1]), Refuse)
    with pytest.raises(MessageError, match="code: unknown value 'sleepy'"):
        parse_body(forge({"code": "sleepy", "sentence": ""}), Refuse)
    with pytest.raises(MessageError, match="digest: not hexadecimal"):
        parse_body(
            forge(
                {"kind": "kv", "level": "", "total_bytes": 1, "segment_bytes": 1, "digest": "xyz"}
            ),
            ChunkDescriptor,
        )
    with pytest.raises(MessageError, match="have: not a list"):
        parse_body(forge({"worker": "w", "window_bytes": 1, "segment_bytes": 1, "speeds": {
            "decode_bytes_per_s": 1, "prefill_base_s": 1, "prefill_slope_s": 1},
            "queue_delay_s": 0, "backend": "", "have": {}}), Accept)  # fmt: skip
    with pytest.raises(MessageError, match="evaluate: not true or false"):
        parse_message(forge({"kind": "Ask", "max_tokens": 1, "evaluate": 1}))
    with pytest.raises(MessageError, match="not an object"):
        parse_message(forge({"kind": "Done", "evaluation": [1]}))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_message_error(data: bytes) -> None:
    with contextlib.suppress(MessageError):
        parse_message(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_any_value_in_any_field_is_a_message_or_a_message_error(
    message: Message, data: st.DataObject
) -> None:
    value = as_json(message)
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
    try:
        read, _ = parse_message(forge(value))
    except MessageError:
        return
    assert parse_message(pack_message(read))[0] == read


def test_our_own_message_above_the_limit_is_our_own_error() -> None:
    body = Open(
        tenant="t", inbox="i", model_name="m", model_digest=bytes(32), profile_digest=bytes(32),
        chunks=tuple(ChunkRange(i, i + 1, bytes(32)) for i in range(8000)),
        max_chunk_bytes=1, question_tokens=1, max_tokens=1, deadline_s=1.0,
    )  # fmt: skip
    with pytest.raises(LocalProtocolError, match="is over"):
        pack_body(body)
