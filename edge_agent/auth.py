"""Bearer tokens of the HTTP API.

Only digests of the tokens are kept; every comparison takes the same time whatever the token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from edge_agent.errors import ConfigError

_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


class BearerTokens:
    """The set of tokens that clients may use; an empty set leaves the API open."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests = tuple(digests)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a token file: one token, or ``sha256:`` and the token's SHA-256 in hex, a line.

        Raises:
            ConfigError: the file cannot be read or has no token.
        """
        try:
            lines = path.expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"http_token_file: cannot read {path}: {error}") from error
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ConfigError(f"http_token_file: {path} has no token")
        return cls(_digest_of(token) for token in tokens)

    def allows(self, header: str | None) -> bool:
        """Tell whether an Authorization header carries a known token."""
        if not self._digests:
            return True
        scheme, _, token = (header or "").partition(" ")
        presented = hashlib.sha256(token.strip().encode(errors="surrogateescape")).digest()
        # All are compared, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest_of(token: str) -> bytes:
    hashed = _HASHED.fullmatch(token)
    return bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(token.encode()).digest()
