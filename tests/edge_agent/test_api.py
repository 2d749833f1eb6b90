from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edge_agent.api import error_json, parse_chat, parse_new_context
from edge_agent.errors import BadRequest, NoWorker
from engine.prompt import Message

ASK = {"messages": [{"role": "user", "content": "Why?"}]}


def test_smallest_chat_body_takes_the_defaults() -> None:
    chat = parse_chat(ASK)
    assert chat.messages == (Message("user", "Why?"),)
    assert (chat.temperature, chat.top_p, chat.seed, chat.stop) == (0.0, 1.0, 0, ())
    assert chat.max_tokens is None
    assert not chat.stream
    assert chat.context_id is None


def test_all_fields_arrive() -> None:
    chat = parse_chat(
        {
            **ASK,
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "stop": ["a", "b"],
            "user": "ignored",
            "kvtide": {
                "context_id": "doc-1",
                "policy": "fixed:fp16",
                "estimator": "last-sample",
                "deadline_s": 2,
                "evaluate": True,
                "trace": True,
            },
        }
    )
    assert (chat.model, chat.stream, chat.include_usage, chat.max_tokens) == ("m", True, True, 5)
    assert (chat.temperature, chat.top_p, chat.seed, chat.stop) == (0.5, 0.9, 7, ("a", "b"))
    assert (chat.context_id, chat.policy, chat.estimator) == ("doc-1", "fixed:fp16", "last-sample")
    assert (chat.deadline_s, chat.evaluate, chat.trace) == (2.0, True, True)


def test_content_parts_are_joined_and_developer_counts_as_system() -> None:
    chat = parse_chat(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            ]
        }
    )
    assert chat.messages == (Message("system", "Be brief."), Message("user", "ab"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, r"messages\[0\]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"n": 2}, "n is not supported"),
        ({"tools": [{}]}, "tools"),
        ({"model": 3}, "model"),
        ({"kvtide": 3}, "kvtide"),
        ({"kvtide": {"polcy": "text"}}, "polcy"),
        ({"kvtide": {"context_id": "../etc"}}, "context_id"),
        ({"kvtide": {"deadline_s": -1}}, "deadline_s"),
        ({"kvtide": {"evaluate": 1}}, "evaluate"),
    ],
)
def test_wrong_chat_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse_chat({**ASK, **change})


def test_ingest_body() -> None:
    new = parse_new_context({"id": "doc", "text": " T ", "levels": ["fp16"]})
    assert (new.context_id, new.text, new.levels) == ("doc", " T ", ("fp16",))
    assert parse_new_context({"text": "T"}).levels is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], "object"),
        ({}, "text is missing"),
        ({"text": ""}, "text is empty"),
        ({"text": " \n"}, "text is empty"),
        ({"text": 3}, "text"),
        ({"text": "\udfff"}, "Unicode"),
        ({"text": "T", "id": ""}, "id"),
        ({"text": "T", "id": "a/b"}, "id"),
        ({"text": "T", "levels": []}, "levels"),
        ({"text": "T", "levels": [1]}, "levels"),
        ({"text": "T", "level": ["fp16"]}, "'level'"),
    ],
)
def test_wrong_ingest_field_is_named(body: object, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse_new_context(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "model", "stop", "kvtide", "n", "stream_options", "seed"]),
        JSON,
    )
    | JSON
)
def test_any_json_is_parsed_or_a_bad_request(body: object) -> None:
    for parse in (parse_chat, parse_new_context):
        # Any other exception fails the test.
        with contextlib.suppress(BadRequest):
            parse(body)


def test_error_body_has_openai_shape() -> None:
    body = error_json(NoWorker("nobody answered"))
    assert body == {
        "error": {
            "message": "nobody answered",
            "type": "server_error",
            "code": "no_worker",
            "status": 503,
        }
    }
