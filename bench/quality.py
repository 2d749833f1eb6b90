"""What lossy KV caches lose on texts and answers: `python -m bench.quality`. Resumable; intervals by bootstrap.

Loss on questions far back: KL is over the exact cache's own answer, agreement is of greedy answers, score is
against the right ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench._harness import machine_lines
from bench.baselines import Prepared, Scheme, calibrated_kvtc, evicted, pruned, uncalibrated
from bench.cases import KINDS, Case, answer_score, cases_of
from bench.codec_quality import continuation_logits, load_model_and_codec, prepare, product_schemes
from codec import Codec
from codec.measure import LossSum, compare_logits

__all__ = [
    "Row",
    "bootstrap",
    "claim",
    "measure_cases",
    "read_rows",
    "run_case",
    "schemes_of",
    "summarize",
]

ANSWER_TOKENS = 16
RESAMPLES = 1000
UNDER = ("klt:2", "klt:4")
"""Levels that token dropping is combined with."""

KEPT = (0.75, 0.5)
SETS = ("fp16", "int8", "klt", "cachegen", "others", "kvtc", "h2o", "llmlingua")

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """What one scheme lost on one case."""

    kind: str
    case: str
    scheme: str
    bits: float
    elements: int
    """Of the whole context, dropped tokens included."""

    kl: float
    tokens: int
    log_ppl_difference: float
    scored_tokens: int
    agreements: int
    same_answer: float | None = None
    score: float | None = None
    exact_score: float | None = None


def schemes_of(names: Sequence[str], codec: Codec, model: Any) -> list[Scheme]:
    """Return the schemes of some sets.

    Raises:
        ValueError: no such set.
    """
    product = {scheme.name: scheme for scheme in product_schemes(codec)}
    out: list[Scheme] = []
    for name in names:
        if name not in SETS:
            raise ValueError(f"no set of schemes {name!r}; there are {', '.join(SETS)}")
        if name == "others":
            out += uncalibrated()
        elif name == "kvtc":
            out += calibrated_kvtc(model)
        elif name in ("h2o", "llmlingua"):
            inner = [product[level] for level in ("int8", *UNDER) if level in product]
            for keep in KEPT:
                if name == "llmlingua":
                    out += [pruned(scheme, keep) for scheme in inner]
                else:
                    out.append(evicted(product["int8"], keep, by_head=True))
                    out += [evicted(scheme, keep, by_head=False) for scheme in inner]
        else:
            out += [
                scheme
                for level, scheme in product.items()
                if level == name or level.startswith(name + ":")
            ]
    return out


def run_case(model: Any, case: Case, schemes: Sequence[Scheme]) -> list[Row]:
    """Measure schemes on one case."""
    context, _ = prepare(model, case.context)
    tail = list(case.tail)
    exact_answer: list[int] = []
    if case.answers:
        exact_answer = _answer(model, context.kv, tail)
    scored = tail + exact_answer
    # A question's own tokens are given, so only what follows it counts.
    first = len(tail) - 1 if case.answers else 0
    exact = continuation_logits(model, context.kv, scored)
    return [
        _row(model, case, context, scheme, exact[first:], scored, first, exact_answer)
        for scheme in schemes
    ]


def _row(
    model: Any,
    case: Case,
    context: Prepared,
    scheme: Scheme,
    exact: npt.NDArray[np.float32],
    scored: list[int],
    first: int,
    exact_answer: list[int],
) -> Row:
    coded = scheme.run(context)
    lossy = continuation_logits(model, coded.kv, scored)[first:]
    total = LossSum()
    compare_logits(exact, lossy, scored[first:], total)
    answers: dict[str, float] = {}
    if case.answers:
        decode = model.tokenizer.decode
        said = _answer(model, coded.kv, list(case.tail))
        answers = {
            "same_answer": float(said == exact_answer),
            "score": answer_score(decode(said), case.answers),
            "exact_score": answer_score(decode(exact_answer), case.answers),
        }
    return Row(
        kind=case.kind,
        case=case.name,
        scheme=scheme.name,
        bits=8.0 * coded.num_bytes,
        elements=int(context.kv.size),
        kl=total.kl,
        tokens=total.tokens,
        log_ppl_difference=total.log_ppl_difference,
        scored_tokens=total.scored_tokens,
        agreements=total.agreements,
        **answers,
    )


def _answer(model: Any, kv: npt.NDArray[np.float32], question: list[int]) -> list[int]:
    from engine.sampling import Sampling

    num_tokens = kv.shape[2]
    cache = model.new_cache(num_tokens + len(question) + ANSWER_TOKENS)
    cache.write(0, kv)
    logits = model.prefill(cache, question, num_tokens)
    start = num_tokens + len(question)
    return list(model.generate(cache, logits, start, Sampling(temperature=0.0), ANSWER_TOKENS))


# ---- summary --------------------------------------------------------------------------------------------------


def bootstrap(
    rows: Sequence[Row], figure: Callable[[Sequence[Row]], float], *, seed: int = 0
) -> tuple[float, float, float]:
    """Return a figure over rows and its 95 % interval, cases drawn anew.

    Args:
        rows: of one scheme, at least one.
        figure: from rows to a number.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(rows), (RESAMPLES, len(rows)))
    values = [figure([rows[i] for i in draw]) for draw in draws]
    low, high = np.quantile(values, (0.025, 0.975))
    return figure(rows), float(low), float(high)


def _sum(rows: Iterable[Row], name: str) -> float:
    return float(sum(getattr(row, name) for row in rows))


FIGURES: dict[str, Callable[[Sequence[Row]], float]] = {
    "bits_per_element": lambda rows: _sum(rows, "bits") / _sum(rows, "elements"),
    "kl": lambda rows: _sum(rows, "kl") / _sum(rows, "tokens"),
    "ppl_ratio": lambda rows: float(
        np.exp(_sum(rows, "log_ppl_difference") / max(_sum(rows, "scored_tokens"), 1))
    ),
    "top1": lambda rows: _sum(rows, "agreements") / _sum(rows, "tokens"),
}
ANSWER_FIGURES: dict[str, Callable[[Sequence[Row]], float]] = {
    name: lambda rows, name=name: _sum(rows, name) / len(rows)  # type: ignore[misc]
    for name in ("same_answer", "score", "exact_score")
}


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one entry per kind and scheme: number of cases, and of each figure mean, low, high."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.scheme), []).append(row)
    out = []
    for (kind, scheme), found in groups.items():
        figures = dict(FIGURES)
        if all(row.scored_tokens == 0 for row in found):
            del figures["ppl_ratio"]
        if all(row.score is not None for row in found):
            figures |= ANSWER_FIGURES
        entry: dict[str, Any] = {"kind": kind, "scheme": scheme, "cases": len(found)}
        for name, figure in figures.items():
            entry[name] = [round(value, 6) for value in bootstrap(found, figure)]
        out.append(entry)
    return out


def read_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier run; a line that a crash cut short is left out, and so is the first."""
    rows: list[Row] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(Row(**json.loads(line)))
            except (ValueError, TypeError):
                continue
    return rows


def claim(work: Path, setup: dict[str, Any]) -> None:
    """Start a work file with what its rows depend on, or check that it was started with the same.

    Raises:
        ValueError: it belongs to another set-up.
    """
    line = json.dumps({"setup": setup}, sort_keys=True)
    if not work.exists():
        work.parent.mkdir(parents=True, exist_ok=True)
        work.write_text(line + "\n", encoding="utf-8")
    elif work.read_text(encoding="utf-8").partition("\n")[0] != line:
        raise ValueError(
            f"{work} holds rows of another model, profile or context length; remove it"
        )


def measure_cases(
    model: Any, cases: Sequence[Case], schemes: Sequence[Scheme], work: Path
) -> list[Row]:
    """Measure what the work file does not yet hold; every case's rows are appended as they come."""
    from tqdm import tqdm

    rows = read_rows(work)
    done = {(row.case, row.scheme) for row in rows}
    for case in tqdm(cases, desc="quality", unit="case"):
        missing = [scheme for scheme in schemes if (case.name, scheme.name) not in done]
        if not missing:
            continue
        made = run_case(model, case, missing)
        with work.open("a", encoding="utf-8") as sink:
            sink.writelines(json.dumps(asdict(row)) + "\n" for row in made)
        rows += made
    names = {case.name for case in cases}
    wanted = {scheme.name for scheme in schemes}
    return [row for row in rows if row.case in names and row.scheme in wanted]


def print_summary(entries: Sequence[dict[str, Any]]) -> None:
    """Print one line per kind and scheme, with 95 % intervals of the KL."""
    print(
        f"{'kind':10} {'scheme':52} {'n':>3} {'b/e':>7} {'KL':>9} {'95 % interval':>19} {'PPL':>8} {'top-1':>7} {'same':>5} {'score':>6} {'exact':>6}"
    )
    for entry in entries:
        kl, low, high = entry["kl"]
        interval = f"{low:.5f}-{high:.5f}" if entry["cases"] > 1 else "-"  # one case has none
        ppl = f"{entry['ppl_ratio'][0]:.4f}" if "ppl_ratio" in entry else "-"
        answers = [f"{entry[name][0]:.2f}" if name in entry else "-" for name in ANSWER_FIGURES]
        print(
            f"{entry['kind']:10} {entry['scheme']:52} {entry['cases']:3} {entry['bits_per_element'][0]:7.3f} "
            f"{kl:9.5f} {interval:>19} {ppl:>8} {entry['top1'][0]:7.2%} "
            f"{answers[0]:>5} {answers[1]:>6} {answers[2]:>6}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True, help="the data folder's `text`")
    parser.add_argument("--level-sets", default="int8,klt,cachegen", help=f"of {', '.join(SETS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--cases", type=int, default=3, help="per kind")
    parser.add_argument("--context-tokens", type=int, default=1536)
    parser.add_argument(
        "--profile", type=Path, nargs="*", default=[], help="default: the bundled ones"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, default=Path("out/quality.rows.jsonl"), help="resume from it"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    model, codec = load_model_and_codec(
        arguments.model, arguments.profile, num_threads=arguments.threads
    )
    setup = {
        "model": model.identity.model_digest.hex(),
        "profiles": [profile.digest.hex() for profile in codec.profiles],
        "context_tokens": arguments.context_tokens,
    }
    try:
        schemes = schemes_of(arguments.level_sets.split(","), codec, model)
        claim(arguments.work, setup)
    except ValueError as error:
        parser.error(str(error))
    cases = [
        case
        for kind in arguments.kinds.split(",")
        for case in cases_of(
            kind,
            arguments.texts,
            model.tokenizer.encode,
            count=arguments.cases,
            context_tokens=arguments.context_tokens,
        )
    ]
    entries = summarize(measure_cases(model, cases, schemes, arguments.work))
    machine = machine_lines("numpy", "torch")
    print_summary(entries)
    print("\n".join(machine))
    if arguments.json:
        report = {"machine": machine, "rows": entries}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
