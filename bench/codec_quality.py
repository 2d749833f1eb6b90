"""What each way of coding a KV cache costs and loses, on real coded bytes: the quality half of `bench.codec`.

Every scheme gets the same cache (float32, from position 0) and gives back bytes and a cache. Bytes are those of
a bitstream that the scheme's own decoder could read: symbols through the product's entropy coder, tables and
scales where the scheme sends them. Loss is measured on the text that follows, and on answers about text far
back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codec import Codec
from codec.entropy import RUN_DTYPE, BlockLayout, encode_blocks
from codec.measure import LossSum, compare_logits
from codec.tables import TableSet, quantize_frequencies

__all__ = [
    "Example",
    "Scheme",
    "baselines",
    "examples",
    "measure",
    "print_table",
    "product_schemes",
]

CONTEXT_TOKENS = 1536
CONTINUATION_TOKENS = 256
LMCACHE_CHUNK_TOKENS = 256
KIVI_GROUP = 32

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Example:
    """A context and what follows it."""

    name: str
    context: list[int]
    continuation: list[int]
    is_retrieval: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to code a cache."""

    name: str
    run: Callable[[F32, F32], tuple[int, F32]]
    """From kv [layer, 2, token, head, dim] and layer 0 to bytes and the lossy cache."""


@dataclass(slots=True)
class Result:
    """What a scheme cost and lost."""

    name: str
    text: LossSum = field(default_factory=LossSum)
    retrieval: LossSum = field(default_factory=LossSum)

    def row(self) -> dict[str, float | str]:
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
            "retrieval_kl": round(self.retrieval.kl / max(self.retrieval.tokens, 1), 6),
        }


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
        def run(kv: F32, layer0: F32) -> tuple[int, F32]:
            data = codec.encode(kv, level=level, token_start=0, layer0=layer0)
            return len(data), np.asarray(
                codec.decode(data, layer0=layer0, dtype=np.float32).kv, np.float32
            )

        return Scheme(level, run)

    return [scheme(info.name) for info in codec.levels()]


def baselines() -> list[Scheme]:
    """Return schemes of others that need no calibration."""
    return [
        Scheme("int4, absmax per token and head", _int4),
        Scheme("LMCache-like: absmax per token, tables in band", _lmcache),
        Scheme("KIVI-like: keys per channel, 4 bits", lambda kv, _: _kivi(kv, 4)),
        Scheme("KIVI-like: keys per channel, 2 bits", lambda kv, _: _kivi(kv, 2)),
    ]


def _int4(kv: F32, layer0: F32) -> tuple[int, F32]:
    del layer0
    scale = np.abs(kv).max(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = np.maximum(scale, 1e-6)
    symbols = np.clip(np.rint(kv / scale * 7), -7, 7)
    return kv.size // 2 + 2 * scale.size, (symbols * scale / 7).astype(np.float32)


def _lmcache(kv: F32, layer0: F32) -> tuple[int, F32]:
    """Bins 32 or 16 over [-absmax, absmax] of a token's channels, a table per channel and 256 tokens in band.

    Source: LMCache's cachegen serializer (public kernels): keys 32 bins in the first 10 layers, values 32 in the
    first 2, else 16; each channel's cumulative table as 16-bit numbers.
    """
    del layer0
    num_layers, _, num_tokens, heads, dim = kv.shape
    flat = kv.reshape(num_layers, 2, num_tokens, heads * dim)
    out = np.empty_like(flat)
    num_bytes = 0
    for layer in range(num_layers):
        for side in range(2):
            half = 15 if layer < (10, 2)[side] else 7
            for start in range(0, num_tokens, LMCACHE_CHUNK_TOKENS):
                part = flat[layer, side, start : start + LMCACHE_CHUNK_TOKENS]
                scale = np.abs(part).max(axis=1, keepdims=True).astype(np.float16)
                scale = np.maximum(scale.astype(np.float32), 1e-6)
                symbols = np.clip(np.rint(part / scale * half), -half, half).astype(np.int16)
                out[layer, side, start : start + len(part)] = symbols * scale / half
                num_bytes += 2 * len(part) + 2 * part.shape[1] * (2 * half + 3)
                num_bytes += _coded_bytes(symbols.T, half)
    return num_bytes, out.reshape(kv.shape)


def _kivi(kv: F32, bits: int) -> tuple[int, F32]:
    """Asymmetric groups of 32: keys along tokens per channel, values along channels per token.

    Source: KIVI, arXiv:2402.02750, without its window of recent tokens in full precision.
    """
    keys = _groups(np.moveaxis(kv[:, 0], 1, -1), bits)
    values = _groups(kv[:, 1], bits)
    out = np.stack((np.moveaxis(keys, -1, 1), values), axis=1)
    return kv.size * bits // 8 + kv.size // KIVI_GROUP * 4, np.ascontiguousarray(out, np.float32)


def _groups(values: F32, bits: int) -> F32:
    groups = values.reshape(*values.shape[:-1], -1, KIVI_GROUP)
    low = groups.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = (groups.max(axis=-1, keepdims=True) - low) / (2**bits - 1)
    step = np.maximum(step.astype(np.float16).astype(np.float32), 1e-6)
    symbols = np.clip(np.rint((groups - low) / step), 0, 2**bits - 1)
    return np.asarray((symbols * step + low).reshape(values.shape), np.float32)


def _coded_bytes(rows: npt.NDArray[np.int16], half: int) -> int:
    """Code each row with a table of its own symbols; the tables' bytes are the caller's."""
    tables = []
    for row in rows:
        counts = np.bincount(row + half, minlength=2 * half + 1).astype(np.float64)
        tables.append(quantize_frequencies(np.append(counts, 0.0)))
    runs = np.zeros(len(rows), RUN_DTYPE)
    runs["table"] = np.arange(len(rows))
    runs["length"] = rows.shape[1]
    layout = BlockLayout(runs, np.asarray([len(rows)]))
    table_set = TableSet.from_rows(np.full(len(rows), -half), tables)
    payload, _ = encode_blocks(layout, table_set, np.ascontiguousarray(rows).ravel(), num_threads=1)
    return len(payload)


# ---- measuring ------------------------------------------------------------------------------------------------


def measure(
    model: Any, schemes: Sequence[Scheme], cases: Sequence[Example], *, progress: bool = True
) -> list[Result]:
    """Measure all schemes on all examples, example by example, so that all see the same run.

    Args:
        model: `engine.TorchEngine`.
        schemes: what to measure.
        cases: what to measure on.
        progress: print one line per example.
    """
    results = [Result(scheme.name) for scheme in schemes]
    for case in cases:
        num_tokens = len(case.context)
        cache = model.new_cache(num_tokens + len(case.continuation))
        model.fill(cache, case.context, 0)
        kv = np.asarray(cache.read(0, num_tokens), np.float32)
        layer0 = model.layer0_kv(case.context)
        exact = model.prefill_logits(cache, case.continuation, num_tokens)
        for scheme, result in zip(schemes, results, strict=True):
            num_bytes, lossy_kv = scheme.run(kv, layer0)
            cache.write(0, lossy_kv)
            lossy = model.prefill_logits(cache, case.continuation, num_tokens)
            total = result.retrieval if case.is_retrieval else result.text
            total.bits += 8 * num_bytes
            total.elements += kv.size
            compare_logits(exact, lossy, case.continuation, total)
        if progress:
            print(f"  {case.name}: {num_tokens} tokens, {len(schemes)} schemes", flush=True)
    return results


def print_table(results: Sequence[Result]) -> None:
    """Print one row per scheme."""
    print(
        f"{'scheme':48} {'b/e':>7} {'vs fp16':>8} {'KL':>9} {'PPL':>8} {'top-1':>7} {'retr. KL':>9}"
    )
    for result in results:
        row = result.row()
        print(
            f"{row['scheme']:48} {row['bits_per_element']:7.3f} {row['ratio_to_fp16']:7.1f}x {row['kl']:9.5f} "
            f"{row['ppl_ratio']:8.4f} {100 * float(row['top1']):6.2f}% {row['retrieval_kl']:9.5f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the product's levels beside the baselines: `python -m bench.codec_quality`."""
    import argparse

    from codec import Rotary, bundled_profiles
    from codec.geometry import Geometry
    from codec.profile import Profile
    from engine import load_engine

    parser = argparse.ArgumentParser(prog="python -m bench.codec_quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True, help="the data folder's `text`")
    parser.add_argument("--profile", type=Path, nargs="*", help="default: the bundled ones")
    parser.add_argument("--only", help="comma-separated names of examples")
    parser.add_argument("--levels", help="comma-separated levels, no baselines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    model = load_engine(arguments.model, num_threads=arguments.threads)
    digest = model.identity.model_digest
    profiles = (
        [Profile.load(path) for path in arguments.profile]
        if arguments.profile
        else bundled_profiles(digest)
    )
    shape = model.geometry
    tables = model.rotary_tables(CONTEXT_TOKENS)
    codec = Codec(
        Geometry(shape.num_layers, shape.num_kv_heads, shape.head_dim),
        model_digest=digest,
        profiles=profiles,
        num_threads=arguments.threads,
        rotary=Rotary(
            cos=tables.cos,
            sin=tables.sin,
            table_of_layer=np.asarray(tables.table_of_layer, np.int64),
            interleaved=tables.interleaved,
        ),
    )
    schemes = product_schemes(codec) + baselines()
    if arguments.levels:
        wanted = arguments.levels.split(",")
        schemes = [scheme for scheme in schemes if scheme.name in wanted]
    cases = examples(arguments.texts, model.tokenizer.encode)
    if arguments.only:
        cases = [case for case in cases if case.name in arguments.only.split(",")]
    results = measure(model, schemes, cases)
    print_table(results)
    if arguments.json:
        arguments.json.write_text(json.dumps([result.row() for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
