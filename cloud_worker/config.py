"""The worker's settings: one frozen dataclass, read once.

Precedence: command line > environment (``KVTIDE_WORKER_*``) > TOML file > default. An unknown key
or a bad value is a ``ConfigError`` that names the key and where it came from. Nothing else in the
program reads the environment, a settings file or ``sys.argv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloud_worker.errors import ConfigError
from telemetry import (
    SettingsReader,
    check_broker_url,
    check_settings,
    check_subject_token,
    read_secret,
)

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
        check_settings(self, ranges=_RANGES, choices=_CHOICES, error=ConfigError)
        check_subject_token(self.tenant, "tenant", error=ConfigError)
        if self.worker_id:
            check_subject_token(self.worker_id, "worker_id", error=ConfigError)
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


_READER = SettingsReader(
    WorkerConfig,
    env_prefix=ENV_PREFIX,
    program="kvtide-worker",
    description="Decode KV chunks into the model as they arrive, and answer.",
    error=ConfigError,
)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerConfig:
    """Read the settings from command line, environment and TOML file.

    Raises:
        ConfigError: an unknown key or a bad value, named with its source.
    """
    return _READER.load(argv, environ)
