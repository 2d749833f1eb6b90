"""The tables of CacheGen (SIGCOMM 2024) on the bundled model: `make paper`. JSON and plots go to docs/results.

Sizes and losses are measured. Times to first token are computed in virtual time with the planner, the link model
and the costs of `scenarios`, at every rate, because two cores carry no 10 Gbit/s; they are marked so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench._harness import machine_lines
from bench.baselines import evicted, pruned
from bench.cases import cases_of
from bench.codec_quality import load_model_and_codec, product_schemes
from bench.quality import claim, measure_cases, summarize
from scenarios.config import Scenario, load_scenario
from scenarios.simulate import simulate

__all__ = ["PUBLISHED", "RATES_MBPS", "line_plot", "main", "markdown", "ttft_rows", "violations"]

OUT = Path(__file__).resolve().parents[1] / "docs/results"
KEEP = 0.45
"""Share of tokens kept; what makes the published H2O cache 282 of 622 MB."""

KEEP_TEXT = 0.79
"""The same for LLMLingua: 492 of 622 MB."""

RATES_MBPS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000)
POLICIES = ("text", "int8", "fixed:cachegen:2", "cachegen", "fixed:klt:4", "kvtide")
DEADLINES_S = (5.0, 15.0)

PUBLISHED = (
    ("8-bit quantization", 622, 1.00),
    ("CacheGen", 176, 0.98),
    ("H2O", 282, 0.97),
    ("CacheGen on H2O", 71, 0.97),
    ("LLMLingua", 492, 0.94),
    ("CacheGen on LLMLingua", 183, 0.94),
)
"""Technique, MB of KV cache, accuracy. Source: CacheGen, arXiv:2310.07240, table 1 (Mistral-7B, LongChat)."""

DIFFERENCES = (
    "model: SmolLM2-135M here, Mistral-7B there; small models compress worst",
    "contexts: 1,536 tokens here, LongChat's 9,000 or so there",
    "quality: KL, top-1 and answers equal to the exact cache's here, accuracy of the answers there",
    "H2O keeps one set of tokens under a codec here, a set per head alone; half of what is kept is recent",
    "LLMLingua prunes by the served model's own surprisal here, by a second model's with a budget there",
    "policy kvtide takes what its deadline (15 s) allows, for quality; its time is not its fastest",
    "times: virtual time with costs of two CPU cores here, a GPU there; so text loses over a wider range here",
)


def size_rows(texts: Path, *, quick: bool, work: Path) -> list[dict[str, Any]]:
    """Measure sizes and losses of the first table."""
    model, codec = load_model_and_codec("smollm2-135m", [], num_threads=1)
    product = {scheme.name: scheme for scheme in product_schemes(codec)}
    schemes = [product[level] for level in ("int8", "cachegen:2", "klt:2", "klt:4")]
    schemes.append(evicted(product["int8"], KEEP, by_head=True))
    schemes += [evicted(product[level], KEEP, by_head=False) for level in ("cachegen:2", "klt:4")]
    schemes += [pruned(product[level], KEEP_TEXT) for level in ("int8", "cachegen:2", "klt:4")]
    kinds = (
        ("wiki", "topics") if quick else ("prose", "wiki", "technical", "dialogue", "topics", "qa")
    )
    encode = model.tokenizer.encode
    cases = [
        case
        for kind in kinds
        for case in cases_of(kind, texts, encode, count=1 if quick else 5, context_tokens=1536)
    ]
    claim(
        work,
        {
            "model": model.identity.model_digest.hex(),
            "profiles": [profile.digest.hex() for profile in codec.profiles],
            "context_tokens": 1536,
        },
    )
    return summarize(measure_cases(model, cases, schemes, work))


def ttft_rows(scenario: Scenario, rates_mbps: Sequence[float]) -> list[dict[str, Any]]:
    """Compute the time to first token of every policy at constant rates.

    Args:
        scenario: with a constant uplink.
        rates_mbps: in Mbit/s.
    """
    mean = scenario.load_trace().mean_bytes_per_s * 8 / 1e6
    out = []
    for rate in rates_mbps:
        link = dataclasses.replace(scenario.uplink, scale=scenario.uplink.scale * rate / mean)
        report = simulate(dataclasses.replace(scenario, uplink=link, policies=POLICIES))
        out += [
            {
                "mbps": rate,
                "policy": request.policy,
                "ttft_s": None if request.ttft_s is None else round(request.ttft_s, 3),
                "mbytes_sent": round(request.bytes_sent / 1e6, 3),
                "simulated": True,
            }
            for request in report.requests
        ]
    return out


def violations(rows: Sequence[dict[str, Any]], deadline_s: float) -> dict[str, float]:
    """Return, by policy, the share of rates at which the first token came after a deadline or never."""
    late: dict[str, list[bool]] = {}
    for row in rows:
        late.setdefault(row["policy"], []).append(
            row["ttft_s"] is None or row["ttft_s"] > deadline_s
        )
    return {policy: sum(found) / len(found) for policy, found in late.items()}


def line_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Draw time to first token over rate, both in logs, as SVG."""
    import math

    width, height, left, bottom, right = 720, 420, 60, 50, 150
    colors = ("#555", "#d62728", "#ff7f0e", "#8c564b", "#2ca02c", "#1f77b4")
    points = [row for row in rows if row["ttft_s"]]
    x_low, x_high = (math.log10(f(row["mbps"] for row in points)) for f in (min, max))
    y_low = math.floor(math.log10(min(row["ttft_s"] for row in points)))
    y_high = math.ceil(math.log10(max(row["ttft_s"] for row in points)))

    def place(mbps: float, seconds: float) -> tuple[float, float]:
        x = (math.log10(mbps) - x_low) / (x_high - x_low)
        y = (math.log10(seconds) - y_low) / max(y_high - y_low, 1)
        return left + x * (width - left - right), height - bottom - y * (height - bottom - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for exponent in range(y_low, y_high + 1):
        _, y = place(10**x_low, 10.0**exponent)
        parts.append(
            f'<path d="M{left} {y:.1f}H{width - right}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g} s</text>'
        )
    for rate in sorted({row["mbps"] for row in points}):
        x, _ = place(rate, 10.0**y_low)
        parts.append(
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{rate:,}</text>'
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">'
        "uplink, Mbit/s (all simulated)</text>"
    )
    for index, policy in enumerate(dict.fromkeys(row["policy"] for row in points)):
        color = colors[index % len(colors)]
        line = [place(row["mbps"], row["ttft_s"]) for row in points if row["policy"] == policy]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
        key = 30 + 20 * index
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<path d="M{width - right + 12} {key}h18" stroke="{color}" stroke-width="2"/>'
            f'<text x="{width - right + 36}" y="{key + 4}">{escape(policy)}</text>'
        )
    return "".join([*parts, "</svg>\n"])


def markdown(result: dict[str, Any]) -> str:
    """Return the tables as a page."""
    lines = [
        "# The paper's tables on the bundled model",
        "",
        f"Made by `{result['command']}`. "
        + ("A short run, not the whole. " if result["quick"] else ""),
        "",
        *(f"- {line}" for line in result["machine"]),
        "",
        "## Size and loss, measured",
        "| text | scheme | cases | bits per element of the whole context | KL | top-1 | same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["sizes"]:
        same = f"{row['same_answer'][0]:.2f}" if "same_answer" in row else "-"
        kl, low, high = row["kl"]
        interval = f" ({low:.4f} to {high:.4f})" if row["cases"] > 1 else ""  # one case has none
        lines.append(
            f"| {row['kind']} | {row['scheme']} | {row['cases']} | {row['bits_per_element'][0]:.3f} | "
            f"{kl:.4f}{interval} | {row['top1'][0]:.1%} | {same} |"
        )
    lines += [
        "",
        "Published (CacheGen, table 1): "
        + "; ".join(f"{name} {size} MB, accuracy {score:.2f}" for name, size, score in PUBLISHED)
        + ".",
        "",
        "## Time to first token, s, simulated at every rate",
        "![time to first token over uplink rate](ttft.svg)",
        "",
        "| Mbit/s | " + " | ".join(POLICIES) + " |",
        "|---" * (len(POLICIES) + 1) + "|",
    ]
    for rate in dict.fromkeys(row["mbps"] for row in result["ttft"]):
        by_policy = {row["policy"]: row["ttft_s"] for row in result["ttft"] if row["mbps"] == rate}
        cells = (
            "never" if by_policy[policy] is None else f"{by_policy[policy]:.2f}"
            for policy in POLICIES
        )
        lines.append(f"| {rate:,} | " + " | ".join(cells) + " |")
    lines += ["", "Share of these rates that miss a deadline:", ""]
    for deadline, shares in result["violations"].items():
        found = ", ".join(f"`{policy}` {share:.0%}" for policy, share in shares.items())
        lines.append(f"- {deadline} s: {found}")
    lines += ["", "## What differs from the paper", *(f"- {line}" for line in DIFFERENCES), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    parser.add_argument("--texts", type=Path, required=True, help="the data folder's `text`")
    parser.add_argument("--quick", action="store_true", help="two kinds of text, one case each")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--work", type=Path, default=Path("out/paper.rows.jsonl"), help="resume from it"
    )
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    scenario = load_scenario("paper")
    ttft = ttft_rows(scenario, RATES_MBPS)
    missed = {}
    for deadline_s in DEADLINES_S:
        judged = ttft_rows(dataclasses.replace(scenario, slo_s=deadline_s), RATES_MBPS)
        missed[f"{deadline_s:g}"] = violations(judged, deadline_s)
    sizes = size_rows(arguments.texts, quick=arguments.quick, work=arguments.work)
    result = {
        "command": "make paper" + (" QUICK=--quick" if arguments.quick else ""),
        "quick": arguments.quick,
        "machine": machine_lines("numpy", "torch"),
        "seconds": round(time.monotonic() - start),
        "sizes": sizes,
        "ttft": ttft,
        "violations": missed,
        "published": [list(row) for row in PUBLISHED],
        "differences": list(DIFFERENCES),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "paper.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "ttft.svg").write_text(line_plot(ttft), encoding="utf-8")
    (arguments.out / "paper.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
