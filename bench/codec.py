"""Codec speed and size: `python -m bench.codec`. One thread, beside memcpy and zstd of the same data."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from bench import codec_quality
from bench._harness import Timing, machine_lines, time_interleaved
from codec import Codec, Profile
from codec.cachegen import GROUP_TOKENS, CachegenStatistics
from codec.tables import PROB_SCALE, TableSet

PROFILE = Path(__file__).resolve().parents[1] / "codec/profiles/smollm2-135m.cachegen.kvprofile"
MEMCPY = "memcpy of the fp16 cache"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.codec", description=__doc__)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument(
        "--model", help="take the KV of a real model instead of drawing it from the profile"
    )
    parser.add_argument("--tokens", type=int, default=1536, help="tokens in the chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall"),
        default="cpu",
        help="cpu: time of this process alone, which other work on the machine does not stretch",
    )
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument(
        "--texts",
        type=Path,
        help="measure loss instead of speed, on these texts: bench.codec_quality",
    )
    parser.add_argument(
        "--readme", action="store_true", help="with --texts: rewrite the documentation's tables"
    )
    arguments = parser.parse_args(argv)
    if arguments.texts:
        wanted = ["--texts", str(arguments.texts), "--threads", str(arguments.threads)]
        wanted += ["--model", arguments.model] if arguments.model else []
        wanted += ["--json", str(arguments.json)] if arguments.json else []
        wanted += ["--readme"] if arguments.readme else []
        return codec_quality.main(wanted)

    profile = Profile.load(arguments.profile)
    codec = Codec(
        profile.geometry,
        model_digest=profile.model_digest,
        profiles=[profile],
        num_threads=arguments.threads,
    )
    kv = (
        _model_kv(arguments.model, arguments.tokens)
        if arguments.model
        else draw_kv(profile, num_tokens=arguments.tokens, seed=1)
    ).astype(np.float16)
    levels = [info.name for info in codec.levels()]
    encoded = {level: codec.encode(kv, level=level, token_start=0) for level in levels}
    decoded = {level: codec.decode(encoded[level]).kv for level in levels}
    for level in levels:  # the round trip of what is timed
        again = codec.encode(kv, level=level, token_start=0)
        if again != encoded[level] or not np.isfinite(decoded[level]).all():
            raise AssertionError(f"{level} does not round-trip")

    raw = kv.tobytes()
    symbols = _int8_symbols(encoded["int8"], codec)
    packed = {"fp16 cache": zstandard.ZstdCompressor(level=1).compress(raw)}
    packed["int8 symbols"] = zstandard.ZstdCompressor(level=1).compress(symbols)
    target = np.empty_like(kv)
    candidates: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(target, kv)}
    for name, data in (("fp16 cache", raw), ("int8 symbols", symbols)):
        candidates[f"zstd -1 of the {name}, encode"] = lambda data=data: zstandard.ZstdCompressor(
            level=1
        ).compress(data)  # type: ignore[misc]
        candidates[f"zstd -1 of the {name}, decode"] = lambda data=packed[name]: (
            zstandard.ZstdDecompressor().decompress(data)
        )  # type: ignore[misc]
    for level in levels:
        candidates[f"{level}, encode"] = lambda level=level: codec.encode(
            kv, level=level, token_start=0
        )  # type: ignore[misc]
        candidates[f"{level}, decode"] = lambda level=level: codec.decode(encoded[level])  # type: ignore[misc]
    timings = time_interleaved(
        candidates,
        baseline=MEMCPY,
        rounds=arguments.rounds,
        clock=time.process_time if arguments.clock == "cpu" else time.perf_counter,
    )

    sizes = {f"zstd -1 of the {name}": len(data) for name, data in packed.items()}
    sizes |= {level: len(data) for level, data in encoded.items()}
    rows = [_row(name, timing, sizes, kv.size) for name, timing in timings.items()]
    source = f"the KV of {arguments.model}" if arguments.model else "numbers drawn from the profile"
    print(
        f"{arguments.tokens} tokens, {kv.size} elements, {source}, {arguments.threads} thread(s), {arguments.clock} time"
    )
    for line in machine_lines("numpy", "zstandard"):
        print(line)
    print(
        f"\n{'':40} {'b/e':>7} {'ms':>9} {'Msym/s':>8} {'x memcpy':>9}  quartiles, {arguments.rounds} rounds"
    )
    for row in rows:
        bits = "" if row["bits_per_element"] is None else f"{row['bits_per_element']:.3f}"
        print(
            f"{row['name']:40} {bits:>7} {1e3 * row['median_s']:9.2f} {row['msym_per_s']:8.0f} "
            f"{row['ratio']:9.1f}  {row['ratio_low']:.1f}-{row['ratio_high']:.1f}"
        )
    if not arguments.model:
        print(f"\n{_sharing_line(profile)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def draw_kv(profile: Profile, *, num_tokens: int, seed: int) -> npt.NDArray[np.float32]:
    """Draw a cache whose symbols at the finest level follow the profile's own tables.

    Returns:
        float32 [layer, kv, token, head, dim].
    """
    statistics = CachegenStatistics.from_profile(profile)
    finest, tables = statistics.levels[0], statistics.tables
    rng = np.random.default_rng(seed)
    num_groups = -(-num_tokens // GROUP_TOKENS)
    shape = (*finest.anchor_step.shape, num_groups)
    anchors = _draw(rng, tables, finest.anchor_table, shape) + finest.anchor_shift[..., None]
    deltas = _draw(rng, tables, finest.delta_table, (*shape, GROUP_TOKENS))
    deltas[..., 0] = 0
    values = anchors[..., None] * finest.anchor_step[..., None, None]
    values = values + deltas * finest.delta_step[..., None, None]
    layers, sides, channels = finest.anchor_step.shape
    flat = values.reshape(layers, sides, channels, -1)[..., :num_tokens]
    geometry = profile.geometry
    return np.ascontiguousarray(
        flat.transpose(0, 1, 3, 2).reshape(geometry.kv_shape(num_tokens)), np.float32
    )


def _draw(
    rng: np.random.Generator,
    tables: TableSet,
    numbers: npt.NDArray[np.uint16],
    shape: tuple[int, ...],
) -> npt.NDArray[np.float32]:
    table = numbers.reshape(*numbers.shape, *(1,) * (len(shape) - numbers.ndim))
    slots = rng.integers(0, PROB_SCALE, shape, dtype=np.int32)
    index = tables.decode_entries[table, slots] & 255
    last = (np.diff(tables.starts) - 1)[table]
    index = np.where(index == last, 0, index)  # an escape becomes the rarest value
    return (tables.lows[table] + index).astype(np.float32)


def _int8_symbols(data: bytes, codec: Codec) -> bytes:
    from codec.bitstream import parse

    stream = parse(data)
    head_dim = codec.geometry.head_dim
    parts = []
    spans = np.tile(stream.grid.span_tokens(), stream.grid.num_blocks // stream.grid.num_spans)
    for start, tokens in zip(stream.offsets[:-1], spans, strict=True):
        first = int(start) + 2 * int(tokens)
        parts.append(stream.payload[first : first + int(tokens) * head_dim].tobytes())
    return b"".join(parts)


def _row(name: str, timing: Timing, sizes: dict[str, int], elements: int) -> dict[str, Any]:
    what, _, direction = name.rpartition(", ")
    size = sizes.get(what) if direction == "encode" else None
    return {
        "name": name,
        "bits_per_element": None if size is None else 8 * size / elements,
        "median_s": timing.median_s,
        "msym_per_s": elements / timing.median_s / 1e6,
        "ratio": timing.ratio,
        "ratio_low": timing.ratio_low,
        "ratio_high": timing.ratio_high,
    }


def _sharing_line(profile: Profile) -> str:
    own = profile.notes.get("bits_per_symbol_own_tables")
    shared = profile.notes.get("bits_per_symbol_shared_tables")
    if not own or not shared:
        return "the profile does not say what sharing tables costs"
    parts = [
        f"{name} {b:.3f} ({100 * (b / a - 1):+.2f} %)"
        for name, a, b in zip(
            ("anchors", *(f"level {i}" for i in range(len(own) - 1))), own, shared, strict=True
        )
    ]
    return (
        "bits per symbol with shared tables, and against the entropy with one per channel: "
        + ", ".join(parts)
    )


def _model_kv(model: str, num_tokens: int) -> npt.NDArray[np.float32]:
    from codec.texts import machine_texts
    from engine import load_engine

    engine = load_engine(model, num_threads=1)
    ids = engine.tokenizer.encode("\n\n".join(t.text[:4000] for t in machine_texts(held_out=True)))
    cache = engine.new_cache(num_tokens)
    engine.fill(cache, ids[:num_tokens], 0)
    return np.asarray(cache.read(0, num_tokens), np.float32)


if __name__ == "__main__":
    sys.exit(main())
