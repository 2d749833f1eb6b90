"""States of both ends of a session, and every legal move between them.

Owns the two transition tables; everything about what is allowed when lives here. Invariant: a missing
entry is a protocol error, and an illegal move leaves the state as it was. Must not know: frames, time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import (
    Abort,
    Accept,
    Answered,
    Ask,
    Cancel,
    ChunkBad,
    ChunkReady,
    Credit,
    Done,
    Failed,
    Recompute,
    Refuse,
    Token,
)


class SenderState(enum.Enum):
    """The agent's end."""

    OPENING = "opening"
    SENDING = "sending"
    ASKED = "asked"
    ANSWERED = "answered"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReceiverState(enum.Enum):
    """The worker's end."""

    RECEIVING = "receiving"
    ASKED = "asked"
    ANSWERED = "answered"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


S = TypeVar("S", SenderState, ReceiverState)
Table = Mapping[S, Mapping[type[Any], S]]

SENDER_TRANSITIONS: Table[SenderState] = {
    SenderState.OPENING: {
        Accept: SenderState.SENDING,
        Refuse: SenderState.REFUSED,
        Cancel: SenderState.CANCELLED,
        Failed: SenderState.FAILED,
    },
    SenderState.SENDING: {
        Abort: SenderState.SENDING,
        Recompute: SenderState.SENDING,
        ChunkReady: SenderState.SENDING,
        ChunkBad: SenderState.SENDING,
        Credit: SenderState.SENDING,
        Ask: SenderState.ASKED,
        Cancel: SenderState.CANCELLED,
        Failed: SenderState.FAILED,
    },
    # Chunks still flow after the question was sent: it waits at the worker for the last of them, and
    # refinements may even come after the first token.
    SenderState.ASKED: {
        Abort: SenderState.ASKED,
        Recompute: SenderState.ASKED,
        ChunkReady: SenderState.ASKED,
        ChunkBad: SenderState.ASKED,
        Credit: SenderState.ASKED,
        Token: SenderState.ASKED,
        Answered: SenderState.ANSWERED,
        Cancel: SenderState.CANCELLED,
        Failed: SenderState.FAILED,
    },
    SenderState.ANSWERED: {
        Abort: SenderState.ANSWERED,
        ChunkReady: SenderState.ANSWERED,
        ChunkBad: SenderState.ANSWERED,
        Credit: SenderState.ANSWERED,
        Done: SenderState.DONE,
        Cancel: SenderState.CANCELLED,
        Failed: SenderState.FAILED,
    },
    SenderState.DONE: {},
    SenderState.REFUSED: {},
    SenderState.FAILED: {},
    SenderState.CANCELLED: {},
}

RECEIVER_TRANSITIONS: Table[ReceiverState] = {
    ReceiverState.RECEIVING: {
        Abort: ReceiverState.RECEIVING,
        Recompute: ReceiverState.RECEIVING,
        ChunkReady: ReceiverState.RECEIVING,
        ChunkBad: ReceiverState.RECEIVING,
        Credit: ReceiverState.RECEIVING,
        Ask: ReceiverState.ASKED,
        Cancel: ReceiverState.CANCELLED,
        Failed: ReceiverState.FAILED,
    },
    ReceiverState.ASKED: {
        Abort: ReceiverState.ASKED,
        Recompute: ReceiverState.ASKED,
        ChunkReady: ReceiverState.ASKED,
        ChunkBad: ReceiverState.ASKED,
        Credit: ReceiverState.ASKED,
        Token: ReceiverState.ASKED,
        Answered: ReceiverState.ANSWERED,
        Cancel: ReceiverState.CANCELLED,
        Failed: ReceiverState.FAILED,
    },
    ReceiverState.ANSWERED: {
        Abort: ReceiverState.ANSWERED,
        ChunkReady: ReceiverState.ANSWERED,
        ChunkBad: ReceiverState.ANSWERED,
        Credit: ReceiverState.ANSWERED,
        Done: ReceiverState.DONE,
        Cancel: ReceiverState.CANCELLED,
        Failed: ReceiverState.FAILED,
    },
    ReceiverState.DONE: {},
    ReceiverState.FAILED: {},
    ReceiverState.CANCELLED: {},
}


def advance(table: Table[S], state: S, trigger: type[Any], *, is_local: bool) -> S:
    """Return the state that ``trigger`` leads to.

    Raises:
        LocalProtocolError: this side's own move is not allowed.
        RemoteProtocolError: the peer's is not.
    """
    target = table[state].get(trigger)
    if target is None:
        error = LocalProtocolError if is_local else RemoteProtocolError
        raise error(f"{trigger.__name__} is not allowed in state {state.value}")
    return target


def draw(table: Table[S]) -> str:
    """Draw a table as a Mermaid state diagram, for docs/wire-protocol.md."""
    start = next(iter(table))
    lines = ["stateDiagram-v2", f"    [*] --> {start.value}"]
    for state, moves in table.items():
        by_target: dict[S, list[str]] = {}
        for trigger, target in moves.items():
            by_target.setdefault(target, []).append(trigger.__name__)
        lines += [
            f"    {state.value} --> {target.value}: {', '.join(names)}"
            for target, names in by_target.items()
        ]
        if not moves:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)
