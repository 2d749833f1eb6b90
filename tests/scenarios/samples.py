"""A report as a run would make it, computed without programs; used by several tests."""

from __future__ import annotations

from scenarios.results import (
    ChunkRecord,
    EvaluationRecord,
    IngestRecord,
    LinkRecord,
    RequestRecord,
    RunReport,
)

RATE = 1_800_000.0
CHUNK_BYTES = {
    "fp16": 35_389_440,
    "int8": 17_970_000,
    "cachegen:2": 6_700_000,
    "cachegen:3": 5_400_000,
    "klt:1": 4_100_000,
}


def request(
    policy: str, choices: tuple[str, ...], *, kl: float, deadline_s: float = 15.0
) -> RequestRecord:
    """Return one request whose chunks follow one another on a link of 14.4 Mbit/s."""
    chunks: list[ChunkRecord] = []
    link_s, work_s, sent = 0.12, 0.12, 0
    for index, choice in enumerate(choices):
        size = CHUNK_BYTES.get(choice, 0)
        sent += size
        is_text = choice == "text"
        begin_s, link_s = link_s, link_s + (0.02 if is_text else size / RATE)
        start_s = max(work_s, link_s)
        work_s = start_s + (4.9 + index if is_text else 0.35)
        chunks.append(
            ChunkRecord(
                index=index,
                token_start=index * 1536,
                token_stop=index * 1536 + 1536,
                choice=choice,
                num_bytes=size,
                send_start_s=begin_s,
                acked_s=link_s,
                decode_start_s=start_s,
                decode_end_s=work_s,
                ready_s=work_s,
            )
        )
    steps = int(link_s / 0.1) + 20
    return RequestRecord(
        policy=policy,
        context="handbook",
        question="Which <gate> is it & why?",
        repetition=0,
        deadline_s=deadline_s,
        num_tokens=1536 * len(choices),
        ttft_s=work_s + 0.4,
        bytes_sent=sent,
        answer=f"The answer under {policy}.",
        chunks=tuple(chunks),
        prefill_start_s=work_s,
        prefill_end_s=work_s + 0.35,
        last_token_s=work_s + 2.0,
        delivery=tuple((0.3 * i, RATE * (0.9 + 0.02 * (i % 10))) for i in range(int(link_s / 0.3))),
        decisions=tuple(
            {
                "at_s": chunk.send_start_s,
                "chunk": chunk.index,
                "choice": chunk.choice,
                "expected_ttft_s": None if chunk.index == 0 else work_s * (1.3 - 0.1 * chunk.index),
                "ttft_quantiles": [[0.5, work_s], [0.9, work_s * 1.6]],
                "rate_bytes_per_s": None if chunk.index == 0 else RATE * (1.0 + 0.1 * chunk.index),
            }
            for chunk in chunks
        ),
        evaluation=EvaluationRecord(kl, 1.0 - kl, kl < 0.01, "The exact answer."),
        link=LinkRecord(
            0.1,
            tuple(RATE * (1.0 + 0.3 * ((i // 7) % 3 - 1)) for i in range(steps)),
            tuple(RATE * (0.95 + 0.3 * ((i // 7) % 3 - 1)) for i in range(steps - 20))
            + (0.0,) * 20,
        ),
    )


def report(*, requests: tuple[RequestRecord, ...] | None = None) -> RunReport:
    """Return a report with the policies of the demo."""
    made = requests or (
        request("text", ("text",) * 4, kl=0.0),
        request("fp16", ("fp16",) * 4, kl=0.0),
        request("int8", ("int8",) * 4, kl=0.0002),
        request("fixed:cachegen:2", ("cachegen:2",) * 4, kl=0.034),
        request("cachegen", ("cachegen:2", "cachegen:3", "cachegen:3", "text"), kl=0.041),
        request("kvtide", ("text", "klt:1", "klt:1", "klt:1"), kl=0.012),
    )
    return RunReport(
        scenario="demo",
        summary="a handbook over an LTE-like uplink",
        mode="real",
        policies=tuple(dict.fromkeys(r.policy for r in made)),
        slo_s=15.0,
        seed=7,
        model="smollm2-135m",
        dtype="float32",
        trace="lte-uplink.txt",
        trace_mean_bytes_per_s=RATE,
        one_way_delay_s=0.02,
        queue_bytes=131072,
        version="0.1.0",
        commit="0123456789ab",
        machine="a processor, 2 cores",
        started_at="2026-01-02T03:04:05+00:00",
        duration_s=201.5,
        ingests=(
            IngestRecord("handbook", 6144, 4, {"fp16": 141_557_760, "int8": 71_880_000}, 31.0),
        ),
        requests=made,
    )
