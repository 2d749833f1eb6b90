"""The worker's settings: one frozen dataclass, read once.

Precedence: command line > environment (``KVTIDE_WORKER_*``) > TOML file > default. An unknown key
or a bad value is a ``ConfigError`` that names the key and where it came from. Nothing else in the
program reads the environment, a settings file or ``sys.argv``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cloud_worker.errors import ConfigError

ENV_PREFIX = "KVTIDE_WORKER_"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one cloud worker."""

    http_host: str = "127.0.0.1"
    """Address of the health and metrics pages; 0.0.0.0 in a container."""
    http_port: int = 8471
    """TCP port of the health and metrics pages; 0 lets the kernel choose, and the choice is printed."""
    nats_url: str = "nats://127.0.0.1:4222"
    """Broker that connects this worker to the edges."""
    nats_token: str = field(default="", repr=False)
    """Token for the broker; prefer nats_token_file, which does not show in a process list."""
    nats_token_file: Path | None = None
    """File whose first line is the token for the broker."""
    nats_creds_file: Path | None = None
    """NATS credentials file (JWT and nkey seed) for the broker."""
    nats_ca_file: Path | None = None
    """PEM file of the authority that signed the broker's certificate; turns TLS on."""
    tenant: str = "default"
    """Tenant whose sessions this worker takes; part of each chunk's key and of each subject."""
    worker_id: str = ""
    """Name of this worker in subjects, logs and answers; empty takes a random one."""
    model: str = "smollm2-135m"
    """Model: a name from the catalog, a folder, or a Hugging Face id."""
    device: str = "cpu"
    """Device of the engine: cpu or cuda."""
    dtype: str = "float32"
    """Arithmetic of the engine, float32 or bfloat16; part of the model's identity."""
    num_threads: int = 0
    """Threads of the engine; 0 takes one per core."""
    codec_threads: int = 2
    """Threads that decode one chunk."""
    cache_dir: Path | None = None
    """Folder of converted model weights and calibrations; none takes the engine's default."""
    profiles: tuple[str, ...] = ()
    """Codec profile files; empty takes the ones bundled for the model."""
    memory_budget_bytes: int = 4 * 2**30
    """Memory that all sessions together may hold: KV caches, windows, chunks. Unit: bytes."""
    window_bytes: int = 4 * 2**20
    """Largest window granted to one session. Unit: bytes."""
    segment_bytes: int = 256 * 2**10
    """Largest payload of a data frame that is taken. Unit: bytes."""
    max_sessions: int = 64
    """Sessions that are open at once; one more is refused."""
    max_answer_tokens: int = 2048
    """Most answer tokens that a session may ask for. Unit: tokens."""
    prefill_step_tokens: int = 256
    """Tokens prefilled before another session gets its turn, and before a cancel is seen. Unit: tokens."""
    session_idle_timeout_s: float = 30.0
    """Time without any frame from the agent after which its session is freed. Unit: seconds."""
    drain_timeout_s: float = 60.0
    """Time that open sessions get to finish after SIGTERM. Unit: seconds."""
    connect_timeout_s: float = 20.0
    """Time for the broker to be reached at start, after which the program exits. Unit: seconds."""
    calibrate: str = "cached"
    """Where the speeds told to the planner come from: cached, measure (anew) or none."""
    evaluation_cache_bytes: int = 2 * 2**30
    """Exact KV caches kept for evaluations; 0 turns evaluations off. Unit: bytes."""
    slo_s: float = 5.0
    """Deadline that the TTFT histogram has a bucket at. Unit: seconds."""
    log_level: str = "info"
    """Least severe log line that is written: debug, info, warning or error."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high or not math.isfinite(value):
                raise ConfigError(f"{name} is {value}, must be from {low:g} to {high:g}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, must be one of {', '.join(allowed)}"
                )
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.tenant):
            # The tenant is one token of a NATS subject; a dot or wildcard would leave its fence.
            raise ConfigError(
                f"tenant is {self.tenant!r}, must be 1 to 64 letters, digits, '-' or '_'"
            )
        if self.worker_id and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.worker_id):
            raise ConfigError(
                f"worker_id is {self.worker_id!r}, must be 1 to 64 letters, digits, '-' or '_'"
            )
        if not re.match(r"(nats|tls|ws|wss)://", self.nats_url):
            raise ConfigError(f"nats_url is {self.nats_url!r}, must start with nats:// or tls://")

    def broker_token(self) -> str | None:
        """Return the broker's token from the file or the setting, or None."""
        if self.nats_token_file is not None:
            return read_secret(self.nats_token_file, "nats_token_file")
        return self.nats_token or None


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("http_port", 0, 65535),
    ("num_threads", 0, 1024),
    ("codec_threads", 1, 256),
    ("memory_budget_bytes", 1, 2**50),
    ("window_bytes", 4096, 2**30),
    ("segment_bytes", 1024, 2**23),
    ("max_sessions", 1, 100_000),
    ("max_answer_tokens", 1, 2**20),
    ("prefill_step_tokens", 1, 2**20),
    ("session_idle_timeout_s", 0.1, 3600),
    ("drain_timeout_s", 0, 86400),
    ("connect_timeout_s", 0.1, 3600),
    ("evaluation_cache_bytes", 0, 2**50),
    ("slo_s", 0.001, 86400),
)
_CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "calibrate": ("cached", "measure", "none"),
    "log_level": ("debug", "info", "warning", "error"),
}


def read_secret(path: Path, key: str) -> str:
    """Read the first line of a secret's file; the error names the key, never the content."""
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from error
    if not lines or not lines[0].strip():
        raise ConfigError(f"{key}: {path} is empty")
    return lines[0].strip()


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerConfig:
    """Merge command line, environment, TOML file and defaults.

    Args:
        argv: command line without the program's name.
        environ: the process environment; only ``KVTIDE_WORKER_*`` is looked at.

    Returns:
        The validated settings.

    Raises:
        ConfigError: an unknown key or a bad value, named with its source.
    """
    arguments = vars(_parser().parse_args(argv))
    from_env = {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in environ.items()
        if key.startswith(ENV_PREFIX)
    }
    config_file = arguments.pop("config") or from_env.pop("config", None)
    from_toml = _read_toml(Path(config_file)) if config_file else {}
    from_cli = {key: value for key, value in arguments.items() if value is not None}
    kinds = _field_types()
    values: dict[str, Any] = {}
    # Later sources override earlier ones.
    for source, settings in (
        (f"file {config_file}", from_toml),
        ("environment", from_env),
        ("command line", from_cli),
    ):
        for key, raw in settings.items():
            if key not in kinds:
                shown = ENV_PREFIX + key.upper() if source == "environment" else key
                raise ConfigError(f"unknown setting {shown!r} ({source})")
            try:
                values[key] = _convert(raw, kinds[key])
            except (ValueError, TypeError) as error:
                # The value itself is not repeated: it may be a secret.
                raise ConfigError(f"setting {key!r} ({source}): {error}") from error
    return WorkerConfig(**values)


def field_docs() -> dict[str, str]:
    """Return the string under each field of ``WorkerConfig``, by name."""
    tree = ast.parse(inspect.getsource(WorkerConfig))
    assert isinstance(tree.body[0], ast.ClassDef)
    docs: dict[str, str] = {}
    name = ""
    for node in tree.body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            docs[name] = str(node.value.value)
            name = ""
    return docs


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvtide-worker",
        description="Decode KV chunks into the model as they arrive, and answer.",
        epilog=f"Each setting is also an environment variable, {ENV_PREFIX}NAME, and a TOML key.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    docs = field_docs()
    for item in fields(WorkerConfig):
        default = "none" if item.default is None else item.default
        help_text = f"{docs[item.name]} [default: {default}]".replace("%", "%%")
        parser.add_argument(
            "--" + item.name.replace("_", "-"), metavar="VALUE", default=None, help=help_text
        )
    return parser


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _field_types() -> dict[str, Any]:
    return typing.get_type_hints(WorkerConfig)


def _convert(raw: object, kind: Any) -> object:
    """Convert a raw setting to a field's type; text comes from the shell, other types from TOML."""
    if isinstance(kind, types.UnionType):
        kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
    if kind is Path:
        if not isinstance(raw, str) or not raw:
            raise ValueError("must be a path")
        return Path(raw).expanduser()
    if kind is str:
        if not isinstance(raw, str):
            raise ValueError("must be text")
        return raw
    if kind is int:
        return _to_int(raw)
    if kind is float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError("must be a number")
        try:
            return float(raw)
        except ValueError:
            raise ValueError("must be a number") from None
    # What is left are tuples of text: a TOML list, or text separated by commas.
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a list of texts")
    return tuple(part.strip() for part in parts if part.strip())


def _to_int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise ValueError("must be a whole number")
    try:
        return int(raw)
    except ValueError:
        raise ValueError("must be a whole number") from None
