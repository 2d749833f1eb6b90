"""Command line of the worker: settings in, exit code out.

Exit codes: 0 after a clean stop, 2 for bad settings, 3 for a busy port, 4 for a broker that cannot
be reached, 5 for a model that cannot be loaded, 1 for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloud_worker.config import WorkerConfig, load_config
from cloud_worker.errors import (
    BrokerUnavailable,
    ConfigError,
    ModelUnavailable,
    PortInUse,
    WorkerError,
)
from telemetry import run_program

EXIT_CODES: tuple[tuple[type[WorkerError], int], ...] = (
    (ConfigError, 2),
    (PortInUse, 3),
    (BrokerUnavailable, 4),
    (ModelUnavailable, 5),
    (WorkerError, 1),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until it is told to stop.

    Args:
        argv: arguments without the program's name; None takes ``sys.argv``.

    Returns:
        The process's exit code.
    """
    return run_program("kvtide-worker", argv, load=load_config, run=_run, exit_codes=EXIT_CODES)


def _run(config: WorkerConfig) -> None:
    # Imported late: a bad setting is told at once, not after torch has loaded.
    from cloud_worker.program import run

    run(config)
