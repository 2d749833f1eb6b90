"""``kvtide plan``: what the planner decided and why, and when not to bother.

A shell: reads files and prints. Exit codes: 0 done, 2 a bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from planner.breakeven import ContextCost, rate_ladder
from planner.errors import PlannerError
from planner.log import LoggedDecision, read_decisions

EXIT_BAD_INPUT: Final = 2
BYTES_PER_S_PER_MBPS: Final = 125_000
GEOMETRIES: Final = {"smollm2-135m": (30, 3, 64)}
"""Layers, KV heads, head size of the bundled model."""
TIMELINE_WIDTH: Final = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if arguments.command == "explain":
            return _explain(Path(arguments.file))
        return _breakeven(arguments)
    except (PlannerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtide plan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="a decision log as a table and a timeline")
    explain.add_argument(
        "file", help="JSON lines, or an answer of the agent with its kvtide object"
    )
    even = commands.add_parser(
        "breakeven", help="the uplink rates at which KV, text, or both at once win"
    )
    even.add_argument("--model", default="smollm2-135m", help="a bundled model, or any name")
    even.add_argument("--layers", type=int, help="of a model that is not bundled")
    even.add_argument("--kv-heads", type=int)
    even.add_argument("--head-dim", type=int)
    even.add_argument("--tokens", type=int, default=6000, help="length of the context")
    even.add_argument("--prefill-tokens-per-s", type=float, required=True)
    even.add_argument(
        "--attention-growth",
        type=float,
        default=0.0,
        help="how much more the last token's prefill costs than the first's, as a share",
    )
    even.add_argument(
        "--bits",
        action="append",
        metavar="NAME=BITS",
        help="a level and its bits per KV element; default: fp16, int8 and the bundled profiles",
    )
    return parser


# ---- explain -------------------------------------------------------------------------------------


def _explain(path: Path) -> int:
    decisions = read_decisions(path.read_text(encoding="utf-8"))
    print(_table(decisions))
    print()
    print(_timeline(decisions))
    return 0


def _table(decisions: Sequence[LoggedDecision]) -> str:
    head = (
        "at s",
        "chunk",
        "choice",
        "reason",
        "rate Mbit/s",
        "expects s",
        "deadline",
        "instead of",
    )
    rows = [head]
    for decision in decisions:
        rate = decision.rate_bytes_per_s
        others = [c.choice for c in decision.candidates if c.choice != decision.choice]
        rows.append(
            (
                f"{decision.at_s:.3f}",
                str(decision.chunk),
                decision.choice + (" (again)" if decision.abandons else ""),
                decision.reason,
                "?" if rate is None else f"{rate / BYTES_PER_S_PER_MBPS:.2f}",
                "?" if decision.expected_ttft_s is None else f"{decision.expected_ttft_s:.3f}",
                "kept" if decision.meets_deadline else "at risk",
                " ".join(others),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _timeline(decisions: Sequence[LoggedDecision]) -> str:
    """One line a chunk: when each choice for it was made."""
    end_s = max((decision.at_s for decision in decisions), default=0.0)
    chunks = sorted({decision.chunk for decision in decisions})
    scale = (TIMELINE_WIDTH - 1) / end_s if end_s > 0 else 0.0
    lines = [f"chunk  0 s{'':{TIMELINE_WIDTH - 10}}{end_s:.2f} s"]
    for chunk in chunks:
        row = ["·"] * TIMELINE_WIDTH
        names = []
        for decision in decisions:
            if decision.chunk == chunk:
                row[int(decision.at_s * scale)] = "T" if decision.choice == "text" else "K"
                names.append(decision.choice)
        lines.append(f"{chunk:5d}  {''.join(row)}  {' -> '.join(names)}")
    lines.append("T: recompute from the text   K: send the KV cache")
    return "\n".join(lines)


# ---- breakeven -----------------------------------------------------------------------------------


def _breakeven(arguments: argparse.Namespace) -> int:
    layers, kv_heads, head_dim = _geometry(arguments)
    if arguments.tokens < 1 or arguments.prefill_tokens_per_s <= 0:
        raise PlannerError("tokens and prefill-tokens-per-s must be positive")
    if arguments.attention_growth < 0:
        raise PlannerError("attention-growth must not be negative")
    elements = layers * 2 * kv_heads * head_dim
    costs = {
        name: ContextCost(
            arguments.tokens,
            elements,
            bits,
            arguments.prefill_tokens_per_s,
            arguments.attention_growth,
        )
        for name, bits in _levels(arguments, (layers, kv_heads, head_dim)).items()
    }
    any_cost = next(iter(costs.values()))
    print(
        f"{arguments.model}: {arguments.tokens} tokens, {elements} KV elements per token,"
        f" recomputed in {any_cost.text_s:.2f} s"
    )
    print(
        f"{'level':12s} {'MB':>8s} {'text wins below':>16s} {'KV wins above':>14s}   both at once"
    )
    for name, cost in costs.items():
        low, high = cost.mixed_range_bytes_per_s()
        gain = cost.text_s / cost.mixed_s(cost.tie_bytes_per_s)
        print(
            f"{name:12s} {cost.kv_bytes / 1e6:8.2f} {_mbps(low):>11s} Mbps {_mbps(high):>9s} Mbps"
            f"   wins in between, most at {_mbps(cost.tie_bytes_per_s)} Mbps: {gain:.2f}x"
        )
    print()
    rates = rate_ladder(list(costs.values()))
    print(f"{'time in s at':12s} " + " ".join(f"{_mbps(rate):>9s}" for rate in rates) + "  Mbps")
    print(f"{'text':12s} " + " ".join(f"{any_cost.text_s:9.2f}" for _ in rates))
    for name, cost in costs.items():
        cells = [f"{cost.kv_s(rate):7.2f} {_MARKS[cost.winner(rate)]}" for rate in rates]
        print(f"{name:12s} " + " ".join(cells))
    print(
        "T: recomputing wins   K: sending wins   B: both at once is at least 5 % faster than either"
    )
    return 0


_MARKS: Final = {"text": "T", "kv": "K", "mixed": "B"}


def _mbps(bytes_per_s: float) -> str:
    return f"{bytes_per_s / BYTES_PER_S_PER_MBPS:.3g}"


def _geometry(arguments: argparse.Namespace) -> tuple[int, int, int]:
    given = (arguments.layers, arguments.kv_heads, arguments.head_dim)
    if all(value is not None for value in given):
        if min(given) < 1:
            raise PlannerError("layers, kv-heads and head-dim must be positive")
        return given
    if any(value is not None for value in given):
        raise PlannerError("layers, kv-heads and head-dim go together")
    known = GEOMETRIES.get(arguments.model)
    if known is None:
        raise PlannerError(
            f"model {arguments.model!r} is not bundled ({', '.join(GEOMETRIES)});"
            " give --layers, --kv-heads and --head-dim"
        )
    return known


def _levels(arguments: argparse.Namespace, geometry: tuple[int, int, int]) -> dict[str, float]:
    if arguments.bits:
        levels = {}
        for entry in arguments.bits:
            name, _, bits = entry.partition("=")
            try:
                levels[name] = float(bits)
            except ValueError as error:
                raise PlannerError(f"--bits {entry!r} is not NAME=BITS") from error
            if not name or not levels[name] > 0:
                raise PlannerError(f"--bits {entry!r} is not NAME=BITS")
        return levels
    return {"fp16": 16.0, "int8": 8.0 + 32.0 / geometry[2], **_bundled(geometry)}


def _bundled(geometry: tuple[int, int, int]) -> dict[str, float]:
    """Bits per element of the profiles that ship with the product, where the geometry is theirs."""
    import codec.profile

    folder = Path(codec.profile.__file__).resolve().parent / "profiles"
    found = {}
    for path in sorted(folder.glob("*.kvprofile")):
        profile = codec.profile.Profile.load(path)
        own = profile.geometry
        if (own.num_layers, own.num_kv_heads, own.head_dim) != geometry:
            continue
        for level in profile.levels:
            if level.bits_per_element is not None:
                found[level.name] = level.bits_per_element
    return found


if __name__ == "__main__":
    sys.exit(main())
