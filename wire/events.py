"""What a session tells its shell.

Owns the events that are not simply a message of the peer; those come as themselves
(``wire.messages``). Must not know: sessions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from wire.delivery import DeliverySample
from wire.messages import (
    Abort,
    Accept,
    Answered,
    Ask,
    Cancel,
    ChunkBad,
    ChunkKind,
    ChunkReady,
    Credit,
    Done,
    Failed,
    Recompute,
    Refuse,
    Token,
)


class Lane(enum.Enum):
    """Which connection a frame goes out on, so that control never waits behind data."""

    DATA = "data"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame to publish."""

    lane: Lane
    data: bytes


@dataclass(frozen=True, slots=True)
class Delivered:
    """A segment was acknowledged: a sample of the link."""

    sample: DeliverySample


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """Every segment of a transfer is acknowledged."""

    chunk: int
    part: int
    epoch: int
    num_bytes: int
    started_at_s: float
    """When its first segment went out."""
    finished_at_s: float


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """Three heartbeats are missing. The session goes on if the peer comes back."""

    since_s: float


@dataclass(frozen=True, slots=True)
class PeerBack:
    """The peer speaks again."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer was silent for the session's timeout; the session has failed."""

    silent_s: float


@dataclass(frozen=True, slots=True)
class ChunkComplete:
    """A transfer arrived whole and matches its digest; call ``consumed`` or ``reject`` for it."""

    chunk: int
    part: int
    epoch: int
    kind: ChunkKind
    level: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """The question, with its token ids."""

    ask: Ask
    token_ids: tuple[int, ...]


SenderEvent = (
    Accept
    | Refuse
    | Delivered
    | ChunkSent
    | ChunkReady
    | ChunkBad
    | Credit
    | Token
    | Answered
    | Done
    | Failed
    | PeerSilent
    | PeerBack
    | PeerLost
)
"""``Failed``: the worker gave up, or what it says makes no sense."""
ReceiverEvent = (
    ChunkComplete
    | Abort
    | Recompute
    | Asked
    | Cancel
    | ChunkBad
    | Failed
    | PeerSilent
    | PeerBack
    | PeerLost
)
"""``ChunkBad``: a bitstream did not match its digest and is asked for again; ``Failed``: the agent broke
the protocol, and the session is over."""
