from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edge_agent.auth import BearerTokens
from edge_agent.errors import ConfigError


def test_without_tokens_the_api_is_open() -> None:
    assert BearerTokens().allows(None)


def test_plain_and_hashed_tokens_are_taken(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"two").hexdigest()
    path = tmp_path / "tokens"
    path.write_text(f"# clients\none\n\nsha256:{hashed}\n")
    tokens = BearerTokens.load(path)
    assert tokens.allows("Bearer one")
    assert tokens.allows("bearer two")
    for header in (
        None,
        "",
        "one",
        "Basic one",
        "Bearer",
        "Bearer onee",
        f"Bearer sha256:{hashed}",
    ):
        assert not tokens.allows(header)
    assert "one" not in repr(vars(tokens))


def test_file_without_tokens_is_an_error_and_not_an_open_api(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="http_token_file"):
        BearerTokens.load(path)
    with pytest.raises(ConfigError, match="http_token_file"):
        BearerTokens.load(tmp_path / "none")
