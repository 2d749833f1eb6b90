"""The agent's settings: one frozen dataclass, read once.

Precedence: command line > environment (``KVTIDE_EDGE_*``) > TOML file > default. An unknown key or
a bad value is a ``ConfigError`` that names the key and where it came from. Nothing else in the
program reads the environment, a settings file or ``sys.argv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_agent.errors import ConfigError
from telemetry import (
    SettingsReader,
    check_broker_url,
    check_settings,
    check_subject_token,
    read_secret,
)

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
    levels: tuple[str, ...] = ("fp16", "int8", "cachegen:*", "klt:*")
    """Levels that each chunk is encoded at; NAME:* stands for all of a level set, NAME:*>* for all its refinements."""
    profiles: tuple[str, ...] = ()
    """Codec profile files; empty takes the ones bundled for the model."""
    policy: str = "cachegen"
    """Policy used when a request names none."""
    estimator: str = ""
    """Bandwidth estimator used when a request names none; empty takes the one that suits the policy."""
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
        check_settings(self, ranges=_RANGES, choices=_CHOICES, error=ConfigError)
        check_subject_token(self.tenant, "tenant", error=ConfigError)
        if self.agent_id:
            check_subject_token(self.agent_id, "agent_id", most=58, error=ConfigError)
        if not self.levels:
            raise ConfigError("levels is empty, must name at least one level")
        check_broker_url(self.nats_url, "nats_url", error=ConfigError)

    def broker_token(self) -> str | None:
        """Return the broker's token from the file or the setting, or None."""
        if self.nats_token_file is not None:
            return read_secret(self.nats_token_file, "nats_token_file", error=ConfigError)
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


_READER = SettingsReader(
    EdgeConfig,
    env_prefix=ENV_PREFIX,
    program="kvtide-edge",
    description="Keep contexts as encoded KV chunks and answer questions through a worker.",
    error=ConfigError,
)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> EdgeConfig:
    """Read the settings from command line, environment and TOML file.

    Raises:
        ConfigError: an unknown key or a bad value, named with its source.
    """
    return _READER.load(argv, environ)
