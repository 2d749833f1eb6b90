from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("setting", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_importing_the_engine_makes_threads_sleep_unless_the_user_says_otherwise(
    setting: str | None, expected: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if setting is not None:
        environment["OMP_WAIT_POLICY"] = setting
    # The OpenMP runtime itself says what it took, to stderr, when it is loaded.
    environment["OMP_DISPLAY_ENV"] = "TRUE"
    result = subprocess.run(
        [sys.executable, "-c", "import engine"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    if "OMP_WAIT_POLICY" not in result.stderr:
        pytest.skip("this torch uses an OpenMP runtime that does not show its settings")
    assert f"OMP_WAIT_POLICY = '{expected}'" in result.stderr
