"""The agent's settings: one frozen dataclass, read once.

Precedence: command line > environment (``KVTIDE_EDGE_*``) > TOML file > default. An unknown key or
a bad value is a ``ConfigError`` that names the key and where it came from. Nothing else in the
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

from edge_agent.errors import ConfigError

ENV_PREFIX = "KVTIDE_EDGE_"


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Settings of one edge agent."""

    http_host: str = "127.0.0.1"
    """Address that the HTTP API listens on."""
    http_port: int = 8470
    """TCP port of the HTTP API; 0 lets the kernel choose, and the choice is printed."""
    http_token_file: Path | None = None
    """File with the bearer tokens that clients may use, one a line; none leaves the API open."""
    nats_url: str = "nats://127.0.0.1:4222"
    """Broker that connects this edge to the workers."""
    nats_token: str = field(default="", repr=False)
    """Token for the broker; prefer nats_token_file, which does not show in a process list."""
    nats_token_file: Path | None = None
    """File whose first line is the token for the broker."""
    nats_creds_file: Path | None = None
    """NATS credentials file (JWT and nkey seed) for the broker."""
    nats_ca_file: Path | None = None
    """PEM file of the authority that signed the broker's certificate; turns TLS on."""
    tenant: str = "default"
    """Tenant of every context here; part of each chunk's key and of each subject."""
    agent_id: str = ""
    """Name of this agent in the subjects that workers answer on; empty takes a random one."""
    model: str = "smollm2-135m"
    """Model: a name from the catalog, a folder, or a Hugging Face id."""
    device: str = "cpu"
    """Device of the edge engine: cpu or cuda."""
    dtype: str = "float32"
    """Arithmetic of the edge engine, float32 or bfloat16; part of the model's identity."""
    num_threads: int = 0
    """Threads of the edge engine; 0 takes one per core."""
    codec_threads: int = 2
    """Threads that encode one chunk."""
    cache_dir: Path | None = None
    """Folder of converted model weights; none takes the engine's default."""
    store_dir: Path = Path("~/.local/share/kvtide/edge")
    """Folder of the context store."""
    store_quota_bytes: int = 16 * 2**30
    """Bytes of chunk files kept; the least recently used contexts go first. Unit: bytes."""
    chunk_tokens: int = 1536
    """Tokens per chunk, the unit of planning; a multiple of the codec's group. Unit: tokens."""
    levels: tuple[str, ...] = ("fp16", "int8", "cachegen:*")
    """Levels that each chunk is encoded at; NAME:* stands for all of a level set."""
    profiles: tuple[str, ...] = ()
    """Codec profile files; empty takes the ones bundled for the model."""
    policy: str = "cachegen"
    """Policy used when a request names none."""
    estimator: str = "median-rate"
    """Bandwidth estimator used when a request names none."""
    deadline_s: float = 5.0
    """Time to first token aimed at when a request names none. Unit: seconds."""
    request_timeout_s: float = 120.0
    """Time after which a request is given up with 504, answer included. Unit: seconds."""
    claim_timeout_s: float = 2.0
    """Time for a worker to answer a claim, after which the client gets 503. Unit: seconds."""
    silence_timeout_s: float = 5.0
    """Time without any frame from the worker after which it counts as lost. Unit: seconds."""
    ingest_timeout_s: float = 3600.0
    """Time after which an ingest is given up. Unit: seconds."""
    drain_timeout_s: float = 30.0
    """Time that running answers get to finish after SIGTERM. Unit: seconds."""
    max_body_bytes: int = 16 * 2**20
    """Largest HTTP request body. Unit: bytes."""
    max_requests: int = 64
    """Chat requests that run at once; one more gets 503."""
    max_ingests: int = 4
    """Ingests that are accepted at once; one more gets 503."""
    default_max_tokens: int = 256
    """Answer tokens when a request sets no max_tokens. Unit: tokens."""
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
        if self.agent_id and not re.fullmatch(r"[A-Za-z0-9_-]{1,58}", self.agent_id):
            raise ConfigError(
                f"agent_id is {self.agent_id!r}, must be 1 to 58 letters, digits, '-' or '_'"
            )
        if not self.levels:
            raise ConfigError("levels is empty, must name at least one level")
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
    ("store_quota_bytes", 1, 2**60),
    ("chunk_tokens", 1, 65_536),
    ("deadline_s", 0.001, 86400),
    ("request_timeout_s", 0.1, 86400),
    ("claim_timeout_s", 0.05, 60),
    ("silence_timeout_s", 0.1, 600),
    ("ingest_timeout_s", 1, 7 * 86400),
    ("drain_timeout_s", 0, 86400),
    ("max_body_bytes", 1024, 2**31),
    ("max_requests", 1, 100_000),
    ("max_ingests", 1, 1000),
    ("default_max_tokens", 1, 2**20),
)
_CHOICES = {
    "dtype": ("float32", "bfloat16"),
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


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> EdgeConfig:
    """Merge command line, environment, TOML file and defaults.

    Args:
        argv: command line without the program's name.
        environ: the process environment; only ``KVTIDE_EDGE_*`` is looked at.

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
    return EdgeConfig(**values)


def field_docs() -> dict[str, str]:
    """Return the string under each field of ``EdgeConfig``, by name."""
    tree = ast.parse(inspect.getsource(EdgeConfig))
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
        prog="kvtide-edge",
        description="Keep contexts as encoded KV chunks and answer questions through a worker.",
        epilog=f"Each setting is also an environment variable, {ENV_PREFIX}NAME, and a TOML key.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    docs = field_docs()
    for item in fields(EdgeConfig):
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
    return typing.get_type_hints(EdgeConfig)


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
