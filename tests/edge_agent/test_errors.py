from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_agent.errors import AgentError


def all_errors(root: type[AgentError] = AgentError) -> Iterator[type[AgentError]]:
    yield root
    for kind in root.__subclasses__():
        yield from all_errors(kind)


def test_every_code_is_documented_with_its_status() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    at_start = text[text.index("At start:") :]
    for kind in all_errors():
        told = [row for row in rows if f"`{kind.code}`" in row]
        if f"`{kind.code}`" in at_start:
            continue
        assert told, kind
        assert any(f"| {kind.http_status} |" in row for row in told), kind


def test_client_errors_are_told_apart_from_our_own() -> None:
    for kind in all_errors():
        if 400 <= kind.http_status < 500:
            assert kind.error_type == "invalid_request_error", kind
        elif kind.http_status >= 500:
            assert kind.error_type == "server_error", kind


def test_what_may_help_to_try_again_says_when() -> None:
    for kind in all_errors():
        if kind.http_status in (502, 503):
            assert kind.retry_after_s > 0, kind
