"""Small states for the planner's tests."""

from __future__ import annotations

from planner import (
    TEXT,
    Choice,
    ChunkOptions,
    ChunkProgress,
    DeliverySample,
    Stage,
    TransferState,
    WorkerProgress,
)

LEVELS = (
    ("cachegen:0", 4_000_000, 10.0),
    ("cachegen:1", 2_000_000, 50.0),
    ("cachegen:2", 1_000_000, 200.0),
)


def options(
    index: int,
    *,
    levels: tuple[tuple[str, int, float], ...] = LEVELS,
    tokens: int = 1000,
    decode_s: float = 0.1,
    prefill_s: float = 2.0,
    text: bool = True,
) -> ChunkOptions:
    choices = [
        Choice(name, num_bytes, decode_s, 0.0, loss, is_text=False)
        for name, num_bytes, loss in levels
    ]
    if text:
        choices.append(Choice(TEXT, 0, 0.0, prefill_s, 0.0, is_text=True))
    return ChunkOptions(index, index * tokens, (index + 1) * tokens, tuple(choices))


def state(
    *chunks: ChunkOptions,
    deadline_s: float = 10.0,
    elapsed_s: float = 0.0,
    stages: dict[int, tuple[Stage, str]] | None = None,
    tail_s: float = 0.0,
    bytes_in_flight: int = 0,
) -> TransferState:
    rows = []
    for chunk in chunks:
        stage, name = (stages or {}).get(chunk.index, (Stage.MISSING, ""))
        choice = chunk.choice(name) if name else None
        sent = choice.num_bytes if choice is not None else 0
        rows.append(ChunkProgress(chunk, stage, choice, bytes_sent=sent))
    return TransferState(
        tuple(rows),
        elapsed_s,
        deadline_s,
        WorkerProgress(tail_prefill_s=tail_s),
        bytes_in_flight=bytes_in_flight,
    )


def sample(
    rate: float, at_s: float, *, rtt_s: float = 0.04, limited: bool = False
) -> DeliverySample:
    num_bytes = max(8192, round(rate * 0.1))
    return DeliverySample(
        bytes=num_bytes,
        interval_s=num_bytes / rate,
        delivered_at_s=at_s,
        rtt_s=rtt_s,
        window_limited=limited,
    )
