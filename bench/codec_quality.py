"""What each way of coding a KV cache costs and loses, on real coded bytes: the quality half of `bench.codec`.

Every scheme gets the same cache (float32, from position 0) and gives back bytes and a cache. Bytes are those of
a bitstream that the scheme's own decoder could read: symbols through the product's entropy coder, tables and
scales where the scheme sends them. Loss is measured on the text that follows, and on answers about text far
back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench._harness import machine_lines
from bench.baselines import Coded, Prepared, Scheme, calibrated_kvtc, uncalibrated
from bench.equal_loss import Point, bits_at, share_over
from bench.klt_cost import KltCost, klt_cost
from codec import Codec
from codec.klt import KltTransform
from codec.measure import LossSum, compare_logits

__all__ = ["Example", "Result", "examples", "measure", "prepare", "print_table", "product_schemes"]

CONTEXT_TOKENS = 1536
CONTINUATION_TOKENS = 256

_ROOT = Path(__file__).resolve().parents[1]
README = _ROOT / "README.md"
CODEC_PAGE = _ROOT / "docs/codec-klt.md"
README_SCHEMES = (
    "int8",
    "klt:2",
    "klt:4",
    "klt:6",
    "cachegen:2",
    "int4",
    "LMCache",
    "KIVI",
    "KVTC",
)
"""What schemes of README's shorter table begin with."""

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Example:
    """A context and what follows it."""

    name: str
    context: list[int]
    continuation: list[int]
    is_retrieval: bool


@dataclass(slots=True)
class Result:
    """What a scheme cost and lost."""

    name: str
    text: LossSum = field(default_factory=LossSum)
    retrieval: LossSum = field(default_factory=LossSum)
    elements: int = 0
    encode_s: float | None = 0.0
    decode_s: float | None = 0.0
    prefill_s: float = 0.0

    def add_times(self, coded: Coded, elements: int, prefill_s: float) -> None:
        """Add CPU seconds; one coding without them leaves the sums without."""
        self.elements += elements
        self.prefill_s += prefill_s
        for name in ("encode_s", "decode_s"):
            old, new = getattr(self, name), getattr(coded, name)
            setattr(self, name, None if old is None or new is None else old + new)

    def row(self) -> dict[str, Any]:
        """Return the table's row."""
        bits = self.text.bits / self.text.elements
        return {
            "scheme": self.name,
            "bits_per_element": round(bits, 4),
            "ratio_to_fp16": round(16 / bits, 2),
            "kl": round(self.text.kl / self.text.tokens, 6),
            "ppl_ratio": round(
                float(np.exp(self.text.log_ppl_difference / self.text.scored_tokens)), 5
            ),
            "top1": round(self.text.agreements / self.text.tokens, 4),
            "retrieval_kl": (
                round(self.retrieval.kl / self.retrieval.tokens, 6)
                if self.retrieval.tokens
                else None
            ),
            "encode_msym_per_s": _rate(self.elements, self.encode_s),
            "decode_msym_per_s": _rate(self.elements, self.decode_s),
            "decode_over_prefill": (
                None if not self.decode_s else round(self.decode_s / self.prefill_s, 4)
            ),
        }


def _rate(elements: int, seconds: float | None) -> float | None:
    return None if not seconds else round(elements / seconds / 1e6, 1)


# ---- examples -----------------------------------------------------------------------------------------------


def examples(folder: Path, encode: Callable[[str], Sequence[int]]) -> list[Example]:
    """Cut the evaluation texts into contexts; one or two of each kind, always the same.

    Args:
        folder: the data folder's `text`.
        encode: from text to token ids.
    """
    out = []
    places = (
        ("prose", "prose/news_from_nowhere_pg3261.txt", 120_000),
        ("wiki", "wiki/wikitext-2.test.txt", 300_000),
        ("technical", "technical/debian-reference.en.first200k.txt", 60_000),
        ("code", "code/cpython-3.11.7_argparse.py", 30_000),
        ("chinese", "multilingual/debian-reference.zh-cn.first200k.txt", 40_000),
    )
    for name, path, start in places:
        text = (folder / path).read_text(encoding="utf-8")[start : start + 30_000]
        out.append(_cut(name, encode(text)))
    meeting = json.loads((folder / "dialogue/qmsum_IS1003a.json").read_text(encoding="utf-8"))
    lines = [f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]]
    out.append(_cut("dialogue", encode("\n".join(lines)[2_000:32_000])))
    out += _topics(folder / "retrieval/longchat_1_topics.first50.jsonl", encode)
    out += _passkeys(folder / places[0][1], encode)
    return out


def _cut(name: str, ids: Sequence[int]) -> Example:
    stop = CONTEXT_TOKENS + CONTINUATION_TOKENS
    return Example(name, list(ids[:CONTEXT_TOKENS]), list(ids[CONTEXT_TOKENS:stop]), False)


def _topics(path: Path, encode: Callable[[str], Sequence[int]]) -> Iterator[Example]:
    """Several conversations in a row; the answer is the topic of the first."""
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    opening = "USER: I would like"
    for first in (0, 10, 20):
        bodies = []
        for case in cases[first : first + 6]:
            prompt = case["prompt"]
            bodies.append(prompt[prompt.index(opening) : prompt.rindex("USER:")])
        head = cases[first]["prompt"]
        context = encode(head[: head.index(opening)] + "".join(bodies))[:CONTEXT_TOKENS]
        answer = encode(
            "\n USER: Now the record ends. What is the first topic we discussed? Only give me the topic name."
            f" \n ASSISTANT: The first topic we discussed was {cases[first]['topics'][0]}"
        )
        yield Example(f"topics {first}", list(context), list(answer), True)


def _passkeys(path: Path, encode: Callable[[str], Sequence[int]]) -> Iterator[Example]:
    filler = path.read_text(encoding="utf-8")[200_000:]
    for number, (place, key) in enumerate(((200, "71928"), (700, "40516"))):
        ids = list(encode(filler[number * 9_000 : number * 9_000 + 20_000]))
        told = list(encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"))
        asked = f"\n\nWhat is the pass key? The pass key is {key}. I repeat, the pass key is {key}."
        context = (ids[:place] + told + ids[place:])[:CONTEXT_TOKENS]
        yield Example(f"pass key {number}", context, list(encode(asked)), True)


# ---- schemes ------------------------------------------------------------------------------------------------


def product_schemes(codec: Codec) -> list[Scheme]:
    """Return every level of a codec."""

    def scheme(level: str) -> Scheme:
        def run(context: Prepared) -> Coded:
            start = time.process_time()
            data = codec.encode(context.kv, level=level, token_start=0, layer0=context.layer0)
            middle = time.process_time()
            chunk = codec.decode(data, layer0=context.layer0, dtype=np.float32)
            stop = time.process_time()
            context.memo[f"bitstream {level}"] = data
            return Coded(len(data), np.asarray(chunk.kv, np.float32), middle - start, stop - middle)

        return Scheme(level, run)

    return [scheme(info.name) for info in codec.levels()]


# ---- measuring ------------------------------------------------------------------------------------------------


def prepare(model: Any, token_ids: Sequence[int]) -> tuple[Prepared, float]:
    """Prefill a context; returns it and the CPU seconds of the prefill."""
    cache = model.new_cache(len(token_ids))
    start = time.process_time()
    model.fill(cache, token_ids, 0)
    taken = time.process_time() - start
    kv = np.asarray(cache.read(0, len(token_ids)), np.float32)
    return Prepared(model, token_ids, kv, model.layer0_kv(token_ids)), taken


def measure(
    model: Any,
    schemes: Sequence[Scheme],
    cases: Sequence[Example],
    *,
    on_context: Callable[[Example, Prepared], object] = lambda case, context: None,
    progress: bool = True,
) -> list[Result]:
    """Measure all schemes on all examples, example by example, so that all see the same run.

    Args:
        model: `engine.TorchEngine`.
        schemes: what to measure.
        cases: what to measure on.
        on_context: called after each example's schemes; its memo then holds "bitstream LEVEL".
        progress: print one line per example.
    """
    results = [Result(scheme.name) for scheme in schemes]
    for number, case in enumerate(cases):
        context, prefill_s = prepare(model, case.context)
        if number == 0:  # what happens once per process is not a chunk's time
            for scheme in schemes:
                if scheme.name.startswith("klt:"):
                    scheme.run(context)
        exact = continuation_logits(model, context.kv, case.continuation)
        for scheme, result in zip(schemes, results, strict=True):
            coded = scheme.run(context)
            lossy = continuation_logits(model, coded.kv, case.continuation)
            total = result.retrieval if case.is_retrieval else result.text
            total.bits += 8 * coded.num_bytes
            total.elements += context.kv.size
            result.add_times(coded, context.kv.size, prefill_s)
            compare_logits(exact, lossy, case.continuation, total)
        on_context(case, context)
        if progress:
            print(f"  {case.name}: {context.num_tokens} tokens, {len(schemes)} schemes", flush=True)
    return results


def continuation_logits(model: Any, kv: F32, token_ids: Sequence[int]) -> F32:
    """Return float32 [token, vocab]: logits after each token of what follows a cache."""
    num_tokens = kv.shape[2]
    cache = model.new_cache(num_tokens + len(token_ids))
    cache.write(0, kv)
    return np.asarray(model.prefill_logits(cache, token_ids, num_tokens), np.float32)


COLUMNS = (
    ("b/e", "bits_per_element", 7, "{:.3f}"),
    ("vs fp16", "ratio_to_fp16", 8, "{:.1f}x"),
    ("KL", "kl", 9, "{:.5f}"),
    ("PPL", "ppl_ratio", 8, "{:.4f}"),
    ("top-1", "top1", 8, "{:.2%}"),
    ("retr. KL", "retrieval_kl", 9, "{:.5f}"),
    ("enc Msym/s", "encode_msym_per_s", 11, "{:.0f}"),
    ("dec Msym/s", "decode_msym_per_s", 11, "{:.0f}"),
    ("dec/prefill", "decode_over_prefill", 12, "{:.1%}"),
)
"""Heading, field, width, format."""


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per scheme."""
    print(f"{'scheme':48}" + "".join(f"{heading:>{width}}" for heading, _, width, _ in COLUMNS))
    for row in rows:
        cells = (
            f"{'-' if row[name] is None else form.format(row[name]):>{width}}"
            for _, name, width, form in COLUMNS
        )
        print(f"{row['scheme']:48}" + "".join(cells))


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the same as Markdown."""
    lines = ["| scheme | " + " | ".join(heading for heading, *_ in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for row in rows:
        cells = (
            "-" if row[name] is None else form.format(row[name]) for _, name, _, form in COLUMNS
        )
        lines.append(f"| {row['scheme']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparison_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Compare klt with KVTC-like over KL 0.003 to 0.02, and with LMCache-like at its own KL."""

    def points(prefix: str) -> list[Point]:
        return [
            (row["bits_per_element"], row["kl"]) for row in rows if row["scheme"].startswith(prefix)
        ]

    ours, kvtc, lmcache = points("klt:"), points("KVTC-like"), points("LMCache-like")
    lines = []
    share = share_over(ours, kvtc) if ours and kvtc else None
    if share is not None:
        lines.append(
            f"klt over KVTC-like at equal KL, {share.low_kl:.4f} to {share.high_kl:.4f}: "
            f"worst {share.worst:.0%}, mean {share.mean:.0%} of the bytes"
        )
    for bits, kl in lmcache:
        mine = bits_at(ours, kl) if ours else None
        if mine is not None:
            lines.append(
                f"klt over LMCache-like at its KL of {kl:.4f}: {mine / bits:.1%} of the bytes"
            )
    return lines


def cost_lines(costs: dict[str, list[KltCost]]) -> list[str]:
    """Compare coded bytes with cross-entropy, mean over contexts."""
    lines = [
        "bytes against cross-entropy of the symbols; sinks and loud tokens are coded without tables:"
    ]
    for level, found in costs.items():
        total = sum(cost.total_bytes for cost in found)
        symbols = sum(cost.symbol_bytes for cost in found)
        beside = sum(cost.beside_bytes for cost in found)
        lines.append(
            f"  {level}: {total / (symbols + beside) - 1:+.2%} over symbols and what is beside them, "
            f"{total / symbols - 1:+.2%} over symbols alone ({len(found)} chunks)"
        )
    return lines


MARK = "<!-- bench.codec --readme: {} -->"


def replace_between_marks(text: str, table: str) -> str:
    """Put a table between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    begin, end = MARK.format("begin"), MARK.format("end")
    if begin not in text or end not in text:
        raise ValueError(f"the page has no marks {begin} and {end}")
    head, tail = text.partition(begin)[0], text.partition(end)[2]
    return f"{head}{begin}\n{table}\n{end}{tail}"


def load_model_and_codec(
    name: str, profiles: Sequence[Path], *, num_threads: int
) -> tuple[Any, Codec]:
    """Load a model and a codec with profiles from files, or with the bundled ones."""
    from codec import Rotary, bundled_profiles
    from codec.geometry import Geometry
    from codec.profile import Profile
    from engine import load_engine

    model = load_engine(name, num_threads=num_threads)
    digest = model.identity.model_digest
    shape = model.geometry
    tables = model.rotary_tables(CONTEXT_TOKENS)
    return model, Codec(
        Geometry(shape.num_layers, shape.num_kv_heads, shape.head_dim),
        model_digest=digest,
        profiles=[Profile.load(path) for path in profiles] or bundled_profiles(digest),
        num_threads=num_threads,
        rotary=Rotary(
            cos=tables.cos,
            sin=tables.sin,
            table_of_layer=np.asarray(tables.table_of_layer, np.int64),
            interleaved=tables.interleaved,
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the product's levels beside the baselines: `python -m bench.codec_quality`."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m bench.codec_quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True, help="the data folder's `text`")
    parser.add_argument(
        "--profile", type=Path, nargs="*", default=[], help="default: the bundled ones"
    )
    parser.add_argument("--only", help="comma-separated names of examples")
    parser.add_argument("--levels", help="comma-separated levels, no baselines")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument(
        "--readme", action="store_true", help="rewrite the tables in the documentation"
    )
    arguments = parser.parse_args(argv)
    model, codec = load_model_and_codec(
        arguments.model, arguments.profile, num_threads=arguments.threads
    )
    schemes = product_schemes(codec)
    if arguments.levels:
        wanted = arguments.levels.split(",")
        schemes = [scheme for scheme in schemes if scheme.name in wanted]
    else:
        schemes += uncalibrated() + calibrated_kvtc(model)
    cases = examples(arguments.texts, model.tokenizer.encode)
    if arguments.only:
        cases = [case for case in cases if case.name in arguments.only.split(",")]
    klt = [p for p in codec.profiles if p.level_set == "klt"]
    transform = KltTransform(klt[0], num_threads=1, rotary=codec.rotary) if klt else None
    costs: dict[str, list[KltCost]] = {}

    def count(case: Example, context: Prepared) -> None:
        for name, data in context.memo.items():
            level = name.removeprefix("bitstream ")
            if transform is not None and level.startswith("klt:") and level != name:
                costs.setdefault(level, []).append(klt_cost(transform, data))

    results = measure(model, schemes, cases, on_context=count)
    rows = [result.row() for result in results]
    lines = comparison_lines(rows) + cost_lines(costs)
    machine = machine_lines("numpy", "torch")
    print_table(rows)
    print("\n".join(["", *lines, "", f"{arguments.threads} thread(s), CPU time", *machine]))
    if arguments.json:
        report = {
            "machine": machine,
            "cases": [c.name for c in cases],
            "rows": rows,
            "lines": lines,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.readme:
        rewrite_pages(report)
    return 0


def rewrite_pages(report: dict[str, Any]) -> None:
    """Put a run's tables into the documentation, and what they are of."""
    kinds = ", ".join(report["cases"])
    caption = (
        f"Means over {kinds}: contexts of {CONTEXT_TOKENS} tokens, {CONTINUATION_TOKENS} tokens of continuation, real "
        'coded bytes with everything counted. "retr. KL" is on answers about text far back (topics, pass key). '
        "Speeds are of one thread, CPU time, into float32; decode is also given over the prefill of the same tokens. "
        f"{report['machine'][0]}; {report['machine'][1]}."
    )
    short = [row for row in report["rows"] if row["scheme"].startswith(README_SCHEMES)]
    lines = "\n".join(f"- {line.strip()}" for line in report["lines"])
    whole = f"{caption}\n\n{markdown_table(report['rows'])}\n\n{lines}"
    for page, table in ((README, markdown_table(short)), (CODEC_PAGE, whole)):
        text = replace_between_marks(page.read_text(encoding="utf-8"), table)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
