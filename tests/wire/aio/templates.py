"""Fills in the templates of ``infra/nats`` for a server on loopback."""

from __future__ import annotations

import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "infra" / "nats"
AGENT_LOGIN = ("agent", "agent-secret")
WORKER_LOGIN = ("worker", "worker-secret")


def render(name: str, values: dict[str, str]) -> str:
    """Return a template with every name filled in; a name without a value is an error."""
    return string.Template((FOLDER / name).read_text(encoding="utf-8")).substitute(values)


def render_users(*tenants: str) -> str:
    """Return ``users.conf`` for some tenants, with passwords in place of nkeys."""
    accounts = []
    for tenant in tenants:
        text = render(
            "users.conf",
            {"TENANT": tenant, "AGENT_NKEY": "AGENT_NKEY", "WORKER_NKEY": "WORKER_NKEY"},
        )
        for key, (user, password) in (
            ("AGENT_NKEY", AGENT_LOGIN),
            ("WORKER_NKEY", WORKER_LOGIN),
        ):
            text = text.replace(f"nkey: {key}", f"user: {user}-{tenant}, password: {password}")
        accounts.append(text[text.index("accounts {") + len("accounts {") : text.rindex("}")])
    return "accounts {" + "".join(accounts) + "}\n"


def settings_of(name: str, values: dict[str, str], *, users: str) -> str:
    """Return a server's template without what ``NatsServer`` sets itself, and with the users."""
    text = render(name, values | {"SERVER_NAME": "x", "LISTEN": "x"})
    text = re.sub(r"(?m)^(server_name|listen): .*$", "", text)
    assert text.count('include "users.conf"') == 1
    return text.replace('include "users.conf"', users)


def make_certificate(folder: Path) -> dict[str, str]:
    """Make a certificate for loopback that is its own authority; skipped without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=kvtide-test",
            "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return {"TLS_CERT": str(cert), "TLS_KEY": str(key), "TLS_CA": str(cert)}
