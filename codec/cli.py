"""`kvtide codec`: build profiles, encode and decode files, look inside them. A shell: the only module of the
room that reads the command line, prints, and loads a model."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from codec.bitstream import MAGIC as BITSTREAM_MAGIC, Bitstream, inspect_bitstream, parse
from codec.calibrate import CachegenCalibration
from codec.codec import Codec
from codec.errors import CodecError
from codec.geometry import FloatArray, Geometry, Rotary, check_kv
from codec.klt_builder import build_klt, plan_contexts, warnings_about
from codec.levels import LevelInfo
from codec.measure import measure_levels
from codec.profile import Profile
from codec.texts import CalibrationText, machine_texts, read_texts

if TYPE_CHECKING:
    from engine import TorchEngine

__all__ = ["main"]

CHUNK_TOKENS = 1536
"""Tokens per chunk, as everywhere in the product."""

CALIBRATION_TOKENS = 6144
"""Tokens per calibration text: long enough to see keys rotated to most positions of a context."""

HELD_OUT_TOKENS = 1792
CONTINUATION_TOKENS = 256
FEW_TOKENS = 12_000
FEW_TEXTS = 3

MACHINE_TEXTS = Path("machine")
"""Stands for the built-in texts among --text, for level set klt."""

Progress = Any  # tqdm has stubs, but its class is generic over what it iterates


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes them from the process.

    Returns:
        The exit code: 0, 1 for an error in the data, 2 for one in the arguments.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (CodecError, OSError, UnicodeDecodeError) as error:
        print(f"kvtide codec: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtide codec", description="KV caches to bitstreams and back"
    )
    commands = parser.add_subparsers(required=True, metavar="profile|encode|decode|inspect")

    profile = commands.add_parser("profile", help="build a profile for a model, and measure it")
    profile.add_argument(
        "--model", required=True, help="a catalog name, a folder, or a Hugging Face id"
    )
    profile.add_argument("--out", required=True, type=Path, help="the profile file to write")
    profile.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        help="files and folders to calibrate on; default: texts that every Python installation has, which "
        "`machine` stands for when building klt",
    )
    profile.add_argument(
        "--held-out", nargs="+", type=Path, default=[], help="files and folders to measure on"
    )
    profile.add_argument(
        "--tokens", type=int, default=CALIBRATION_TOKENS, help="most tokens taken from each text"
    )
    profile.add_argument("--threads", type=int, default=2, help="CPU threads")
    profile.add_argument(
        "--level-set", choices=("cachegen", "klt"), default="cachegen", help="what to build"
    )
    profile.add_argument(
        "--resume",
        action="store_true",
        help="klt: keep what an interrupted build has computed, in OUT.work, and go on there",
    )
    profile.add_argument(
        "--calibration-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="klt: the model's dtype while calibrating; bfloat16 is about twice as fast",
    )
    profile.set_defaults(run=_profile)

    encode = commands.add_parser("encode", help="encode a kv array (.npy) into a bitstream")
    encode.add_argument("input", type=Path, help=".npy, [layer, kv=2, token, head, dim]")
    encode.add_argument("output", type=Path, help="the bitstream to write")
    encode.add_argument("--level", required=True, help="fp16, int8, cachegen:0, ...")
    encode.add_argument("--profile", type=Path, help="needed by all levels but fp16 and int8")
    encode.add_argument("--model-digest", help="64 hex digits, where there is no profile")
    encode.add_argument("--token-start", type=int, default=0, help="position of the first token")
    encode.add_argument("--threads", type=int, default=2, help="CPU threads")
    encode.set_defaults(run=_encode)

    decode = commands.add_parser("decode", help="decode a bitstream into a kv array (.npy)")
    decode.add_argument("input", type=Path, help="the bitstream")
    decode.add_argument("output", type=Path, help="the .npy to write")
    decode.add_argument("--profile", type=Path, help="needed by all levels but fp16 and int8")
    decode.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    decode.add_argument("--threads", type=int, default=2, help="CPU threads")
    decode.set_defaults(run=_decode)

    inspect = commands.add_parser("inspect", help="print what is in a bitstream or profile")
    inspect.add_argument("file", type=Path, help="a bitstream or a profile")
    inspect.add_argument("--layers", action="store_true", help="bits per element of every layer")
    inspect.set_defaults(run=_inspect)
    return parser


# ---- encode, decode, inspect ------------------------------------------------------------------------------


def _encode(arguments: argparse.Namespace) -> None:
    try:
        kv = np.load(arguments.input, allow_pickle=False)
    except ValueError as error:
        raise CodecError(f"{arguments.input} is not a .npy file: {error}") from error
    profiles = [Profile.load(arguments.profile)] if arguments.profile else []
    if profiles:
        geometry, model_digest = profiles[0].geometry, profiles[0].model_digest
    else:
        if kv.ndim != 5:
            raise CodecError(
                f"{arguments.input} has {kv.ndim} axes, not layer, kv, token, head, dim"
            )
        geometry = Geometry(kv.shape[0], kv.shape[3], kv.shape[4])
        model_digest = _digest(arguments.model_digest)
    codec = Codec(
        geometry, model_digest=model_digest, profiles=profiles, num_threads=arguments.threads
    )
    kv = check_kv(kv, geometry)
    data = codec.encode(kv, level=arguments.level, token_start=arguments.token_start)
    arguments.output.write_bytes(data)
    print(
        f"{kv.shape[2]} tokens, {len(data)} bytes, {8 * len(data) / kv.size:.4f} bits per element"
    )


def _digest(text: str | None) -> bytes:
    try:
        digest = bytes.fromhex(text or "00" * 32)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise CodecError(f"a model digest has 64 hex digits; {text!r} is none")
    return digest


def _decode(arguments: argparse.Namespace) -> None:
    data = arguments.input.read_bytes()
    profiles = [Profile.load(arguments.profile)] if arguments.profile else []
    stream = parse(data)
    codec = Codec(
        profiles[0].geometry if profiles else stream.geometry,
        model_digest=profiles[0].model_digest if profiles else stream.model_digest,
        profiles=profiles,
        num_threads=arguments.threads,
    )
    chunk = codec.decode(data, dtype=np.dtype(arguments.dtype))
    with arguments.output.open("wb") as sink:  # np.save would append .npy to a bare name
        np.save(sink, chunk.kv, allow_pickle=False)
    print(f"{chunk.level}: tokens {chunk.token_start} to {chunk.token_stop}")


def _inspect(arguments: argparse.Namespace) -> None:
    data = arguments.file.read_bytes()
    if data[:4] != BITSTREAM_MAGIC:
        _print_profile(Profile.from_bytes(data))
        return
    info = inspect_bitstream(data)
    geometry = info.geometry
    print(f"kvtide bitstream, version {info.version}, level {info.level}")
    print(f"  tokens     {info.token_start} to {info.token_stop}")
    print(
        f"  geometry   {geometry.num_layers} layers, {geometry.num_kv_heads} KV heads of {geometry.head_dim}"
    )
    print(f"  blocks     {info.num_blocks}, at most {info.block_tokens} tokens each")
    print(f"  bytes      {info.total_bytes}, {info.overhead_bytes} of them header and offset table")
    print(f"  bits       {info.bits_per_element:.4f} per element, everything counted")
    print(f"  model      {info.model_digest.hex()}")
    print(f"  profile    {info.profile_digest.hex()}")
    elements = (info.token_stop - info.token_start) * geometry.num_channels
    if not info.bytes_by_layer:
        _print_groups(parse(data), elements_per_token=geometry.elements_per_token)
        return
    sides = [8 * sum(layer[side] for layer in info.bytes_by_layer) for side in range(2)]
    for name, bits in zip(("keys", "values"), sides, strict=True):
        print(f"  {name:10} {bits / elements / geometry.num_layers:.4f} bits per element")
    if arguments.layers:
        print("  layer      keys    values  (bits per element)")
        for layer, (keys, values) in enumerate(info.bytes_by_layer):
            print(f"  {layer:5} {8 * keys / elements:9.4f} {8 * values / elements:9.4f}")


def _print_groups(stream: Bitstream, *, elements_per_token: int) -> None:
    """Print what each group of layers takes. The blocks say which groups there are, the profile which layers."""
    num_spans = -(-stream.num_tokens // stream.block_tokens)
    sizes = np.diff(stream.offsets.astype(np.int64))
    num_groups, rest = divmod(len(sizes) - 1, num_spans)
    if rest:
        raise CodecError(f"{len(sizes) - 1} blocks are no whole number of groups")
    per_element = 8 / (stream.num_tokens * elements_per_token)
    print("  bits per element of the whole chunk, by part:")
    print(f"  beside     {sizes[0] * per_element:.4f} first and loud tokens, all layers")
    for group, size in enumerate(sizes[1:].reshape(num_groups, num_spans).sum(axis=1)):
        print(f"  group {group:<4} {size * per_element:.4f}")
    print("  a group's layers, keys and values share its bits: nothing says whose each bit is")


def _print_profile(profile: Profile) -> None:
    geometry = profile.geometry
    print(f"kvtide profile of level set {profile.level_set}, digest {profile.digest.hex()}")
    print(f"  model      {profile.model_digest.hex()}")
    print(
        f"  geometry   {geometry.num_layers} layers, {geometry.num_kv_heads} KV heads of {geometry.head_dim}"
    )
    if "group_first_layer" in profile.arrays:
        pairs = zip(
            profile.arrays["group_first_layer"], profile.arrays["group_num_layers"], strict=True
        )
        for group, (first, size) in enumerate(pairs):
            print(f"  group {group:<4} layers {first} to {first + size - 1}, keys and values")
    for name, array in profile.arrays.items():
        print(f"  array      {name}: {array.dtype} {list(array.shape)}")
    for key, value in profile.notes.items():
        if key != "texts":
            print(f"  {key:10} {value}")
    for text in profile.notes.get("texts", []):
        print(f"  text       {text}")
    _print_levels(profile.levels)


def _print_levels(levels: Sequence[LevelInfo]) -> None:
    print(f"  {'level':12} {'bits/element':>12} {'KL, nats':>10} {'PPL ratio':>10} {'top-1':>8}")
    for info in levels:
        cells = (
            _cell(info.bits_per_element, 12, 4),
            _cell(info.kl, 10, 6),
            _cell(info.ppl_ratio, 10, 5),
            _cell(None if info.top1 is None else 100 * info.top1, 7, 2),
        )
        print(f"  {info.name:12} {cells[0]} {cells[1]} {cells[2]} {cells[3]}%")


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


# ---- profile ----------------------------------------------------------------------------------------------


def _profile(arguments: argparse.Namespace) -> None:
    from engine import EngineError, load_engine  # heavy, and only this command needs it

    try:
        engine = load_engine(arguments.model, num_threads=arguments.threads)
        build = _build_klt if arguments.level_set == "klt" else _build
        profile = build(engine, arguments)
    except EngineError as error:
        raise CodecError(str(error)) from error
    size = _write(profile, arguments.out)
    _draft_path(arguments.out).unlink(missing_ok=True)
    print(f"{arguments.out}: {size} bytes, digest {profile.digest.hex()}")
    _print_levels(profile.levels)


def _draft_path(out: Path) -> Path:
    """Where the profile lies before it is measured: usable, should the measuring be cut short."""
    return out.with_name(out.name + ".draft")


def _write(profile: Profile, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    data = profile.to_bytes()
    partial.write_bytes(data)
    partial.replace(path)
    return len(data)


def _build(engine: TorchEngine, arguments: argparse.Namespace) -> Profile:
    from tqdm import tqdm

    texts = read_texts(arguments.text) if arguments.text else machine_texts(held_out=False)
    held_out = (
        read_texts(arguments.held_out) if arguments.held_out else machine_texts(held_out=True)
    )
    context_tokens = min(arguments.tokens, engine.geometry.context_tokens)
    calibration_ids = [
        (text, engine.tokenizer.encode(text.text)[:context_tokens]) for text in texts
    ]
    calibration_ids = [(text, ids) for text, ids in calibration_ids if len(ids) >= 20]
    held_out_ids = [
        (text, engine.tokenizer.encode(text.text)[:HELD_OUT_TOKENS]) for text in held_out
    ]
    held_out_ids = [(text, ids) for text, ids in held_out_ids if len(ids) > 2 * CONTINUATION_TOKENS]
    _warn_about_little(calibration_ids)
    if not calibration_ids or not held_out_ids:
        raise CodecError("the texts are too short: at least 20 tokens to calibrate, 513 to measure")
    geometry = Geometry(
        engine.geometry.num_layers, engine.geometry.num_kv_heads, engine.geometry.head_dim
    )
    calibration = CachegenCalibration(geometry)
    model = _EngineModel(engine)
    with tempfile.TemporaryDirectory(prefix="kvtide-profile-") as folder:
        chunks: list[Path] = []
        for _, ids in tqdm(calibration_ids, desc="prefill", unit="text"):
            kv = model.context_kv(ids)
            for start in range(0, len(ids) - 19, CHUNK_TOKENS):
                chunk = np.ascontiguousarray(kv[:, :, start : start + CHUNK_TOKENS], np.float16)
                chunks.append(Path(folder) / f"{len(chunks)}.npy")
                np.save(chunks[-1], chunk)
        for path in tqdm(chunks, desc="step sizes", unit="chunk"):
            calibration.add_scales(np.load(path, mmap_mode="r"))
        for path in tqdm(chunks, desc="distributions", unit="chunk"):
            calibration.add_counts(np.load(path, mmap_mode="r"))
    notes: dict[str, Any] = {
        "model": arguments.model,
        "texts": [_text_note(text, ids) for text, ids in calibration_ids],
        "held_out": [_text_note(text, ids) for text, ids in held_out_ids],
        "python": sys.version.split()[0],
    }
    digest = engine.identity.model_digest
    draft = calibration.build(model_digest=digest, notes=notes)
    notes["bits_per_symbol_own_tables"] = [round(b, 4) for b in calibration.own_table_bits()]
    notes["bits_per_symbol_shared_tables"] = [
        round(b, 4) for b in calibration.shared_table_bits(draft)
    ]
    draft = Profile.from_bytes(replace(draft, notes=notes).to_bytes())
    _write(draft, _draft_path(arguments.out))
    codec = Codec(geometry, model_digest=digest, profiles=[draft], num_threads=arguments.threads)
    steps = len(held_out_ids) * len(codec.levels())
    with tqdm(total=steps, desc="measuring", unit="level") as bar:
        measured = measure_levels(
            codec,
            model,
            [ids for _, ids in held_out_ids],
            continuation_tokens=CONTINUATION_TOKENS,
            on_progress=bar.update,
        )
    return Profile.from_bytes(replace(draft, levels=measured).to_bytes())


def _build_klt(engine: TorchEngine, arguments: argparse.Namespace) -> Profile:
    from tqdm import tqdm

    from engine import load_engine

    texts: list[CalibrationText] = []
    for path in arguments.text or [MACHINE_TEXTS]:
        texts += machine_texts(held_out=False) if path == MACHINE_TEXTS else read_texts([path])
    held_out = (
        read_texts(arguments.held_out) if arguments.held_out else machine_texts(held_out=True)
    )
    plans = plan_contexts(texts, engine.tokenizer.encode)
    held_out_ids = [
        (text, engine.tokenizer.encode(text.text)[:HELD_OUT_TOKENS]) for text in held_out
    ]
    held_out_ids = [(text, ids) for text, ids in held_out_ids if len(ids) > 2 * CONTINUATION_TOKENS]
    if not plans or not held_out_ids:
        raise CodecError("the texts are too short: 1792 tokens to calibrate, 513 to measure")
    for warning in warnings_about(plans):
        print(f"warning: {warning}", file=sys.stderr)
    work = arguments.out.with_name(arguments.out.name + ".work")
    if not arguments.resume:
        shutil.rmtree(work, ignore_errors=True)
    calibrated = engine
    if arguments.calibration_dtype != "float32":
        calibrated = load_engine(
            arguments.model, num_threads=arguments.threads, dtype=arguments.calibration_dtype
        )
    geometry = Geometry(
        engine.geometry.num_layers, engine.geometry.num_kv_heads, engine.geometry.head_dim
    )
    digest = engine.identity.model_digest
    draft = build_klt(
        _EngineModel(calibrated),
        geometry,
        plans,
        work=work,
        model_digest=digest,
        notes={
            "model": arguments.model,
            "texts": [[text.name, text.digest] for text in texts],
            "held_out": [_text_note(text, ids) for text, ids in held_out_ids],
            "calibration_dtype": arguments.calibration_dtype,
            "python": sys.version.split()[0],
        },
        track=lambda items, name: iter(tqdm(items, desc=name, unit="context")),
    )
    model = _EngineModel(engine)
    codec = Codec(
        geometry,
        model_digest=digest,
        profiles=[draft],
        num_threads=arguments.threads,
        rotary=model.rotary(CHUNK_TOKENS),
    )
    steps = len(held_out_ids) * len(codec.levels())
    with tqdm(total=steps, desc="measuring", unit="level") as bar:
        measured = measure_levels(
            codec,
            model,
            [ids for _, ids in held_out_ids],
            continuation_tokens=CONTINUATION_TOKENS,
            on_progress=bar.update,
        )
    profile = Profile.from_bytes(replace(draft, levels=measured).to_bytes())
    shutil.rmtree(work, ignore_errors=True)
    return profile


def _text_note(text: CalibrationText, ids: Sequence[int]) -> list[Any]:
    return [text.name, len(ids), text.digest]


def _warn_about_little(texts: Sequence[tuple[CalibrationText, Sequence[int]]]) -> None:
    tokens = sum(len(ids) for _, ids in texts)
    if tokens < FEW_TOKENS:
        print(
            f"warning: {tokens} tokens of calibration text; with 6000 instead of 18000 bitstreams grow by "
            "about a fifth, with 1500 they triple",
            file=sys.stderr,
        )
    if len(texts) < FEW_TEXTS:
        print(
            f"warning: {len(texts)} calibration texts; a profile of one kind of text costs 10 to 40 % more "
            "bytes on other kinds",
            file=sys.stderr,
        )


class _EngineModel:
    """The engine behind the seam that `measure` needs."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def context_kv(self, token_ids: Sequence[int]) -> FloatArray:
        cache = self._engine.new_cache(len(token_ids))
        self._engine.fill(cache, token_ids, 0)
        return cache.read(0, len(token_ids))

    def continuation_logits(
        self, kv: FloatArray, token_ids: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        num_tokens = kv.shape[2]
        cache = self._engine.new_cache(num_tokens + len(token_ids))
        cache.write(0, kv)
        return self._engine.prefill_logits(cache, token_ids, num_tokens)

    def layer0_kv(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return self._engine.layer0_kv(token_ids)

    def rotary(self, num_positions: int) -> Rotary:
        tables = self._engine.rotary_tables(num_positions)
        return Rotary(
            cos=tables.cos,
            sin=tables.sin,
            table_of_layer=np.asarray(tables.table_of_layer, np.int64),
            interleaved=tables.interleaved,
        )

    def keys_values_gradients(
        self, head: Sequence[int], tail: Sequence[int], *, seed: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        from engine.gradients import cache_gradient
        from engine.rope import unrotate

        kv = np.asarray(self.context_kv(head), np.float32)
        gradient = cache_gradient(self._engine, kv, tail, seed=seed)
        tables = self._engine.rotary_tables(len(head))
        for array in (kv, gradient):  # the turn is orthogonal: gradients turn like keys
            array[:, 0] = unrotate(np.ascontiguousarray(array[:, 0]), tables, token_start=0)
        return kv, gradient
