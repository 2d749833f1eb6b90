"""The planner's words: choices, the state of a transfer, a decision.

Owns the value types that the programs fill in and read. Invariants: chunks are in token order and
touch one another; a text choice carries no bytes (token ids were sent at the start). Must not know:
wire, engine, codec.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.errors import InvalidState

TEXT = "text"
"""Name of the choice "the worker recomputes this chunk from its tokens"."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way of getting one chunk into the worker's KV cache."""

    name: str
    """Level name such as ``cachegen:1``, or ``text``."""
    num_bytes: int
    """Bytes to send; 0 for text."""
    decode_s: float
    """Time of the worker's decoder. Unit: seconds; 0 for text."""
    prefill_s: float
    """Time of the worker's engine; 0 unless text. Unit: seconds."""
    loss: float
    """Quality lost, at least 0: measured KL per token times tokens. Text and exact levels lose 0."""
    is_text: bool = False

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or self.decode_s < 0 or self.prefill_s < 0 or self.loss < 0:
            raise InvalidState(f"choice {self.name!r} has a negative cost")


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """A chunk and every way there is to get it across."""

    index: int
    token_start: int
    token_stop: int
    choices: tuple[Choice, ...]

    levels: tuple[Choice, ...] = field(init=False, repr=False, compare=False)
    """The choices that send KV."""
    text: Choice | None = field(init=False, repr=False, compare=False)
    """The recompute choice, where the engine can do it."""
    longest_decode_s: float = field(init=False, repr=False, compare=False)
    """The greatest decode time of its levels; 0 without levels."""
    greatest_loss: float = field(init=False, repr=False, compare=False)
    """The greatest measured loss of its levels; 0 without."""

    def __post_init__(self) -> None:
        if self.token_stop <= self.token_start or not self.choices:
            raise InvalidState(f"chunk {self.index} has no tokens or no choices")
        levels = tuple(choice for choice in self.choices if not choice.is_text)
        text = next((choice for choice in self.choices if choice.is_text), None)
        losses = [choice.loss for choice in levels if math.isfinite(choice.loss)]
        # Derived once: a plan of 64 chunks reads them a thousand times.
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "longest_decode_s", max((c.decode_s for c in levels), default=0.0))
        object.__setattr__(self, "greatest_loss", max(losses, default=0.0))

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.token_stop - self.token_start

    def choice(self, name: str) -> Choice | None:
        """The choice of that name, if there is one."""
        return next((choice for choice in self.choices if choice.name == name), None)


class Stage(enum.Enum):
    """How far a chunk is."""

    MISSING = "missing"
    """Nothing was decided."""
    IN_FLIGHT = "in_flight"
    """Chosen and not yet whole at the worker; for text: told to the worker and not yet prefilled."""
    ARRIVED = "arrived"
    """Every byte is acknowledged; the worker has yet to decode it."""
    READY = "ready"
    """In the worker's KV cache, or on the worker before the request."""


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """A chunk, what was chosen for it, and how far it is."""

    options: ChunkOptions
    stage: Stage = Stage.MISSING
    choice: Choice | None = None
    """What was chosen; None while missing, and for a chunk that the worker had before."""
    bytes_acked: int = 0
    """Of the choice's bytes, those acknowledged."""
    bytes_sent: int = 0
    """Of the choice's bytes, those handed to the transport, acknowledged or not."""
    epoch: int = 0
    """Counts the choices made for this chunk, from 0."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What the worker is busy with, as far as the sender knows."""

    queue_delay_s: float = 0.0
    """Time until the worker begins with this request at all, counted from now. Unit: seconds."""
    prefill_busy_s: float = 0.0
    """Time of prefill already begun or promised beyond this request's own text chunks."""
    tail_prefill_s: float = 0.0
    """Prefill of the question and the first token, after the last chunk is ready. Unit: seconds."""
    text_begun_s: float = 0.0
    """For how long the worker has been at the oldest text chunk that is in flight. Unit: seconds."""


@dataclass(frozen=True, slots=True)
class TransferState:
    """Everything that a policy may look at, except the link."""

    chunks: tuple[ChunkProgress, ...]
    """All chunks of the context, in token order."""
    elapsed_s: float
    """Since the request came to the agent. Unit: seconds."""
    deadline_s: float
    """TTFT aimed at, counted from the same moment. Unit: seconds."""
    worker: WorkerProgress = field(default_factory=WorkerProgress)
    bytes_in_flight: int = 0
    """Sent and not acknowledged, over all chunks of this request. Unit: bytes."""

    def __post_init__(self) -> None:
        if self.elapsed_s < 0 or self.deadline_s <= 0:
            raise InvalidState(
                f"elapsed {self.elapsed_s} s of a deadline of {self.deadline_s} s makes no sense"
            )
        for left, right in itertools.pairwise(self.chunks):
            if right.options.index != left.options.index + 1:
                raise InvalidState(
                    f"chunk {right.options.index} follows chunk {left.options.index}"
                )

    @property
    def remaining_s(self) -> float:
        """Time left to the deadline; may be negative."""
        return self.deadline_s - self.elapsed_s

    @property
    def missing(self) -> tuple[ChunkProgress, ...]:
        """Chunks for which nothing was decided, in token order."""
        return tuple(chunk for chunk in self.chunks if chunk.stage is Stage.MISSING)


class Reason(enum.Enum):
    """Why a decision is what it is."""

    FIXED = "fixed"
    """The policy knows nothing else."""
    DEFAULT_LEVEL = "default_level"
    """Nothing is known about the link yet."""
    BEST_THAT_FITS = "best_that_fits"
    """Least loss among what meets the deadline."""
    TEXT_NOTHING_FITS = "text_nothing_fits"
    """No level fits the time that is left, and the policy falls back to text."""
    RECOMPUTE_MEANWHILE = "recompute_meanwhile"
    """The engine would be idle: it recomputes from the front while KV arrives for the back."""
    FINISH_FIRST = "finish_first"
    """Nothing meets the deadline; this plan ends first."""
    ABANDON_TOO_SLOW = "abandon_too_slow"
    """The chunk in flight is given up for something that comes sooner."""
    UPGRADE = "upgrade"
    """The chunk just begun is given up for a finer level: the link is faster than it seemed."""
    REFINE = "refine"
    """Every chunk has its base; this improves one while time is left."""
    ONLY_CHOICE = "only_choice"
    """The chunk has a single choice."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next."""

    chunk_index: int
    choice: Choice
    reason: Reason
    expected_ttft_s: float
    """Median TTFT of the whole plan, from the request's arrival; infinite when nothing is known."""
    ttft_quantiles: tuple[tuple[float, float], ...] = ()
    """Pairs (probability, TTFT in seconds) of the plan."""
    meets_deadline: bool = True
    """False: no plan meets the deadline with the probability asked for."""
    abandons: bool = False
    """The chunk is in flight at another choice: abort that epoch and begin epoch + 1."""
    rate_bytes_per_s: float | None = None
    """The estimate that the decision rests on."""
    plan: Mapping[int, str] = field(default_factory=dict)
    """The whole plan at this moment: chunk index to choice name."""
    expected_loss: float = 0.0
    """Total quality loss of the plan."""
