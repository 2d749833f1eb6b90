"""The outermost frame of a program: settings in, exit code out.

Invariant: an error of the program's own ends it with one sentence on stderr and the code that
stands for it; anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

SettingsT = TypeVar("SettingsT")

INTERRUPTED = 130
"""Exit code after Ctrl-C. Source: POSIX shells, 128 + SIGINT."""


def run_program(
    program: str,
    argv: Sequence[str] | None,
    *,
    load: Callable[[Sequence[str], Mapping[str, str]], SettingsT],
    run: Callable[[SettingsT], None],
    exit_codes: Sequence[tuple[type[Exception], int]],
) -> int:
    """Load the settings and run until the program is told to stop.

    Args:
        program: its name, in front of an error's sentence.
        argv: arguments without the program's name; None takes ``sys.argv``.
        load: reads the settings from arguments and environment.
        run: runs the program.
        exit_codes: the program's errors and their codes; the first that fits counts.

    Returns:
        The process's exit code.
    """
    try:
        run(load(sys.argv[1:] if argv is None else argv, os.environ))
    except tuple(kind for kind, _ in exit_codes) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return next(code for kind, code in exit_codes if isinstance(error, kind))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
