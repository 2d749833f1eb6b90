"""The short form of `make sanitize`."""

from __future__ import annotations

import pytest

from tests.fuzz.sanitize import Unavailable, run


def test_damaged_bitstreams_cause_no_sanitizer_report() -> None:
    try:
        line = run(inputs=600)
    except Unavailable as error:
        pytest.skip(str(error))
    assert "no sanitizer report" in line
    tried, refused = int(line.split()[0]), int(line.split(": ")[1].split()[0])
    assert tried >= 600
    assert refused > tried / 4


def test_a_read_beyond_an_array_is_reported() -> None:
    try:
        with pytest.raises(RuntimeError, match="AddressSanitizer"):
            run(inputs=0)
    except Unavailable as error:
        pytest.skip(str(error))
