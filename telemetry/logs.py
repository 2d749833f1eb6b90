"""Logging set-up: one JSON object a line, to stdout.

Our own shells log through ``get_logger`` with event names from ``telemetry.names.Event``; records
of libraries (nats, aiohttp, transformers) come out in the same shape as event ``library``.
Invariant: a field whose name says that it holds a prompt, tokens or a credential never gets out.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from telemetry.names import Event

SECRET_FIELDS = frozenset(
    {
        "answer",
        "authorization",
        "content",
        "context",
        "credentials",
        "messages",
        "nats_token",
        "nkey",
        "password",
        "prompt",
        "question",
        "seed",
        "text",
        "token",
        "token_ids",
        "tokens_text",
    }
)
"""Fields that are blanked wherever they occur: a log line may leave the site, a prompt may not."""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""Log levels by the names that the settings use."""


def configure_logging(level: str, *, program: str, stream: TextIO | None = None) -> None:
    """Set up logging for the whole process; calling it again replaces the set-up.

    Args:
        level: least severe level written, a key of ``LEVELS``.
        program: bound to every line, such as ``kvtide-worker``.
        stream: where lines go; None is stdout.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stdout if stream is None else stream)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _as_library_event],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _Bind(program),
                blank_secrets,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries are noise below warning; our own level is filtered by structlog before it gets here.
    root.setLevel(max(LEVELS[level], logging.WARNING))
    logging.getLogger("kvtide").setLevel(LEVELS[level])
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        cache_logger_on_first_use=False,
    )


def get_logger(room: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a room, such as ``cloud_worker``.

    May be called before ``configure_logging``, at import: it looks the set-up up with every line.
    """
    # Bound with initial values, not ``bind``: that would freeze the set-up of this moment.
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(
        f"kvtide.{room}", room=room
    )
    return logger


def announce(event: Event, *, port: int, stream: TextIO | None = None) -> None:
    """Write the line that says which port the kernel chose, whatever the log level.

    Programs that start this one read it from stdout: ``{"event": "listening", "port": 8470}``.
    """
    target = sys.stdout if stream is None else stream
    target.write(json.dumps({"event": event.value, "port": port}) + "\n")
    target.flush()


def blank_secrets(
    _logger: Any, _method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Replace the values of ``SECRET_FIELDS``; a structlog processor."""
    for key in event_dict:
        if key.lower() in SECRET_FIELDS:
            event_dict[key] = "[blanked]"
    return event_dict


def _as_library_event(
    _logger: Any, _method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    record = event_dict.get("_record")
    event_dict["message"] = event_dict.pop("event", "")
    event_dict["event"] = Event.LIBRARY.value
    event_dict["library"] = record.name if isinstance(record, logging.LogRecord) else ""
    return event_dict


class _Bind:
    """Adds the program's name to every line."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(
        self, _logger: Any, _method: str, event_dict: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        event_dict["program"] = self._program
        return event_dict
