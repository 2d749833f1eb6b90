"""NATS subjects, per tenant, so that permissions can fence them.

Owns the naming rule. Invariant: a name that could widen a subject (dots, wildcards, spaces) is
refused. Must not know: NATS itself.
"""

from __future__ import annotations

import re

from wire.errors import LocalProtocolError

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")

MAX_INBOX = 200
"""Source: NATS documentation, subjects of at most 256 characters; a session id follows."""

WORKER_QUEUE = "workers"
"""Queue group that claims sessions; the segments of a session never go through a queue group."""


def check_name(name: str, *, what: str) -> str:
    """Return a tenant or worker name that is safe as one token of a subject.

    Raises:
        LocalProtocolError: it is empty, too long or has other characters than letters, digits, ``_-``.
    """
    if not _TOKEN.fullmatch(name):
        raise LocalProtocolError(
            f"{what} {name!r} must be 1 to 64 letters, digits, underscores or hyphens"
        )
    return name


def open_subject(tenant: str) -> str:
    """Where agents of a tenant ask for a worker."""
    return f"kvtide.{check_name(tenant, what='tenant')}.open"


def data_subject(tenant: str, worker: str, session: bytes) -> str:
    """Where a session's segments go, agent to worker."""
    return f"{_session_prefix(tenant, worker, session)}.d"


def control_subject(tenant: str, worker: str, session: bytes) -> str:
    """Where a session's control messages go, agent to worker, on the second connection."""
    return f"{_session_prefix(tenant, worker, session)}.c"


def reply_subject(inbox: str, session: bytes) -> str:
    """Where the worker's frames of a session go, on the agent's own inbox."""
    return f"{inbox}.{session.hex()}"


def agent_inbox(tenant: str, agent: str) -> str:
    """Prefix of everything that comes back to an agent; its user's permissions name it."""
    return f"kvtide.{check_name(tenant, what='tenant')}.i.{check_name(agent, what='agent')}"


def check_inbox(inbox: str, *, tenant: str) -> str:
    """Return an inbox that a worker may publish to for this tenant.

    Raises:
        LocalProtocolError: it is no subject, or one outside the tenant's inboxes: an agent must not be
            able to make a worker publish anywhere else.
    """
    head, *rest = inbox.split(".")
    fence = ["kvtide", tenant, "i"]
    is_fenced = (head == "_INBOX" and rest) or ([head, *rest][:3] == fence and len(rest) > 2)
    if len(inbox) > MAX_INBOX or not is_fenced or not all(map(_TOKEN.fullmatch, rest)):
        raise LocalProtocolError(f"inbox {inbox[:80]!r} is not one of tenant {tenant!r}")
    return inbox


def _session_prefix(tenant: str, worker: str, session: bytes) -> str:
    tenant = check_name(tenant, what="tenant")
    worker = check_name(worker, what="worker")
    return f"kvtide.{tenant}.w.{worker}.{session.hex()}"
