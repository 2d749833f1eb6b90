from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from telemetry.logs import announce, configure_logging, get_logger
from telemetry.names import Event


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield io.StringIO()
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_event_program_room_level_and_time(stream: io.StringIO) -> None:
    configure_logging("info", program="kvtide-worker", stream=stream)
    get_logger("cloud_worker").info(Event.SESSION_DONE, ttft_s=0.5, session_id="ab")
    (line,) = lines(stream)
    assert line["event"] == "session.done"
    assert line["program"] == "kvtide-worker"
    assert line["room"] == "cloud_worker"
    assert line["level"] == "info"
    assert line["ttft_s"] == 0.5
    assert line["timestamp"].endswith("Z")


def test_a_logger_made_before_the_set_up_follows_it(stream: io.StringIO) -> None:
    logger = get_logger("cloud_worker")
    configure_logging("info", program="kvtide-worker", stream=stream)
    logger.info(Event.READY)
    (line,) = lines(stream)
    assert (line["event"], line["room"]) == ("ready", "cloud_worker")


def test_lines_below_the_level_are_dropped(stream: io.StringIO) -> None:
    configure_logging("warning", program="kvtide-worker", stream=stream)
    get_logger("cloud_worker").info(Event.SESSION_DONE)
    assert lines(stream) == []


def test_debug_lines_appear_at_debug(stream: io.StringIO) -> None:
    configure_logging("debug", program="kvtide-worker", stream=stream)
    get_logger("cloud_worker").debug(Event.CHUNK_DECODED, chunk_id=3)
    assert lines(stream)[0]["chunk_id"] == 3


def test_prompts_tokens_and_credentials_are_blanked_even_at_debug(stream: io.StringIO) -> None:
    configure_logging("debug", program="kvtide-edge", stream=stream)
    get_logger("edge_agent").debug(
        Event.REQUEST_STARTED, prompt="my illness", token_ids=[1, 2], Authorization="Bearer x"
    )
    text = stream.getvalue()
    assert "my illness" not in text
    assert "Bearer" not in text
    assert "[1, 2]" not in text


def test_library_records_come_out_in_the_same_shape(stream: io.StringIO) -> None:
    configure_logging("info", program="kvtide-edge", stream=stream)
    logging.getLogger("nats.aio").warning("slow %s", "consumer")
    (line,) = lines(stream)
    assert line["event"] == "library"
    assert line["library"] == "nats.aio"
    assert line["message"] == "slow consumer"


def test_an_exception_is_written_with_its_traceback(stream: io.StringIO) -> None:
    configure_logging("info", program="kvtide-edge", stream=stream)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        get_logger("edge_agent").exception(Event.TASK_FAILED)
    (line,) = lines(stream)
    assert "RuntimeError: boom" in line["exception"]


def test_announce_is_written_whatever_the_level(stream: io.StringIO) -> None:
    configure_logging("error", program="kvtide-worker", stream=stream)
    announce(Event.LISTENING, port=4711, stream=stream)
    assert lines(stream) == [{"event": "listening", "port": 4711}]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        configure_logging("loud", program="kvtide-worker")
