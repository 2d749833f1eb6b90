"""`python -m codec`."""

from __future__ import annotations

import sys

from codec.cli import main

if __name__ == "__main__":
    sys.exit(main())
