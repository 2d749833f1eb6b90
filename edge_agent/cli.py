"""Command line of the agent: settings in, exit code out.

Exit codes: 0 after a clean stop, 2 for bad settings, 3 for a busy port, 4 for a store that cannot
be opened, 1 for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.config import EdgeConfig, load_config
from edge_agent.errors import AgentError, ConfigError, PortInUse, StoreError
from telemetry import run_program

EXIT_CODES: tuple[tuple[type[AgentError], int], ...] = (
    (ConfigError, 2),
    (PortInUse, 3),
    (StoreError, 4),
    (AgentError, 1),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to stop.

    Args:
        argv: arguments without the program's name; None takes ``sys.argv``.

    Returns:
        The process's exit code.
    """
    return run_program("kvtide-edge", argv, load=load_config, run=_run, exit_codes=EXIT_CODES)


def _run(config: EdgeConfig) -> None:
    # Imported late: a bad setting is told at once, not after torch has loaded.
    from edge_agent.program import run

    run(config)
