"""What makes two engines produce the same KV: digests of weights, tokenizer, config, adapter and dtype.

A wrong KV cache is worse than none, so everything that changes KV values is in here. Digests are over
content, not file names: a model split into other files keeps its weights digest.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from engine.errors import WeightsError

NO_ADAPTER = bytes(32)
_MAX_HEADER_BYTES = 100_000_000  # the limit that safetensors itself uses
# Keys of config.json that cannot change a KV value: names, ids of control tokens, training and storage.
_IRRELEVANT_CONFIG_KEYS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
        "attention_dropout",
        "hidden_dropout",
        "output_attentions",
        "output_hidden_states",
    ]
)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Digests of everything that changes the values of a KV cache."""

    weights_digest: bytes
    """BLAKE3 over every tensor's name, dtype, shape and bytes; 32 bytes."""
    tokenizer_digest: bytes
    """BLAKE3 over the tokenizer's JSON; 32 bytes."""
    config_digest: bytes
    """BLAKE3 over the engine-relevant part of config.json, RoPE included; 32 bytes."""
    adapter_digest: bytes
    """BLAKE3 over the adapter's tensors, 32 zero bytes without one."""
    dtype: str
    """Compute dtype, `float32` or `bfloat16`."""

    @property
    def digest(self) -> bytes:
        """BLAKE3 over all fields: two engines with the same digest may share KV; 32 bytes."""
        hasher = blake3(b"kvtide model identity 1\0")
        for part in (
            self.weights_digest,
            self.tokenizer_digest,
            self.config_digest,
            self.adapter_digest,
        ):
            hasher.update(part)
        hasher.update(self.dtype.encode())
        return hasher.digest()

    @property
    def model_digest(self) -> bytes:
        """BLAKE3 over weights, config and adapter alone, for codec profiles; 32 bytes.

        A profile's statistics hold for every compute dtype and do not depend on the tokenizer's file.
        """
        hasher = blake3(b"kvtide model 1\0")
        for part in (self.weights_digest, self.config_digest, self.adapter_digest):
            hasher.update(part)
        return hasher.digest()

    def to_json(self) -> dict[str, str]:
        """Return all digests as hex, for messages and logs."""
        return {
            "digest": self.digest.hex(),
            "weights": self.weights_digest.hex(),
            "tokenizer": self.tokenizer_digest.hex(),
            "config": self.config_digest.hex(),
            "adapter": self.adapter_digest.hex(),
            "dtype": self.dtype,
        }


def identify(
    folder: Path, *, tokenizer_json: str, dtype: str, sidecar_dir: Path, rehash: bool = False
) -> ModelIdentity:
    """Compute the identity of a model folder.

    Args:
        folder: holds config.json and *.safetensors.
        tokenizer_json: the tokenizer, serialized.
        dtype: compute dtype.
        sidecar_dir: where weights digests are remembered when the model's own folder is not ours.
        rehash: hash the weights again even if a remembered digest still fits.

    Raises:
        WeightsError: unreadable weights or config.
    """
    return ModelIdentity(
        weights_digest=remembered_weights_digest(folder, sidecar_dir=sidecar_dir, rehash=rehash),
        tokenizer_digest=blake3(_canonical(tokenizer_json)).digest(),
        config_digest=config_digest(folder / "config.json"),
        adapter_digest=NO_ADAPTER,
        dtype=dtype,
    )


def config_digest(path: Path) -> bytes:
    """Digest the part of config.json that changes KV values; key order does not matter."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    return blake3(json.dumps(_relevant(config), sort_keys=True).encode()).digest()


def weights_digest(folder: Path) -> bytes:
    """Digest all tensors of a folder's safetensors files, independent of how they are split into files.

    Raises:
        WeightsError: a file is missing, truncated or not safetensors.
    """
    digests: dict[str, bytes] = {}
    files = weight_files(folder)
    for path in files:
        digests.update(_tensor_digests(path))
    hasher = blake3(b"kvtide weights 1\0")
    for name in sorted(digests):
        hasher.update(digests[name])
    return hasher.digest()


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files, sorted by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} has no *.safetensors weights")
    return files


def remembered_weights_digest(folder: Path, *, sidecar_dir: Path, rehash: bool = False) -> bytes:
    """Return the weights digest, from a sidecar file while sizes and modification times still fit.

    The sidecar lies in `sidecar_dir`, named after the folder's path. A missing or odd sidecar is only a
    reason to hash again.
    """
    stamp = _stamp(folder)
    key = blake3(str(folder.resolve()).encode()).hexdigest(length=16)
    sidecar = sidecar_dir / f"{key}.json"
    if not rehash:
        known = _read_sidecar(sidecar, stamp)
        if known is not None:
            return known
    digest = weights_digest(folder)
    _write_sidecar(sidecar, {"files": stamp, "weights_digest": digest.hex()})
    return digest


def _stamp(folder: Path) -> dict[str, list[int]]:
    stats = {path.name: path.stat() for path in weight_files(folder)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _read_sidecar(sidecar: Path, stamp: dict[str, list[int]]) -> bytes | None:
    try:
        record = json.loads(sidecar.read_text(encoding="utf-8"))
        if record["files"] != stamp:
            return None
        digest = bytes.fromhex(record["weights_digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if len(digest) == 32 else None


def _write_sidecar(sidecar: Path, record: dict[str, Any]) -> None:
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{sidecar.name}.", dir=sidecar.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as sink:
            json.dump(record, sink)
        Path(partial).replace(sidecar)
    except OSError:
        return  # a read-only cache folder costs a second at the next start, no more


def _tensor_digests(path: Path) -> dict[str, bytes]:
    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            header_bytes = int.from_bytes(handle.read(8), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise WeightsError(f"{path.name} is not a safetensors file")
            header = json.loads(handle.read(header_bytes))
            base = 8 + header_bytes
            return {
                name: _tensor_digest(handle, name, entry, base, size, path)
                for name, entry in header.items()
                if name != "__metadata__"
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error


def _tensor_digest(
    handle: Any, name: str, entry: dict[str, Any], base: int, size: int, path: Path
) -> bytes:
    start, stop = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= start <= stop <= size - base:
        raise WeightsError(f"tensor '{name}' lies outside {path.name}")
    handle.seek(base + start)
    hasher = blake3(
        json.dumps([name, entry["dtype"], entry["shape"]]).encode(), max_threads=blake3.AUTO
    )
    hasher.update(b"\0")
    left = stop - start
    while left:
        block = handle.read(min(left, 1 << 24))
        if not block:
            raise WeightsError(f"{path.name} ends inside tensor '{name}'")
        hasher.update(block)
        left -= len(block)
    return hasher.digest()


def _relevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _relevant(v) for k, v in value.items() if k not in _IRRELEVANT_CONFIG_KEYS}
    if isinstance(value, list):
        return [_relevant(item) for item in value]
    return value


def _canonical(text: str) -> bytes:
    return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=True).encode()
